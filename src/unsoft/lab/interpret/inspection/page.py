"""An inspection as one HTML page: maps of layers by heads, attention patterns, collapse by depth, tables."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.lab.interpret.inspection.observe import observe
from unsoft.lab.interpret.inspection.result import COLUMNS, ROLES, TITLES, HeadRole, Inspection
from unsoft.lab.interpret.inspection.sequence import AttentionCall, sequences
from unsoft.lab.interpret.models import batches, body_runner, evaluating, single_stack
from unsoft.lab.interpret.records import TableColumn
from unsoft.lab.report.page import line_chart, page, printable

HERE = Path(__file__).parent
_HEAD = (TableColumn("layer", "layer", ""), TableColumn("head", "head", ""))
_DEPTHS = (
    ("mean_cosine", "Mean cosine", "1: all tokens point the same way"),
    ("effective_rank", "Effective rank", "number of directions that the tokens use"),
    ("stable_rank", "Stable rank", "number of directions as strong as the strongest"),
    ("recovery", "Recovery", "share of tokens that can still be identified by their input"),
    ("residual", "Residual", "distance from all tokens being equal"),
    ("composite_residual", "Composite residual", "the same in the norm of the papers on collapse"),
)
MOST_RANKED = 50
MOST_TOKENS = 32


@dataclass(frozen=True)
class Pattern:
    """Attention of every head on one sentence: its tokens and, for each layer, the weights (heads, n, n)."""

    text: str
    tokens: list[str]
    layers: dict[int, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """Return the weights as signed bytes in base64, 127 for the largest of a head, with their scales."""
        layers = {}
        for number, weights in self.layers.items():
            scale = weights.abs().amax((-2, -1)).clamp_min(torch.finfo(weights.dtype).tiny)
            small = (weights / scale[:, None, None] * 127).round().to(torch.int8)
            content = base64.b64encode(bytes(small.flatten().view(torch.uint8).tolist())).decode()
            layers[number] = {"scales": scale.tolist(), "weights": content}
        return {"tokens": self.tokens, "layers": layers}


def find_patterns(
    model: nn.Module, texts: Sequence[str], tokenizer: Any, tokens: int = MOST_TOKENS
) -> list[Pattern]:
    """Return the patterns of the first ``tokens`` tokens of each text.

    >>> Pattern("a b", ["a", "b"], {0: torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])}).to_dict()["layers"][0]
    {'scales': [1.0], 'weights': 'fwBAQA=='}
    """
    model = single_stack(model)
    patterns = []
    with evaluating(model):
        for text in texts:
            first = batches(text, tokenizer, 1, tokens, model.device)[0]
            calls: list[AttentionCall] = []
            with observe(model, calls.append):
                body_runner(model)(**first.inputs)
            own = [call for call in calls if call.self_attention]
            layers = {call.number: next(sequences(call, [slice(None)])).whole().cpu() for call in own}
            patterns.append(Pattern(text, first.labels[0], layers))
    return patterns


def inspection_page(inspection: Inspection, patterns: Sequence[Pattern] = ()) -> str:
    """Return the text of a self-contained HTML file."""
    columns = [column for column in COLUMNS if column.name in inspection.heads[0]]
    first, measure = most_interesting(inspection)
    return page(
        HERE / "page.html",
        title=f"unsoft inspect: {printable(inspection.model, 120)}",
        styles=[HERE / "page.css"],
        scripts=[HERE / "page.js"],
        data={
            "columns": [asdict(column) for column in columns],
            "heads": [{key: head[key] for key in head if key != "sink_token"} for head in inspection.heads],
            "first": _key(first),
            "measure": measure,
            "tokens": [printable(head["sink_token"]) for head in inspection.heads],
            "patterns": [
                pattern.to_dict() | {"tokens": [printable(token, 16) for token in pattern.tokens]}
                for pattern in patterns
            ],
        },
        inspection=inspection,
        columns=[*_HEAD, *columns, TITLES["sink_token"]],
        roles=[role_table(role, inspection) for role in ROLES],
        stacks=depth_charts(inspection),
        sentences=[printable(" ".join(pattern.text.split()), 80) for pattern in patterns],
        keys=[_key(head) for head in inspection.heads],
        ablation=inspection.ablation,
    )


def most_interesting(inspection: Inspection) -> tuple[dict[str, Any], str]:
    """Return the head that the page opens on and its measure.

    That is the strongest head of the rarest role, or else the most focused one.
    """
    ranked = [(role, heads) for role in ROLES if (heads := role.heads(inspection.heads))]
    if not ranked:
        return min(inspection.heads, key=lambda head: head["effective_keys"]), "effective_keys"
    role, heads = min(ranked, key=lambda pair: len(pair[1]))
    return heads[0], role.columns[0]


def _key(head: dict[str, Any]) -> str:
    return f"{head['layer']}.{head['head']}"


def role_table(role: HeadRole, inspection: Inspection) -> dict[str, Any]:
    """Return the heads in a role, strongest first, for the macro ``table``."""
    heads = role.heads(inspection.heads)
    shown = heads[:MOST_RANKED]
    return {
        "name": role.name,
        "meaning": role.meaning,
        "count": len(heads),
        "rows": shown,
        "columns": [*_HEAD, *(TITLES[name] for name in role.columns)],
        "keys": [_key(head) for head in shown],
    }


def depth_charts(inspection: Inspection) -> list[dict[str, Any]]:
    """Return measures of collapse by depth, for the macro ``line_chart``, one entry per stack of layers."""
    result = []
    for name in dict.fromkeys(record["stack"] for record in inspection.depths):
        records = [record for record in inspection.depths if record["stack"] == name]
        depths = [record["depth"] for record in records]
        charts = []
        for field, title, text in _DEPTHS:
            chart = line_chart(depths, [record[field] for record in records], "depth")
            charts.append({"title": title, "help": text, "chart": chart})
        result.append({"name": name, "charts": charts})
    return result
