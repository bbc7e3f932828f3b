"""All measurements of a comparison, in the order in which they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unsoft.bench.record import machine
from unsoft.compare import (
    collapse,
    cost,
    focus,
    gradient_facts,
    hijack,
    linear_facts,
    magnitude_facts,
    sign,
    solver,
)
from unsoft.compare.job import Job, Rows
from unsoft.compare.level import Level
from unsoft.compare.subject import Subject

REFERENCES = ("softmax", "cog", "relu2", "identity", "gpam", "linear-relu", "magnitude")
"""Measured in any case: the claims are about them. They cost nothing, so no time is taken of them."""
SECTIONS = ("focus", "hijack", "sign", "collapse", "solver", "cost", "claims")


def plan(subjects: Sequence[Subject], level: Level, only: Sequence[str] = ()) -> list[Job]:
    """Jobs of the wanted sections; all of them unless told otherwise."""
    known = {subject.label for subject in subjects}
    more = [Subject(name, name) for name in REFERENCES if name not in known]
    jobs: list[Job] = []
    for section, make in _SECTIONS.items():
        if not only or section in only:
            jobs += make(subjects if section == "cost" else [*subjects, *more], level)
    return jobs


def _job(
    name: str, subject: Subject | None, compute: Callable[[], Rows], expected: float, **question: Any
) -> Job:
    timed = question.pop("timed", False)
    asked = {"name": name, **question}
    if subject is not None:
        asked["mechanism"] = subject.identity
    return Job(name, "" if subject is None else subject.label, asked, compute, expected, timed)


def _sizes(level: Level, *names: str) -> dict[str, Any]:
    everything = dataclasses.asdict(level)
    return {name: everything[name] for name in names}


def _focus(subjects: Sequence[Subject], level: Level) -> list[Job]:
    return [
        _job(
            "focus",
            s,
            lambda s=s: focus.focus(s, level),
            level.keys * level.rows * 1.2e-5,
            **_sizes(level, "keys", "rows"),
        )
        for s in subjects
    ]


def _hijack(subjects: Sequence[Subject], level: Level) -> list[Job]:
    return [_job("hijack", s, lambda s=s: hijack.hijack(s), 0.1) for s in subjects]


def _sign(subjects: Sequence[Subject], level: Level) -> list[Job]:
    kinds = (
        ("curves", sign.curves, 0.1, {}),
        ("map", sign.heat_map, 0.02, {}),
        ("sums", sign.sums, 0.05, {}),
        ("opposed", lambda s: sign.opposed(s, level), 0.15, _sizes(level, "geometries")),
    )
    return [
        _job(name, s, lambda s=s, measure=measure: measure(s), expected, **sizes)
        for name, measure, expected, sizes in kinds
        for s in subjects
    ]


def _collapse(subjects: Sequence[Subject], level: Level) -> list[Job]:
    return [
        _job("collapse", s, lambda s=s: collapse.collapse(s, level), level.depth * level.seeds * 0.012, **_sizes(level, "depth", "seeds"))
        for s in subjects
    ]  # fmt: skip


def _solver(subjects: Sequence[Subject], level: Level) -> list[Job]:
    return [
        _job(f"solver, {kind}", None, lambda kind=kind: solver.solver(kind), 0.5) for kind in solver.KINDS
    ]


def _cost(subjects: Sequence[Subject], level: Level) -> list[Job]:
    about = {
        "mechanisms": [s.identity for s in subjects], "labels": [s.label for s in subjects],
        "timed": True, "threads": torch.get_num_threads(), "machine": machine(), **_sizes(level, "rounds", "seconds"),
    }  # fmt: skip
    jobs = []
    for n in level.lengths:
        seconds = len(subjects) * level.rounds * 0.01 * (n / 512) ** 2 + 2
        jobs.append(
            _job(
                f"training at {n}",
                None,
                lambda n=n: cost.training(subjects, n, level),
                seconds,
                length=n,
                **about,
            )
        )
        jobs.append(
            _job(
                f"decoding at {n}",
                None,
                lambda n=n: cost.decoding(subjects, n, level),
                2.0,
                length=n,
                **about,
            )
        )
    lengths = level.lengths
    return [
        *jobs,
        _job("memory", None, lambda: cost.memory(subjects, lengths), 8.0, lengths=lengths, **about),
    ]


def _claims(subjects: Sequence[Subject], level: Level) -> list[Job]:
    keys = level.keys
    timed = {
        "timed": True,
        "threads": torch.get_num_threads(),
        "machine": machine(),
        **_sizes(level, "lengths", "rounds"),
    }
    return [
        _job("negative logits", None, gradient_facts.negative_logits, 0.1),
        _job("sum normalised", None, gradient_facts.sum_normalised, 0.1),
        _job("norm ratios", None, linear_facts.norm_ratios, 0.3),
        _job("causal ranks", None, linear_facts.causal_ranks, 0.1),
        _job("dimensions", None, lambda: linear_facts.dimensions(keys), 1.5, keys=keys),
        _job("features", None, linear_facts.features, 0.5),
        _job("decay", None, linear_facts.decay, 0.1),
        _job("magnitude of sets", None, magnitude_facts.sets, 0.3),
        _job("stability", None, magnitude_facts.stability, 0.1),
        _job("units", None, magnitude_facts.units, 0.1),
        _job("example", None, magnitude_facts.example, 0.1),
        _job("price of the solver", None, lambda: magnitude_facts.price(level), 2.0, **timed),
    ]


_SECTIONS = {
    "focus": _focus, "hijack": _hijack, "sign": _sign, "collapse": _collapse, "solver": _solver, "claims": _claims, "cost": _cost,
}  # fmt: skip
