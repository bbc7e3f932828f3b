"""Negative logits: weight and gradient of one key as its logit moves, and maps of weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unsoft import measure
from unsoft.formula.display import CURVE_LOGITS, other_logits
from unsoft.lab.compare.candidate import WIDTH, Candidate, normals
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, matching
from unsoft.lab.compare.section import SIGNED, SURVEY, Finding, Section
from unsoft.lab.evidence import grade
from unsoft.lab.report.comparison import Part
from unsoft.lab.report.figure import Figure, heat_maps
from unsoft.lab.report.look import shown_at_first
from unsoft.modules.registry import resolve_formula

OTHERS = len(other_logits())
TOKENS = 20
_MAPS, _BLUE = "Weights on the same queries and keys", "Blue adds, orange subtracts."


_REFERENCES = ("softmax", "cog", "gpam")
SECTION = Section(order=30, group=SIGNED, question="What does a negative logit do?")


@SECTION.each(0.1, *_REFERENCES)
def curves(candidate: Candidate) -> RowIterator:
    """Measure the weight of a key and |da/ds| of the row by the key's logit; the others are N(0, 1)."""
    logits = torch.tensor(CURVE_LOGITS, dtype=torch.float64)
    weigh = candidate.row()
    weights = weigh(torch.cat([logits[:, None], other_logits().expand(len(logits), -1)], -1))[:, 0]
    slopes = measure.gradient(weigh, logits, other_logits()).key
    for s, weight, slope in zip(CURVE_LOGITS, weights.tolist(), slopes.tolist(), strict=True):
        yield {"logit": s, "weight": weight, "gradient": slope}


@SECTION.each(0.02, *_REFERENCES, name="map")
def heat_map(candidate: Candidate) -> Rows:
    """Return causal weights on the same twenty tokens for every mechanism."""
    query, key = 1.5 * normals(3, torch.float32)(2, 1, TOKENS, WIDTH)
    weights = candidate.weights(query, key, is_causal=True)[0]
    return [[round(x, 5) for x in row] for row in weights.tolist()]


@SECTION.each(0.05, *_REFERENCES)
def sums(candidate: Candidate) -> RowIterator:
    """Measure sums, negative shares and zeros of rows on random tokens."""
    normal = normals(4)
    query, key = normal(4, 128, WIDTH), normal(4, 128, WIDTH)
    weights = candidate.weights(query, key, is_causal=True)[:, 16:]
    total, size = weights.sum(-1), weights.abs().sum(-1)
    extremes = {"sum_low": total.min(), "sum_high": total.max(), "l1_low": size.min(), "l1_high": size.max()}
    shares = {
        "negative": measure.negative_share(weights).mean(),
        "deletion": measure.deletion(weights, normal(4, 128, 8)).share.mean(),
        "zeros": (weights[:, -1] == 0).double().mean(),
    }
    yield {name: float(x) for name, x in (extremes | shares).items()}


@SECTION.fact(0.1)
def negative_logits() -> RowIterator:
    """Measure |da/ds| of a key at falling logits among fifteen others of logit 0 or 0.5."""
    logits = torch.tensor([0.0, -2.0, -4.0, -6.0, -8.0, -10.0], dtype=torch.float64)
    others = torch.zeros(OTHERS, dtype=torch.float64)
    others[::2] = 0.5
    for name in ("softmax", "cog", "relu"):
        slopes = measure.gradient(resolve_formula(name), logits, others).key
        for s, slope in zip(logits.tolist(), slopes.tolist(), strict=True):
            yield {"mechanism": name, "logit": s, "gradient": slope}


def _of_largest(results: Results, field: str) -> Rows:
    """Return the curves with a column divided by its largest size."""
    scaled: Rows = []
    for label in results.labels:
        own = matching(results.each("curves"), mechanism=label)
        largest = max((abs(row[field]) for row in own), default=0.0) or 1
        scaled += [row | {f"of largest {field}": row[field] / largest} for row in own]
    return scaled


@SECTION.lines(
    "weight",
    "Weight against logit",
    x=("logit", f"logit of one key, {OTHERS} others are N(0, 1)"),
    y=("of largest weight", "weight, of its largest size"),
    dots=[],
    tooltip=["weight"],
    y_domain=[-1, 1],
)
def _weights(results: Results) -> Rows:
    """Below 0 a key is subtracted. Each curve is divided by its largest size."""
    return _of_largest(results, "weight")


@SECTION.lines(
    "gradient",
    "Gradient against logit",
    x=("logit", "logit"),
    y=("of largest gradient", "slope of the row, of its largest"),
    dots=[],
    log_y=True,
    tooltip=["gradient"],
    y_domain=[1e-4, 1],
)
def _slopes(results: Results) -> Rows:
    """What a loss can still tell this key.

    Softmax's slope dies off like exp(s); where a line ends it is exactly 0.
    """
    return [row for row in _of_largest(results, "gradient") if row["of largest gradient"] > 1e-7]


@SECTION.figures
def figures(results: Results) -> Iterator[Figure]:
    values = [
        {"mechanism": label, "query": i, "key": j, "weight": weight / (max(map(abs, row)) or 1)}
        for label in shown_at_first(results.labels)
        for i, row in enumerate(results.get("map", label))
        for j, weight in enumerate(row[: i + 1])
    ]
    if values:
        yield Figure("maps", _MAPS, _BLUE, values, heat_maps(values), on_page=False)


@SECTION.parts
def parts(results: Results) -> Iterator[Part]:
    maps = [{"label": label, "rows": rows} for label in results.labels if (rows := results.get("map", label))]
    if maps:
        text = f"Causal weights on {TOKENS} random tokens, each row divided by its largest size. {_BLUE}"
        yield Part("The same queries and keys", text, maps=maps)


@SECTION.definition(SURVEY, "Softmax's weights must sum to 1, whatever the query is.")
def _forced_sum(results: Results) -> Finding:
    """Row sums of random rows are 1 to 1e-6."""
    row = results.rows("sums", "softmax")[0]
    return grade(abs(row["sum_low"] - 1) < 1e-6 and abs(row["sum_high"] - 1) < 1e-6), (
        f"row sums of softmax between {row['sum_low']:.6f} and {row['sum_high']:.6f}"
    )


@SECTION.definition(SURVEY, "Cog's weights have L1 norm 1 and a free row sum.")
def _cog_sums(results: Results) -> Finding:
    """Sums of sizes are 1 to 1e-6, row sums reach below −0.1 and above 0.1."""
    row = results.rows("sums", "cog")[0]
    unit = abs(row["l1_low"] - 1) < 1e-6 and abs(row["l1_high"] - 1) < 1e-6
    free = row["sum_low"] < -0.1 and row["sum_high"] > 0.1
    return grade(unit and free, unit), (
        f"sum of sizes {row['l1_low']:.6f} to {row['l1_high']:.6f}; row sum {row['sum_low']:.2f} to"
        f" {row['sum_high']:.2f}"
    )


@SECTION.definition(SURVEY, "Negative weights delete.")
def _deletion(results: Results) -> Finding:
    """Without maps, with the value as the source's direction: cog removes more than 10 %, softmax nothing."""
    cog, softmax = results.rows("sums", "cog")[0], results.rows("sums", "softmax")[0]
    return grade(cog["deletion"] > 0.1 and softmax["deletion"] == 0), (
        f"without value and output maps {cog['deletion']:.0%} of what cog moves along the sources' own"
        f" directions is removed, {softmax['deletion']:.0%} for softmax"
    )


@SECTION.definition(SURVEY, "GPAM is an affine combination: fixed sum, entries below 0.")
def _affine(results: Results) -> Finding:
    """Row sums are equal to 1e-6, and some weights are negative."""
    row = results.rows("sums", "gpam")[0]
    fixed = abs(row["sum_low"] - row["sum_high"]) < 1e-6
    return grade(fixed and row["negative"] > 0), (
        f"gpam's rows sum to {row['sum_low']:.4f} to {row['sum_high']:.4f}, {row['negative']:.1%} of the"
        " weight is negative"
    )


@SECTION.definition(SURVEY, "Softmax's gradient vanishes for strongly negative logits.")
def _vanishing_gradient(results: Results) -> Finding:
    """The slope at −10 is below a thousandth of that at 0."""
    rows = results.rows("negative logits")
    slope = {(row["mechanism"], row["logit"]): row["gradient"] for row in rows}
    lost = slope["softmax", -10.0] / slope["softmax", 0.0]
    rate = slope["softmax", -8.0] / slope["softmax", -10.0]
    cog = slope["cog", -4.0] / slope["softmax", -4.0]
    return grade(lost < 1e-3), (
        f"softmax's slope at logit −10 is {lost:.1g} of that at 0 and falls by {rate:.2f} for each 2 (e² ="
        f" 7.39); at −4 cog's is {cog:.0f} times as large"
    )
