"""Does sign matter?

Weight and gradient of one key as its logit moves, maps on the same queries and keys, opposed against
irrelevant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from unsoft import measure
from unsoft.compare.jobs import Job, Results, Rows
from unsoft.compare.level import Level
from unsoft.compare.section import SURVEY, Claim, Column, Finding, Request, Section, grade, job
from unsoft.compare.subject import WIDTH, Subject
from unsoft.report.comparison.page import Part
from unsoft.report.figure import Figure, by_mechanism, heat_maps, shown_at_first

LOGITS = tuple(round(-6 + 0.25 * k, 10) for k in range(49))
OTHERS = 15
TOKENS = 20
_MAPS, _BLUE = "Weights on the same queries and keys", "Blue adds, orange subtracts."


def jobs(request: Request) -> list[Job]:
    kinds = (("curves", curves, 0.1), ("map", heat_map, 0.02), ("sums", sums, 0.05))
    found = [
        job(name, s, partial(call, s), expected) for name, call, expected in kinds for s in request.everyone
    ]
    sizes = {"geometries": request.level.geometries}
    return found + [
        job("opposed", s, partial(opposed, s, request.level), 0.15, sizes) for s in request.everyone
    ]


def curves(subject: Subject) -> Rows:
    """Weight of a key and |da/ds| of the row against the key's logit; fifteen others are N(0, 1)."""
    generator = torch.Generator().manual_seed(2)
    others = torch.randn(OTHERS, generator=generator, dtype=torch.float64)
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    weigh = subject.row()
    with torch.no_grad():
        weights = weigh(torch.cat([logits[:, None], others.expand(len(logits), -1)], -1))[:, 0]
    slopes = measure.gradient(weigh, logits, others)
    return [
        {"logit": s, "weight": a, "gradient": key}
        for s, a, key in zip(LOGITS, weights.tolist(), slopes.key.tolist(), strict=True)
    ]


def heat_map(subject: Subject) -> Rows:
    """Causal weights on the same twenty tokens for every mechanism."""
    query, key = _tokens()
    with torch.no_grad():
        found = subject.weights(query, key, is_causal=True)[0]
    return [[round(x, 5) for x in row] for row in found.tolist()]


def sums(subject: Subject) -> Rows:
    """Sums of rows on random tokens: what is promised, what is free, what is negative."""
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(4, 128, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        found = subject.weights(query, key, is_causal=True)[:, 16:]
    total, size = found.sum(-1), found.abs().sum(-1)
    deletion = measure.deletion(found, torch.randn(4, 128, 8, generator=generator, dtype=torch.float64))
    return [
        {
            "sum_low": float(total.min()),
            "sum_high": float(total.max()),
            "l1_low": float(size.min()),
            "l1_high": float(size.max()),
            "negative": float(measure.negative_share(found).mean()),
            "deletion": float(deletion.share.mean()),
            "zeros": float((found[:, -1] == 0).double().mean()),
        }
    ]


def opposed(subject: Subject, level: Level) -> list[dict[str, Any]]:
    """The weight of an opposed key against that of an irrelevant one."""
    found = measure.discrimination(subject.row(), geometries=level.geometries, keys=32, dim=WIDTH)
    return [{"auc": found.auc, "gap": found.gap}]


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    query, key = (1.5 * torch.randn(1, TOKENS, WIDTH, generator=generator) for _ in range(2))
    return query, key


def figures(results: Results) -> Iterator[Figure]:
    rows = results.each("curves")
    if rows:
        yield from _curve_figures(results, rows)
    values = [
        {"mechanism": label, "query": i, "key": j, "weight": weight / (max(map(abs, row)) or 1)}
        for label in shown_at_first(results.labels)
        for i, row in enumerate(results.get("map", label))
        for j, weight in enumerate(row[: i + 1])
    ]
    if values:
        yield Figure("maps", _MAPS, _BLUE, values, heat_maps(values), on_page=False)


def _curve_figures(results: Results, rows: list[dict[str, Any]]) -> Iterator[Figure]:
    largest: dict[str, dict[str, float]] = {}
    for row in rows:
        own = largest.setdefault(row["mechanism"], {"weight": 0.0, "gradient": 0.0})
        for field in own:
            own[field] = max(own[field], abs(row[field]))
    scaled = [
        row
        | {
            f"of largest {field}": row[field] / (largest[row["mechanism"]][field] or 1)
            for field in ("weight", "gradient")
        }
        for row in rows
    ]
    chart = by_mechanism(
        results.labels,
        scaled,
        "logit",
        "of largest weight",
        x_title=f"logit of one key, {OTHERS} others are N(0, 1)",
        y_title="weight, of its largest size",
        dots=[],
        tooltip=["weight"],
        y_domain=[-1, 1],
    )
    note = "Below 0 a key is subtracted. Each curve is divided by its largest size."
    yield Figure("weight", "Weight against logit", note, rows, chart)
    seen = [row for row in scaled if row["of largest gradient"] > 1e-7]
    chart = by_mechanism(
        results.labels,
        seen,
        "logit",
        "of largest gradient",
        x_title="logit",
        y_title="slope of the row, of its largest",
        dots=[],
        log_y=True,
        tooltip=["gradient"],
        y_domain=[1e-4, 1],
    )
    note = (
        "What a loss can still tell this key. Softmax's slope dies off like exp(s); where a line ends it is"
        " exactly 0."
    )
    yield Figure("gradient", "Gradient against logit", note, seen, chart)


def parts(results: Results) -> Iterator[Part]:
    maps = [{"label": label, "rows": rows} for label in results.labels if (rows := results.get("map", label))]
    if maps:
        text = f"Causal weights on {TOKENS} random tokens, each row divided by its largest size. {_BLUE}"
        yield Part("The same queries and keys", text, maps=maps)


def _field(name: str, field: str) -> Callable[[Results, str], float | None]:
    def answer(results: Results, label: str) -> float | None:
        rows = results.get(name, label)
        return float(rows[0][field]) if rows else None

    return answer


def _learning(results: Results, label: str) -> float | None:
    rows = results.get("curves", label)
    largest = max((row["gradient"] for row in rows), default=0.0)
    if not largest:
        return 0.0 if rows else None
    return float(next(row["gradient"] for row in rows if row["logit"] == -4.0) / largest)


def _erased_differences(results: Results) -> Finding:
    softmax, cog = (results.rows("opposed", name)[0] for name in ("softmax", "cog"))
    erased = softmax["auc"] < 0.6
    return grade(erased, softmax["gap"] < cog["gap"] / 2), (
        f"softmax keeps the order (auc {softmax['auc']:.3f}) but can take away only {softmax['gap']:.2f}"
        " fair shares; "
        f"cog takes {cog['gap']:.1f}"
    )


def _forced_sum(results: Results) -> Finding:
    row = results.rows("sums", "softmax")[0]
    return grade(abs(row["sum_low"] - 1) < 1e-6 and abs(row["sum_high"] - 1) < 1e-6), (
        f"row sums of softmax between {row['sum_low']:.6f} and {row['sum_high']:.6f}"
    )


def _cog_sums(results: Results) -> Finding:
    row = results.rows("sums", "cog")[0]
    unit = abs(row["l1_low"] - 1) < 1e-6 and abs(row["l1_high"] - 1) < 1e-6
    free = row["sum_low"] < -0.1 and row["sum_high"] > 0.1
    return grade(unit and free, unit), (
        f"sum of sizes {row['l1_low']:.6f} to {row['l1_high']:.6f}; row sum {row['sum_low']:.2f} to"
        f" {row['sum_high']:.2f}"
    )


def _deletion(results: Results) -> Finding:
    cog, softmax = results.rows("sums", "cog")[0], results.rows("sums", "softmax")[0]
    return grade(cog["deletion"] > 0.1 and softmax["deletion"] == 0), (
        f"{cog['deletion']:.0%} of what cog moves along the sources' own directions is removed,"
        f" {softmax['deletion']:.0%} for softmax "
        "(without an output projection; what trained heads do is not run)"
    )


def _affine(results: Results) -> Finding:
    row = results.rows("sums", "gpam")[0]
    fixed = abs(row["sum_low"] - row["sum_high"]) < 1e-6
    return grade(fixed and row["negative"] > 0), (
        f"gpam's rows sum to {row['sum_low']:.4f} to {row['sum_high']:.4f}, {row['negative']:.1%} of the"
        " weight is negative"
    )


_AGAIN = "softmax cog gpam --only sign"
SECTION = Section(
    name="sign",
    order=30,
    title="Sign",
    question="What does a negative logit do?",
    jobs=jobs,
    figures=figures,
    parts=parts,
    columns=[
        Column(
            "deletes",
            "deletes?",
            "share of the weight that subtracts, on random tokens",
            _field("sums", "negative"),
            0.25,
            0.01,
        ),
        Column(
            "opposed",
            "opposed ≠ irrelevant?",
            "weight of an irrelevant key minus that of an opposed one, in fair shares of a row",
            _field("opposed", "gap"),
            1.5,
            0.75,
        ),
        Column(
            "learns",
            "learns at logit −4?",
            "size of the row's slope at logit −4, of the largest slope between −6 and 6",
            _learning,
            0.1,
            0.01,
        ),
    ],
    claims=[
        Claim(name, SURVEY, text, _AGAIN, check)
        for name, text, check in (
            (
                "erased-differences",
                "Softmax cannot tell weakly irrelevant from strongly opposed keys.",
                _erased_differences,
            ),
            ("forced-sum", "Softmax's weights must sum to 1, whatever the query is.", _forced_sum),
            ("cog-sums", "Cog's weights have L1 norm 1 and a free row sum.", _cog_sums),
            ("deletion", "Softmax can only add; negative weights delete.", _deletion),
            ("affine", "GPAM is an affine combination: fixed sum, entries below 0.", _affine),
        )
    ],
)
