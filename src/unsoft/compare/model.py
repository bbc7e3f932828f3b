"""The same questions asked of a real model: it is inspected as it is, and each mechanism is swapped in, without training."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from unsoft.compare.job import Answer, Job
from unsoft.compare.store import code_digest, folder_digest
from unsoft.compare.subject import Subject

_LENGTH, _SEQUENCES = 256, 4
TEXT = "the page of text that unsoft brings (hf/inspection/sample.txt)"
_NEAR = 1.1
"""A perplexity that grows by less counts as near to what it was."""
INSPECTION, PERPLEXITY = "model", "perplexity"


class Model:
    """A model that :func:`unsoft.hf.load_model` knows; loaded when it is first needed."""

    def __init__(self, name: str) -> None:
        from unsoft.hf.models import PACKAGED

        self.name = name
        packaged = PACKAGED.get(name)
        folder = Path(name) if packaged is None else packaged.path()
        self.folder = folder if folder.is_dir() else None
        """None for a name on a hub, whose content can change unseen."""

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        from unsoft.hf.models import load_model

        network, tokenizer = load_model(self.name)
        if tokenizer is None:
            raise ValueError(f"model: {self.name} has no tokenizer, so it cannot read text")
        return network, tokenizer

    def jobs(self, subjects: Sequence[Subject]) -> list[Job]:
        """The inspection and the perplexity before anything is swapped, then the perplexity after each swap, in place."""
        about = {
            "model": self.name, "length": _LENGTH, "sequences": _SEQUENCES, "hf": code_digest("hf"),
            "transformers": importlib.metadata.version("transformers"),
            "content": None if self.folder is None else folder_digest(self.folder),
        }  # fmt: skip
        options: dict[str, Any] = {"keep": self.folder is not None, "prepare": self._load}
        jobs = [
            Job(
                INSPECTION,
                self.name,
                {"name": INSPECTION, **about},
                lambda: [self._inspected()],
                30.0,
                **options,
            ),
            Job(PERPLEXITY, "", {"name": PERPLEXITY, **about}, lambda: [self._perplexity()], 5.0, **options),
        ]
        for subject in subjects:
            question = {"name": PERPLEXITY, "mechanism": subject.identity, **about}
            jobs.append(
                Job(PERPLEXITY, subject.label, question, lambda s=subject: [self._swapped(s)], 5.0, **options)
            )
        return jobs

    def _load(self) -> object:
        return self.loaded

    @property
    def _length(self) -> int:
        return min(_LENGTH, getattr(self.loaded[0].config, "max_position_embeddings", None) or _LENGTH)

    def _inspected(self) -> dict[str, Any]:
        from unsoft.hf import inspection

        network, tokenizer = self.loaded
        found = inspection.inspect(
            network,
            _text(),
            tokenizer=tokenizer,
            batch_size=2,
            max_length=self._length,
            max_sequences=_SEQUENCES,
        )
        return replace(found, model=self.name).to_dict()

    def _swapped(self, subject: Subject) -> dict[str, Any]:
        from unsoft.hf import swap

        self._check_language_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of mechanisms that start at random
            swap(self.loaded[0], subject.mechanism)
        return self._perplexity()

    def _perplexity(self) -> dict[str, Any]:
        """exp of the mean surprise, in nats, at each next token of the text."""
        from unsoft.hf.inspection.batches import batches

        self._check_language_model()
        network, tokenizer = self.loaded
        total, count = 0.0, 0
        for batch in batches(_text(), tokenizer, 2, self._length, network.device, _SEQUENCES):
            with torch.no_grad():
                logits = network(**batch.inputs, use_cache=False).logits[:, :-1].double()
            real = batch.inputs["attention_mask"][:, 1:].bool()
            surprise = -logits.log_softmax(-1).gather(-1, batch.inputs["input_ids"][:, 1:, None])[..., 0]
            total, count = total + float(surprise[real].sum()), count + int(real.sum())
        if not math.isfinite(total):
            raise ValueError("its logits are not finite numbers")
        return {"perplexity": math.exp(min(total / count, 700.0)), "tokens": count}

    def _check_language_model(self) -> None:
        network = self.loaded[0]
        if not network.can_generate() or network.config.is_encoder_decoder:
            raise ValueError(f"{type(network).__name__} predicts no next token, so it has no perplexity")


def swap_table(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Perplexity before and after each swap, the least harm first; None if no model took part."""
    asked = [answer for answer in answers if answer.name == PERPLEXITY]
    if not asked:
        return None
    before = next((a.rows[0] for a in asked if not a.mechanism and a.rows), None)
    rows = []
    for answer in asked:
        if answer.mechanism:
            after = answer.rows[0]["perplexity"] if answer.rows else None
            times = after / before["perplexity"] if before is not None and after is not None else None
            rows.append(
                {"mechanism": answer.mechanism, "after": after, "times": times, "problem": answer.problem}
            )
    return {
        "text": TEXT,
        "tokens": 0 if before is None else before["tokens"],
        "before": None if before is None else before["perplexity"],
        "problem": next((a.problem for a in asked if not a.mechanism), ""),
        "near": sum(row["times"] is not None and row["times"] < _NEAR for row in rows),
        "rows": sorted((row for row in rows if row["after"] is not None), key=lambda row: row["after"]),
        "refused": [row for row in rows if row["after"] is None],
    }


def model_variables(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """What the page's section on the model needs; None if none was inspected."""
    answer = next((a for a in answers if a.name == INSPECTION and a.rows), None)
    if answer is None:
        return None
    from unsoft.hf.inspection import Inspection
    from unsoft.hf.inspection.page import depth_charts, role_table
    from unsoft.hf.inspection.roles import ROLES

    found = Inspection(**{key: x for key, x in answer.rows[0].items() if key != "schema"})
    titles = (("mechanism", "mechanism"), ("after", "perplexity after"), ("times", "times that before"))
    return {
        "inspection": found,
        "roles": [role_table(role, found) for role in ROLES],
        "stacks": depth_charts(found),
        "swaps": swap_table(answers),
        "swap_columns": [{"name": name, "title": title, "help": ""} for name, title in titles],
    }


def _text() -> str:
    from unsoft.hf import inspection

    return (Path(inspection.__file__).parent / "sample.txt").read_text()
