"""The figures of a comparison, section by section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt

from unsoft import theory
from unsoft.report.comparison.colours import shown_at_first
from unsoft.report.comparison.figure import Figure, Rows, by_mechanism, by_number
from unsoft.report.results import Results

_SMALL = 1e-7  # the bottom of logarithmic charts


def figures(results: Results) -> list[Figure]:
    """Those whose measurements exist."""
    found: list[Figure] = []
    for make in (_focus, _hijack, _sign, _collapse, _solver, _cost):
        found += make(results)
    return found


def _focus(results: Results) -> Iterator[Figure]:
    for name, title, note in (
        ("relu2", "relu²: document 001's first figure", "Only for beta < 0 does S come near 0."),
        (
            "identity",
            "The plain logit: document 001's second figure",
            "S never falls below √(2/π) = 0.798, and is even in beta.",
        ),
        (
            "softmax",
            "Softmax",
            "exp(-gamma²/2) for every beta, until the row is too short for such wide logits.",
        ),
    ):
        rows = results.get("focus", name)
        lines, dots = _split(rows)
        if lines and dots:
            chart = by_number(
                lines, "gamma", "S", "beta", x_title="gamma, spread of the logits", y_title="S", by_title="beta", dots=dots,
                y_domain=[0, 1] if name != "identity" else [0.78, 1],
            )  # fmt: skip
            yield Figure(
                f"focus-{name}", "focus", title, note + " Lines: theory; dots: measured.", lines + dots, chart
            )
    lines, dots = _split(results.each("focus"))
    if dots:
        chart = by_mechanism(
            results.labels, lines, "gamma", "S", x_title="gamma, spread of the logits", y_title="S", dots=dots, y_domain=[0, 1],
            more=[("beta", 0, "datum.beta == beta")],
        )  # fmt: skip
        note = "1: even, 0: all on one key. Lines: theory; dots: measured. Families without a formula are measured at beta = 0."
        yield Figure("focus", "focus", "All mechanisms, for the beta chosen above", note, lines + dots, chart)


def _split(rows: Rows) -> tuple[Rows, Rows]:
    kept = [
        {key: x for key, x in row.items() if key not in ("error", "note")}
        for row in rows
        if row["S"] is not None
    ]
    return [row for row in kept if row["kind"] == "theory"], [
        row for row in kept if row["kind"] == "measured"
    ]


def _hijack(results: Results) -> Iterator[Figure]:
    rows = results.each("hijack")
    if not rows:
        return
    dots = [row for row in rows if row["kind"] == "measured"]
    lines = [row for row in rows if row["kind"] == "theory"]
    have = {row["mechanism"] for row in lines}
    lines += [row for row in dots if row["mechanism"] not in have]  # no theory: the measured points, joined
    chart = by_mechanism(
        results.labels, lines, "clones", "share", x_title="clones", y_title="share of the unique key", dots=dots, log_x=True, y_domain=[0, 1],
    )  # fmt: skip
    counts = sorted({row["clones"] for row in dots})
    ideal = [
        {"clones": m, "share": share}
        for m, share in zip(
            counts, theory.magnitude_hijack(counts, gate="weight", eps=0.1).share.tolist(), strict=True
        )
    ]
    line = (
        alt.Chart(alt.Data(values=ideal)).mark_line(strokeDash=[2, 4], strokeWidth=2, color="#888888")
        .encode(x="clones:Q", y="share:Q", tooltip=["clones:Q", "share:Q"])
    )  # fmt: skip
    note = (
        "A key of relevance 20 against clones of relevance 1. Lines: theory where there is one; dots: measured. Grey dots: a gate that"
        " passes the magnitude weight itself, as document 002 computes its example; the sigmoid gate it defines only delays the hijack."
    )
    yield Figure("hijack", "hijack", "Share of the unique key", note, rows, chart + line)


def _sign(results: Results) -> Iterator[Figure]:
    rows = results.each("curves")
    if not rows:
        return
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
        results.labels, scaled, "logit", "of largest weight", x_title="logit of one key, fifteen others are N(0, 1)",
        y_title="weight, of its largest size", dots=[], tooltip=["weight"], y_domain=[-1, 1],
    )  # fmt: skip
    yield Figure(
        "weight",
        "sign",
        "Weight against logit",
        "Below 0 a key is subtracted. Each curve is divided by its largest size.",
        rows,
        chart,
    )
    seen = [row for row in scaled if row["of largest gradient"] > _SMALL]
    chart = by_mechanism(
        results.labels, seen, "logit", "of largest gradient", x_title="logit", y_title="slope of the row, of its largest", dots=[], log_y=True,
        tooltip=["gradient"], y_domain=[1e-4, 1],
    )  # fmt: skip
    note = "What a loss can still tell this key. Softmax's slope dies off like exp(s); where a line ends it is exactly 0."
    yield Figure("gradient", "sign", "Gradient against logit", note, seen, chart)


def _collapse(results: Results) -> Iterator[Figure]:
    rows = [row | {"skip": int(row["skip"])} for row in results.each("collapse")]
    if not rows:
        return
    for field, title, note, log in (
        (
            "residual",
            "Residual over norm",
            "0: all tokens are the same. A large residual alone is not information, noise has one too.",
            True,
        ),
        ("recovery", "Tokens that can be told by their input", "1: all; at the bottom 1/48, chance.", False),
    ):
        kept = [row for row in rows if not log or row[field] > _SMALL]
        chart = by_mechanism(
            results.labels, kept, "depth", field, x_title="layers", y_title=title.lower(), dots=[], log_y=log,
            more=[("skip", 0, "datum.skip == skip")], y_domain=[1e-4, 1] if log else [0, 1],
        )  # fmt: skip
        yield Figure(f"collapse-{field}", "collapse", title, note, kept, chart)


def _solver(results: Results) -> Iterator[Figure]:
    for kind, short in (("distinct keys", "distinct"), ("crowds, nearly coinciding", "crowds")):
        rows = results.get(f"solver, {kind}")
        if not rows:
            continue
        for field, title in (("weights", "Weights"), ("total", "Total")):
            kept = [row | {field: max(row[field], 1e-12)} for row in rows]
            chart = by_number(
                kept, "steps", field, "eps", x_title="steps of conjugate gradients", y_title="relative error", by_title="ε", log_y=True,
                log_x=True, y_domain=[1e-9, 2],
            )  # fmt: skip
            note = "256 keys of 64 dimensions, t = 1, against the exact solution in float64."
            yield Figure(f"solver-{short}-{field}", "solver", f"{title}: {kind}", note, rows, chart)


def _cost(results: Results) -> Iterator[Figure]:
    for what, title, note in (
        ("training", "Training: time of forward and backward", "Causal, B=1 H=4 D=64 float32, against PyTorch's fused softmax in the same interleaved run."),
        ("decoding", "Decoding: time of one more token", "Against PyTorch's fused softmax over kept keys and values, without a cache to keep."),
        ("memory", "Memory: peak of training", "On top of the inputs, in a process of its own."),
    ):  # fmt: skip
        rows = [row for row in results.matching(what) if row["mechanism"] in results.labels]
        if rows:
            chart = by_mechanism(
                results.labels, rows, "length", "ratio", x_title="N, keys", y_title="times PyTorch's softmax", log_x=True, log_y=True,
                tooltip=["bytes" if what == "memory" else "seconds"],
            )  # fmt: skip
            yield Figure(f"cost-{what}", "cost", title, note, rows, chart)


def map_figure(results: Results) -> dict[str, Any] | None:
    """Heat maps of the mechanisms that are shown at first, as Vega-Lite for files; the page draws its own."""
    values = [
        {"mechanism": label, "query": i, "key": j, "weight": weight / (max(map(abs, row)) or 1)}
        for label in shown_at_first(results.labels)
        for i, row in enumerate(results.get("map", label))
        for j, weight in enumerate(row[: i + 1])
    ]
    if not values:
        return None
    chart = (
        alt.Chart(alt.Data(values=values)).mark_rect()
        .encode(
            x=alt.X("key:O", axis=None), y=alt.Y("query:O", axis=None),
            color=alt.Color("weight:Q", title="weight, of the row's largest", scale=alt.Scale(scheme="blueorange", domain=[1, -1])),
        )
        .properties(width=150, height=150).facet(facet=alt.Facet("mechanism:N", title=None), columns=4)
        .properties(title="Weights on the same queries and keys")
    )  # fmt: skip
    return chart.to_dict(validate=False) | {"background": "white"}
