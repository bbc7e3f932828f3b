"""An inspection as one page: maps of layers by heads, patterns on sentences, collapse by depth, sorted
tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsoft.lab.interpret.inspection.columns import COLUMNS, TITLES, Column
from unsoft.lab.interpret.inspection.inspection import Inspection
from unsoft.lab.interpret.inspection.patterns import Pattern
from unsoft.lab.interpret.inspection.roles import ROLES
from unsoft.lab.report.page import line_chart, page, printable

HERE = Path(__file__).parent
_PLACE = (Column("layer", "layer", ""), Column("head", "head", ""))
_TOKEN = Column("sink_token", "sink token", "the token that gets most")
_DEPTHS = (
    ("mean_cosine", "Mean cosine", "1: all tokens point the same way"),
    ("effective_rank", "Effective rank", "directions that the tokens use"),
    ("stable_rank", "Stable rank", "directions as strong as the strongest"),
    ("recovery", "Recovery", "tokens that can still be told apart by their input"),
    ("residual", "Residual", "distance from all tokens being equal"),
    ("composite_residual", "Composite residual", "the same in the norm of the papers on collapse"),
)
_REMOVED = (
    Column("role", "role", ""),
    Column("heads", "heads", "layer.head of each that is removed"),
    Column("change", "loss without", "nats per token more than with them"),
    Column("interval", "95 % interval", "bootstrap over sequences"),
    Column("random", "without random heads", "as many of the same layers, mean over draws"),
    Column("difference", "difference", "loss without these, less that without random heads"),
    Column("difference_interval", "95 % interval", "bootstrap over sequences and draws"),
    Column("verdict", "verdict", "by the rule above"),
)
MOST_RANKED = 50


def inspection_page(found: Inspection, patterns: Sequence[Pattern] = ()) -> str:
    """The text of an HTML file that needs nothing else."""
    columns = [column for column in COLUMNS if column.name in found.heads[0]]
    first, measure = most_interesting(found)
    return page(
        HERE / "page.html",
        title=f"unsoft inspect: {printable(found.model, 120)}",
        styles=[HERE / "page.css"],
        scripts=[HERE / "page.js"],
        data={
            "columns": [
                {"name": column.name, "title": column.title, "help": column.help} for column in columns
            ],
            "heads": [
                {key: value for key, value in head.items() if key != "sink_token"} for head in found.heads
            ],
            "first": _key(first),
            "measure": measure,
            "tokens": [printable(head["sink_token"]) for head in found.heads],
            "patterns": [
                pattern.to_dict() | {"tokens": [printable(token, 16) for token in pattern.tokens]}
                for pattern in patterns
            ],
        },
        found=found,
        columns=[*_PLACE, *columns, _TOKEN],
        roles=[role_table(role, found) for role in ROLES],
        stacks=depth_charts(found),
        sentences=[printable(" ".join(pattern.text.split()), 80) for pattern in patterns],
        keys=[_key(head) for head in found.heads],
        ablation=found.ablation,
        removed_columns=_REMOVED,
        removed=[_removed(one) for one in (found.ablation or {}).get("removed", ())],
    )


def most_interesting(found: Inspection) -> tuple[dict[str, Any], str]:
    """The head that the page opens on, and the measure that shows it: the strongest of the rarest role, or
    else the most focused.
    """
    ranked = [(role, heads) for role in ROLES if (heads := found.ranked(role))]
    if not ranked:
        return min(found.heads, key=lambda head: head["effective_keys"]), "effective_keys"
    role, heads = min(ranked, key=lambda pair: len(pair[1]))
    return heads[0], role.columns[0]


def _removed(one: Mapping[str, Any]) -> dict[str, Any]:
    beside = one["difference"] is not None
    return dict(one) | {
        "interval": f"{one['low']:+.4f} to {one['high']:+.4f}",
        "difference_interval": f"{one['difference_low']:+.4f} to {one['difference_high']:+.4f}"
        if beside
        else "",
    }


def _key(head: dict[str, Any]) -> str:
    return f"{head['layer']}.{head['head']}"


def role_table(role: Any, found: Inspection) -> dict[str, Any]:
    """The heads in a role, strongest first, for the macro ``table``."""
    heads = found.ranked(role)
    columns = [TITLES.get(name, _TOKEN) for name in role.columns]
    return {
        "name": role.name,
        "meaning": role.meaning,
        "count": len(heads),
        "rows": heads[:MOST_RANKED],
        "columns": [*_PLACE, *columns],
        "keys": [_key(head) for head in heads[:MOST_RANKED]],
    }


def depth_charts(found: Inspection) -> list[dict[str, Any]]:
    """Measures of collapse by depth, for the macro ``line_chart``, one entry for each stack of layers."""
    names = dict.fromkeys(record["stack"] for record in found.depths)
    result = []
    for name in names:
        records = [record for record in found.depths if record["stack"] == name]
        depths = [record["depth"] for record in records]
        charts = [
            {
                "title": title,
                "help": text,
                "chart": line_chart(depths, [record[field] for record in records], "depth"),
            }
            for field, title, text in _DEPTHS
        ]
        result.append({"name": name, "charts": charts})
    return result
