"""The scoreboard: mechanisms by questions, each cell a number with a reading of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unsoft.report.results import Results


@dataclass(frozen=True)
class Question:
    """``yes`` and ``partly`` are the thresholds of the number; above them is good unless ``low_is_good``."""

    name: str
    title: str
    help: str
    section: str
    answer: Callable[[Results, str], float | None]
    yes: float
    partly: float
    low_is_good: bool = False

    def reading(self, value: float | None) -> str:
        """In words: yes, partly, no, or not run."""
        if value is None:
            return "not run"
        good = (lambda limit: value <= limit) if self.low_is_good else (lambda limit: value >= limit)
        return "yes" if good(self.yes) else "partly" if good(self.partly) else "no"


def scoreboard(results: Results) -> list[dict[str, Any]]:
    """One record for each mechanism: label, summary and {question: {value, reading}}."""
    return [
        {
            "mechanism": subject["label"], "summary": subject["summary"],
            "cells": {
                q.name: {"value": (value := q.answer(results, subject["label"])), "reading": q.reading(value)} for q in QUESTIONS
            },
        }
        for subject in results.record["subjects"]
    ]  # fmt: skip


def _lowest_sparsity(results: Results, label: str) -> float | None:
    found = [
        row["S"] for row in results.get("focus", label) if row["kind"] == "measured" and row["beta"] == 0
    ]
    return min(found, default=None)


def _field(name: str, field: str) -> Callable[[Results, str], float | None]:
    def answer(results: Results, label: str) -> float | None:
        rows = results.get(name, label)
        return rows[0][field] if rows else None

    return answer


def _share_at_50(results: Results, label: str) -> float | None:
    rows = results.get("hijack", label)
    return next((row["share"] for row in rows if row["kind"] == "measured" and row["clones"] == 50), None)


def _last_depth(field: str, skip: bool) -> Callable[[Results, str], float | None]:
    def answer(results: Results, label: str) -> float | None:
        rows = [row for row in results.get("collapse", label) if row["skip"] is skip]
        return rows[-1][field] if rows else None

    return answer


def _learning(results: Results, label: str) -> float | None:
    rows = results.get("curves", label)
    largest = max((row["gradient"] for row in rows), default=0.0)
    if not largest:
        return 0.0 if rows else None
    return next(row["gradient"] for row in rows if row["logit"] == -4.0) / largest


def _cost(what: str) -> Callable[[Results, str], float | None]:
    def answer(results: Results, label: str) -> float | None:
        rows = [row for row in results.matching(what) if row.get("mechanism") == label]
        return max(rows, key=lambda row: row["length"])["ratio"] if rows else None

    return answer


QUESTIONS = (
    Question("focuses", "focuses?", "lowest S measured for logits of mean 0: 1 is even, 0 is all on one key", "focus",
             _lowest_sparsity, 0.3, 0.6, low_is_good=True),
    Question("deletes", "deletes?", "share of the weight that subtracts, on random tokens", "sign", _field("sums", "negative"), 0.25, 0.01),
    Question("opposed", "opposed ≠ irrelevant?", "weight of an irrelevant key minus that of an opposed one, in fair shares of a row",
             "sign", _field("opposed", "gap"), 1.5, 0.75),
    Question("clones", "resists clones?", "share that a key of relevance 20 keeps against 50 clones of relevance 1; one clone leaves it 0.95 under softmax", "hijack",
             _share_at_50, 0.8, 0.33),
    Question("rank", "keeps rank?", "residual over norm after the deepest layer, attention only: 0 means that all tokens are the same", "collapse",
             _last_depth("residual", False), 0.5, 0.1),
    Question("identity", "keeps tokens apart?", "tokens that can be told by their input after the deepest layer, with skip connections", "collapse",
             _last_depth("recovery", True), 0.75, 0.25),
    Question("learns", "learns at logit −4?", "size of the row's slope at logit −4, of the largest slope between −6 and 6", "sign", _learning, 0.1, 0.01),
    Question("training", "training", "time of forward and backward at the largest N, of PyTorch's fused softmax", "cost", _cost("training"), 1.1, 2.0, low_is_good=True),
    Question("decoding", "decoding", "time of one more token at the largest N, of PyTorch's fused softmax", "cost", _cost("decoding"), 2.5, 10.0, low_is_good=True),
    Question("memory", "memory", "peak memory of training at the largest N, of PyTorch's fused softmax", "cost", _cost("memory"), 1.1, 2.0, low_is_good=True),
    Question("trained", "trained score", "not run: filled from the store of a study once there is one", "claims", lambda results, label: None, 0.0, 0.0),
)  # fmt: skip
