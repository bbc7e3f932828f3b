"""Features of a formula that distinguish support, opposition and irrelevance.

An open question of the survey of negative attention (2025).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import normals
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, matching, mean_of
from unsoft.lab.compare.section import SIGNED, SURVEY, Finding, Section
from unsoft.lab.evidence import UNDECIDED, Estimate, grade, t_interval
from unsoft.lab.report.comparison import Part
from unsoft.modules.registry import resolve_formula

KEYS, CLASSES, BLUR = 16, (4.0, -4.0, 0.0), 0.5
FEATURES = ("sign", "free sum", "jump at 0", "zero width")
BOTH = "sign × free sum"
"""The interaction: what a free sum adds to the effect of the sign."""
Row = Callable[[Tensor], Tensor]


def _sum_of_one(weights: Tensor) -> Tensor:
    """Shift the weights so that each row sums to 1."""
    return weights + (1 - weights.sum(-1, keepdim=True)) / weights.shape[-1]


def _zero_width(s: Tensor) -> Tensor:
    """Return the weights of sinh with zeros for logits within 1 of 0, without a jump there."""
    return _sinh(s.sign() * (s.abs() - 1).relu())


def _zero_below(s: Tensor) -> Tensor:
    """Return weights exp(s) - 1 above 0, and zeros below."""
    weights = s.relu().expm1()
    return weights / (weights + 1e-12).sum(-1, keepdim=True)


_cog, _sinh = resolve_formula("cog").row, resolve_formula("sinh").row
FORMULAS: Mapping[str, tuple[tuple[int, int, int, int], Row]] = {
    "softmax": ((0, 0, 0, 0), resolve_formula("softmax").row),
    "softmax1": ((0, 1, 0, 0), resolve_formula("softmax1").row),
    "softmax, 0 below 0": ((0, 0, 0, 1), _zero_below),
    "softpick": ((0, 1, 0, 1), resolve_formula("softpick").row),
    "sinh": ((1, 1, 0, 0), _sinh),
    "sinh, sum 1": ((1, 0, 0, 0), lambda s: _sum_of_one(_sinh(s))),
    "cog": ((1, 1, 1, 0), _cog),
    "cog, sum 1": ((1, 0, 1, 0), lambda s: _sum_of_one(_cog(s))),
    "sinh, 0 near 0": ((1, 1, 0, 1), _zero_width),
    "sinh, 0 near 0, sum 1": ((1, 0, 0, 1), lambda s: _sum_of_one(_zero_width(s))),
}
"""Features of each formula, and its weights; neighbours differ in one feature."""


_ASKED = "Which feature lets a formula tell opposed from irrelevant?"
SECTION = Section(order=33, group=SIGNED, question=_ASKED, about=__doc__)
"""Formulas that differ in one feature, the same task for each, and a regression of accuracy on features."""


@SECTION.fact(0.5, rows=lambda level: level.geometries)
def features(rows: int, draws: int) -> RowIterator:
    """Measure the accuracy of each formula on the three-class task, draw by draw."""
    for (name, (has, weigh)), draw in itertools.product(FORMULAS.items(), range(draws)):
        row = {"formula": name, "draw": draw, "accuracy": accuracy(weigh, rows, draw)}
        yield row | dict(zip(FEATURES, has, strict=True))


def accuracy(weigh: Row, rows: int, seed: int) -> float:
    """Return the accuracy of telling support, opposition and neither by the output along a key's value.

    The key's logit is 4, -4 or 0 with a blur, the others are N(0, 1). Values are random, so the output
    along the key's value is its weight and noise from all others. Half of the rows set the mean of each
    class, the other half is judged by the nearest mean; chance is 1/3.
    """
    normal, read = normals(300 + seed), []
    for logit in CLASSES:
        own = logit + BLUR * normal(rows, 1)
        row = weigh(torch.cat([own, normal(rows, KEYS - 1)], -1))
        read.append(row[:, 0] + row[:, 1:].square().sum(-1).sqrt() * normal(rows))
    seen = torch.stack(read)
    means = seen[:, : rows // 2].mean(-1)
    guess = (seen[:, rows // 2 :, None] - means).abs().argmin(-1)
    return float((guess == torch.arange(len(CLASSES))[:, None]).double().mean())


def effects(rows: Rows) -> dict[str, Estimate]:
    """Return what each feature adds to the accuracy, others held fixed, by least squares for each draw.

    With the interaction in the model, the effect of the sign is that in rows which sum to 1, and the effect
    of a free sum is that without signs.
    """
    solutions = []
    for draw in sorted({row["draw"] for row in rows}):
        own = matching(rows, draw=draw)
        has = [[row[name] for name in FEATURES] for row in own]
        table = torch.tensor([[1, *features, features[0] * features[1]] for features in has]).double()
        right = torch.tensor([[row["accuracy"]] for row in own], dtype=torch.float64)
        solutions.append(torch.linalg.lstsq(table, right).solution[1:, 0].tolist())
    names = (*FEATURES, BOTH)
    return {name: t_interval(x) for name, x in zip(names, zip(*solutions, strict=True), strict=True)}


def _effect_words(estimates: Mapping[str, Estimate]) -> str:
    return ", ".join(
        f"{name} {x.value:+.3f} ({x.low:+.3f} to {x.high:+.3f})" for name, x in estimates.items()
    )


@SECTION.parts
def parts(results: Results) -> Iterator[Part]:
    rows = results.get("features")
    if not rows:
        return
    table = []
    for name, (has, _) in FORMULAS.items():
        mean = mean_of(rows, "accuracy", formula=name)
        table.append((name, *("yes" if present else "no" for present in has), mean.value, str(mean)))
    titles = ("formula", *FEATURES, "accuracy", "interval")
    known = {name: one for name, one in effects(rows).items() if one.low is not None}
    text = (
        f"One key of logit 4, −4 or 0 among {KEYS - 1} others N(0, 1): is it support, opposition or neither?"
        " One number is read, the output along the key's value; chance is 0.333. What each feature adds,"
        f" others held fixed, the sign in rows that sum to 1: {_effect_words(known)}."
    )
    yield Part.table("Formulas that differ in one feature", text, titles, table)


@SECTION.experiment(
    SURVEY, "What lets attention tell irrelevant from opposed is that weights may be negative."
)
def _sign_decides(results: Results) -> Finding:
    """Ten formulas, accuracy regressed on four features and the interaction sign × free sum: supported if
    the interval of the sign's effect in rows that sum to 1 lies above 0 and above that of every other
    effect, the interaction included; partly if it lies above 0 only.

    Refuted: The interval of the sign's effect in rows that sum to 1 reaches 0.
    """
    gains = effects(results.rows("features"))
    if any(one.low is None for one in gains.values()):
        return UNDECIDED, "one draw has no interval"
    sign = gains["sign"].lower
    largest = max((one for name, one in gains.items() if name != "sign"), key=lambda one: one.value)
    return grade(sign > max(0, largest.upper), sign > 0), (
        f"accuracy gained by each feature, the sign in rows that sum to 1: {_effect_words(gains)}"
    )
