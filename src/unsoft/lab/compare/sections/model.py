"""The same questions asked of a real model: it is inspected as it is, and
each mechanism is swapped in, without training.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from unsoft.lab.compare.column import Column
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import Request, Section
from unsoft.lab.compare.store import code_digest, folder_digest
from unsoft.lab.compare.subject import Subject
from unsoft.lab.report.comparison.page import Part
from unsoft.lab.report.escape import printable
from unsoft.lab.report.page import number

_LENGTH, _SEQUENCES = 256, 4
TEXT = "the page of text that unsoft brings (lab/interpret/inspection/sample.txt)"
_NEAR = 1.1
"""A perplexity that grows by less counts as near to what it was."""
INSPECTION, PERPLEXITY = "model", "perplexity"


def jobs(request: Request) -> list[Job]:
    return Model(str(request.model)).jobs(request.subjects)


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
        """The inspection and the perplexity before anything is swapped, then
        the perplexity after each swap, in place.
        """
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
        found = [
            Job(INSPECTION, "", asked, self._inspected, 30.0, required=True, **options),
            Job(PERPLEXITY, "", asked | {"name": PERPLEXITY}, self._perplexity, 5.0, **options),
        ]
        for subject in subjects:
            question = asked | {"name": PERPLEXITY, "mechanism": subject.identity}
            found.append(
                Job(PERPLEXITY, subject.label, question, partial(self._swapped, subject), 5.0, **options)
            )
        return found

    def _load(self) -> object:
        return self.loaded

    @property
    def _length(self) -> int:
        return min(_LENGTH, getattr(self.loaded[0].config, "max_position_embeddings", None) or _LENGTH)

    def _inspected(self) -> Rows:
        from unsoft.lab.interpret import inspection

        network, tokenizer = self.loaded
        found = inspection.inspect(
            network,
            _text(),
            tokenizer=tokenizer,
            batch_size=2,
            max_length=self._length,
            max_sequences=_SEQUENCES,
        )
        return [replace(found, model=self.name).to_dict()]

    def _swapped(self, subject: Subject) -> Rows:
        from unsoft.hf import swap

        self._check_language_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of mechanisms that start at random
            swap(self.loaded[0], subject.mechanism)
        return self._perplexity()

    def _perplexity(self) -> Rows:
        """exp of the mean surprise, in nats, at each next token of the text."""
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


def parts(results: Results) -> Iterator[Part]:
    """Perplexities, the heads in each role, and collapse by depth."""
    inspected = results.get(INSPECTION)
    if not inspected:
        return
    from unsoft.lab.interpret.inspection import Inspection
    from unsoft.lab.interpret.inspection.page import depth_charts, role_table
    from unsoft.lab.interpret.inspection.result import ROLES

    found = Inspection(**{key: x for key, x in inspected[0].items() if key != "schema"})
    yield Part(
        printable(found.model, 80),
        f"{len(found.heads)} heads, {found.tokens} tokens of text in {found.sequences} sequences. The same"
        " questions, asked of its own"
        " attention as unsoft inspect does.",
    )
    yield perplexities(results)
    for role in ROLES:
        table = role_table(role, found)
        yield Part(
            f"{table['count']} {table['name']} heads",
            table["meaning"],
            columns=table["columns"],
            rows=table["rows"],
        )
    for stack in depth_charts(found):
        yield Part(charts=stack["charts"])


def perplexities(results: Results) -> Part:
    """Before and after each swap, the least harm first."""
    heading, titles = (
        "With each mechanism in place of its own",
        ("mechanism", "perplexity after", "times that before"),
    )
    before = results.get(PERPLEXITY)
    if not before:
        return Part(heading, f"{results.problem(PERPLEXITY)}.", in_terminal=True)
    rows, refused = [], []
    for label in results.labels:
        if after := results.get(PERPLEXITY, label):
            numbers = (after[0]["perplexity"], after[0]["perplexity"] / before[0]["perplexity"])
            rows.append(dict(zip(titles, (label, *numbers), strict=True)))
        elif problem := results.problem(PERPLEXITY, label):
            refused.append(f"{printable(label)}: {problem}.")
    near = sum(row[titles[2]] < _NEAR for row in rows)
    text = (
        f"Perplexity on {TEXT}, {before[0]['tokens']} tokens: {number(before[0]['perplexity'])} as the model"
        " is. Each mechanism stands in all"
        f" layers as it starts, without training: {near} of {len(rows)} stay within {_NEAR - 1:.0%} of that."
    )
    return Part(
        heading,
        " ".join([text, *(["Not swapped:", *refused] if refused else [])]),
        columns=[{"name": title, "title": title, "help": ""} for title in titles],
        rows=sorted(rows, key=lambda row: row[titles[1]]),
        in_terminal=True,
    )


def _times(results: Results, label: str) -> float | None:
    before, after = results.get(PERPLEXITY), results.get(PERPLEXITY, label)
    return float(after[0]["perplexity"] / before[0]["perplexity"]) if before and after else None


SECTION = Section(
    name="model",
    order=80,
    title="Model",
    question="What becomes of a real model?",
    jobs=jobs,
    parts=parts,
    columns=[
        Column(
            "perplexity",
            "perplexity",
            (
                "of the model with the mechanism in all layers, without training, over that of the model as"
                " it is"
            ),
            _times,
            _NEAR,
            2.0,
            low_is_good=True,
            noise=1e-3,
            unit="times",
            why="1 is the model as it is; yes up to 1.1 times its perplexity, partly up to twice.",
        )
    ],
    needs="model",
)
