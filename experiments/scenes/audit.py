"""Audit the relevance maps: the brightest cell of a word must be the object's own, and must matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from experiments.scenes.captions import WORDS
from experiments.scenes.drawing import CELLS, SHAPES, Scene
from experiments.scenes.pictures import relevance_picture
from unsoft.lab.evidence import resampled_mean
from unsoft.lab.interpret.steering.vision import (
    Captioned,
    log_likelihoods,
    masked,
    relevance,
)


def audit_maps(
    model: PreTrainedModel, scenes: Sequence[Scene], examples: Sequence[Captioned]
) -> list[dict[str, Any]]:
    """Return three measures with confidence intervals, each next to its control."""
    generator = torch.Generator().manual_seed(0)
    hits: list[float] = []
    lost: list[float] = []
    lost_elsewhere: list[float] = []
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for scene, example in zip(scenes, examples, strict=True):
        relevant = relevance(model, example.inputs, example.caption)
        cells = {thing.shape: thing.cell for thing in scene.things}
        plain = log_likelihoods(model, example.inputs, example.caption)
        for position, token in enumerate(example.caption.tolist()):
            shape = WORDS[token]
            if shape not in SHAPES:
                continue
            ratios[shape in cells].append(relevant.ratios[position].item())
            if shape not in cells or not bool(relevant.visual[position]):
                continue
            top = int(relevant.maps[position].argmax())
            elsewhere = (top + 1 + int(torch.randint(CELLS**2 - 1, (1,), generator=generator))) % CELLS**2
            hits.append(float(top == cells[shape]))
            for cell, drops in ((top, lost), (elsewhere, lost_elsewhere)):
                hidden = torch.arange(CELLS**2) == cell
                after = log_likelihoods(model, masked(model, example.inputs, hidden), example.caption)
                drops.append(float(plain[position] - after[position]))
    rows = []
    if hits:
        rows += [
            _row("word's brightest cell holds the thing", hits, 1 / CELLS**2, "by chance"),
            _row(
                "nats lost when that cell is masked",
                lost,
                sum(lost_elsewhere) / len(lost_elsewhere),
                "another cell masked",
            ),
        ]
    if ratios[True] and ratios[False]:
        true = sum(ratios[True]) / len(ratios[True])
        rows.append(_row("log-likelihood ratio of invented words", ratios[False], true, "of true words"))
    return rows


def _row(name: str, values: list[float], control: float, what: str) -> dict[str, Any]:
    mean = asdict(resampled_mean(torch.tensor(values, dtype=torch.float64)))
    return {"name": name, **mean, "control": control, "control_is": what, "words": len(values)}


def shown_maps(
    model: PreTrainedModel,
    scenes: Sequence[Scene],
    examples: Sequence[Captioned],
    steered: Sequence[Sequence[str]],
) -> list[dict[str, Any]]:
    """Return for the page each scene, its captions, and a picture for each named object."""
    shown = []
    for scene, example, after in zip(scenes, examples, steered, strict=True):
        relevant = relevance(model, example.inputs, example.caption, alpha=float("-inf"))
        words = [WORDS[token] for token in example.caption.tolist()]
        named = [
            {
                "word": word,
                "there": word in scene.shapes,
                "ratio": relevant.ratios[position].item(),
                "picture": relevance_picture(scene.picture(), relevant.maps[position]),
            }
            for position, word in enumerate(words)
            if word in SHAPES
        ]
        shown.append(
            {
                "before": " ".join(words[:-1]),
                "after": " ".join(after[:-1]),
                "picture": relevance_picture(scene.picture()),
                "words": named,
            }
        )
    return shown
