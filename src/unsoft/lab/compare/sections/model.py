"""A pretrained model: it is inspected as it is, and each mechanism is swapped in without training."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import AFTER_TRAINING, PRICE, Request, Section
from unsoft.lab.compare.store import code_digest, folder_digest
from unsoft.lab.report.comparison import Part
from unsoft.lab.report.page import number, printable

_LENGTH, _SEQUENCES = 256, 4
TEXT = "the page of text that unsoft brings (lab/interpret/inspection/sample.txt)"
_NEAR = 1.1
"""A perplexity that grows by a smaller factor counts as near to the original."""
INSPECTION, PERPLEXITY = "model", "perplexity"


SECTION = Section(order=80, group=PRICE, question="What becomes of a real model?", needs="model")


@SECTION.jobs
def jobs(request: Request) -> list[Job]:
    return Model(str(request.model)).jobs(request.candidates)


class Model:
    """A model for :func:`unsoft.hf.load_model`, loaded when it is first needed."""

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

    def jobs(self, candidates: Sequence[Candidate]) -> list[Job]:
        """Return jobs for the inspection and the perplexity of the model, then for each swap, in place."""
        about = {
            "model": self.name,
            "length": _LENGTH,
            "sequences": _SEQUENCES,
            "hf": code_digest("hf/", "lab/interpret/inspection/"),
            "transformers": importlib.metadata.version("transformers"),
            "content": None if self.folder is None else folder_digest(self.folder),
        }
        options: dict[str, Any] = {"keep": self.folder is not None, "prepare": self._load}
        asked = {"name": INSPECTION, **about}
        jobs = [
            Job(INSPECTION, "", asked, self._inspected, 30.0, required=True, **options),
            Job(PERPLEXITY, "", asked | {"name": PERPLEXITY}, self._perplexity, 5.0, **options),
        ]
        for one in candidates:
            question = asked | {"name": PERPLEXITY, "mechanism": one.identity}
            jobs.append(Job(PERPLEXITY, one.label, question, partial(self._swapped, one), 5.0, **options))
        return jobs

    def _load(self) -> object:
        return self.loaded

    @property
    def _length(self) -> int:
        return min(_LENGTH, getattr(self.loaded[0].config, "max_position_embeddings", None) or _LENGTH)

    def _inspected(self) -> Rows:
        from unsoft.lab.interpret import inspection

        network, tokenizer = self.loaded
        sizes: dict[str, Any] = {"batch_size": 2, "max_length": self._length, "max_sequences": _SEQUENCES}
        report = inspection.inspect(network, _text(), tokenizer=tokenizer, **sizes)
        return [replace(report, model=self.name).to_dict()]

    def _swapped(self, candidate: Candidate) -> Rows:
        from unsoft.hf import swap

        self._check_language_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of mechanisms that start at random
            swap(self.loaded[0], candidate.mechanism)
        return self._perplexity()

    def _perplexity(self) -> Rows:
        """Measure exp of the mean surprise, in nats, at each next token of the text."""
        from unsoft.lab.interpret.models import batches

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
        return [{"perplexity": math.exp(min(total / count, 700.0)), "tokens": count}]

    def _check_language_model(self) -> None:
        network = self.loaded[0]
        if not network.can_generate() or network.config.is_encoder_decoder:
            raise ValueError(f"{type(network).__name__} predicts no next token, so it has no perplexity")


def _text() -> str:
    from unsoft.lab.interpret import inspection

    return (Path(inspection.__file__).parent / "sample.txt").read_text()


@SECTION.parts
def parts(results: Results) -> Iterator[Part]:
    """Yield perplexities, the heads in each role, and collapse by depth."""
    inspected = results.get(INSPECTION)
    if not inspected:
        return
    from unsoft.lab.interpret.inspection import Inspection
    from unsoft.lab.interpret.inspection.page import depth_charts, role_table
    from unsoft.lab.interpret.inspection.result import ROLES

    report = Inspection(**{key: x for key, x in inspected[0].items() if key != "schema"})
    yield Part(
        printable(report.model, 80),
        f"{len(report.heads)} heads, {report.tokens} tokens of text in {report.sequences} sequences. The same"
        " questions, asked of its own attention as unsoft inspect does.",
    )
    yield perplexities(results)
    for role in ROLES:
        table = role_table(role, report)
        heading = f"{table['count']} {table['name']} heads"
        yield Part(heading, table["meaning"], table["columns"], table["rows"])
    for stack in depth_charts(report):
        yield Part(charts=stack["charts"])


def perplexities(results: Results) -> Part:
    """Return the perplexity before and after each swap, the least harm first."""
    heading = "With each mechanism in place of its own"
    before = results.get(PERPLEXITY)
    if not before:
        return Part(heading, f"{results.problem(PERPLEXITY)}.", in_terminal=True)
    rows, unsupported = [], []
    for label in results.labels:
        if after := results.get(PERPLEXITY, label):
            perplexity = after[0]["perplexity"]
            rows.append((label, perplexity, perplexity / before[0]["perplexity"]))
        elif problem := results.problem(PERPLEXITY, label):
            unsupported.append(f"{printable(label)}: {problem}.")
    near = sum(times < _NEAR for _, _, times in rows)
    text = (
        f"Perplexity on {TEXT}, {before[0]['tokens']} tokens: {number(before[0]['perplexity'])} as the model"
        " is. Each mechanism replaces the attention of all layers with its initial parameters, without"
        f" training: {near} of {len(rows)} stay within {_NEAR - 1:.0%} of that."
    )
    text = " ".join([text, *(["Not swapped:", *unsupported] if unsupported else [])])
    titles = ("mechanism", "perplexity after", "times that before")
    return Part.table(heading, text, titles, sorted(rows, key=lambda row: row[1]), in_terminal=True)


@SECTION.column(
    "perplexity",
    "perplexity",
    yes=_NEAR,
    partly=2.0,
    low_is_good=True,
    noise=1e-3,
    is_ratio=True,
    unit="times",
    group=AFTER_TRAINING,
    need="replace softmax without training",
)
def _times(results: Results, label: str) -> float | None:
    """Of the model with the mechanism in all layers, without training, over that of the model as it is.

    1 is the model as it is; yes up to 1.1 times its perplexity, partly up to twice.
    """
    before, after = results.get(PERPLEXITY), results.get(PERPLEXITY, label)
    return float(after[0]["perplexity"] / before[0]["perplexity"]) if before and after else None
