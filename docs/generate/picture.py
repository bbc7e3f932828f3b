"""Draws docs/mechanisms.svg from the library itself: ``python docs/generate/picture.py``.

Each panel shows the weight that a key gets while its logit moves from -4 to 4 and seven other keys stay where
they are. The time of training (forward + backward) is written beside the name, from the record of
docs/choose.md.
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path

import torch

import unsoft
from unsoft.mechanisms import formulas as built_in_formulas

HERE = Path(__file__).parents[1]
RECORD = HERE / "choose.json"
PICTURE = HERE / "mechanisms.svg"

OTHERS = [-1.5, -0.9, -0.4, 0.0, 0.4, 0.9, 1.5]
LOGITS = torch.linspace(-4, 4, 97, dtype=torch.float64)
COLUMNS, WIDE, HIGH, GAP, TOP = 7, 118, 74, 14, 62
PANEL_HIGH = HIGH + 46
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font: 13px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif }
  .small { font-size: 11px; fill: #656d76 }
  .title { font-size: 17px; font-weight: 600 } .name { font-weight: 600 }
  .axis { stroke: #afb8c1; stroke-width: 1 }
  .curve { fill: none; stroke: #1f2328; stroke-width: 1.6; stroke-linejoin: round }
  .plus { fill: #2f81f7; fill-opacity: .45 } .minus { fill: #f0663a; fill-opacity: .5 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 } .small { fill: #8d96a0 }
    .axis { stroke: #484f58 } .curve { stroke: #e6edf3 }
    .plus { fill-opacity: .6 } .minus { fill-opacity: .65 }
  }
"""


def main() -> None:
    """Writes the picture."""
    PICTURE.write_text(picture(measured_ratios(RECORD)))


def picture(ratios: dict[str, float]) -> str:
    """The SVG; ``ratios`` maps mechanism names to the time of training relative to PyTorch's fused
    softmax."""
    formulas = built_in_formulas()
    rows = math.ceil(len(formulas) / COLUMNS)
    wide, high = COLUMNS * (WIDE + GAP) + GAP + 12, TOP + rows * PANEL_HIGH - 4
    panels = [
        panel(
            name,
            formula,
            ratios.get(name),
            13 + place % COLUMNS * (WIDE + GAP),
            TOP + place // COLUMNS * PANEL_HIGH,
        )
        for place, (name, formula) in enumerate(formulas.items())
    ]
    note = "weight of one key as its logit goes from -4 to 4 among seven others (top left: the largest)"
    if ratios:
        note += "; right: training time at 2048 causal tokens, PyTorch's softmax = 1"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img"'
            f' aria-label="{escape(note)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="8"/>',
            '<text class="title" x="16" y="27">Which keys count, and which count against</text>',
            f'<text class="small" x="16" y="45">{escape(note)}</text>',
            *panels,
            legend(wide),
            "</svg>\n",
        ]
    )


def legend(wide: float) -> str:
    """What the two colours mean, at the top right."""
    marks = (("plus", "adds", wide - 170), ("minus", "subtracts", wide - 100))
    return "\n".join(
        f'<rect class="{kind}" x="{x}" y="17" width="12" height="12"/>'
        f'<text class="small" x="{x + 18}" y="27">{text}</text>'
        for kind, text, x in marks
    )


def panel(name: str, formula: unsoft.Formula, ratio: float | None, x: float, y: float) -> str:
    """One mechanism: its curve scaled to its own largest weight, the area above and below zero in two
    colours."""
    weights = moving_weights(formula)
    top, bottom = max(weights.max().item(), 0.0), min(weights.min().item(), 0.0)
    zero, unit = y + 8 + HIGH * top / (top - bottom), HIGH / (top - bottom)
    points = [
        (x + WIDE * place / (len(weights) - 1), zero - unit * weight)
        for place, weight in enumerate(weights.tolist())
    ]
    curve = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    areas = [
        f'<polygon class="{kind}" points="{x:.1f},{zero:.1f} '
        + " ".join(f"{a:.1f},{limit(b, zero):.1f}" for a, b in points)
        + f' {x + WIDE:.1f},{zero:.1f}"/>'
        for kind, limit in (("plus", min), ("minus", max))
    ]
    speed = (
        ""
        if ratio is None
        else f'<text class="small" x="{x + WIDE}" y="{y + HIGH + 25}" text-anchor="end">{ratio:.2f}x</text>'
    )
    return "\n".join(
        [
            *areas,
            f'<path class="axis" d="M{x} {zero:.1f}H{x + WIDE}M{x + WIDE / 2} {y + 8}V{y + 8 + HIGH}"/>',
            f'<polyline class="curve" points="{curve}"/>',
            f'<text class="small" x="{x + 3}" y="{y + 17}">{top:.2f}</text>',
            f'<text class="name" x="{x}" y="{y + HIGH + 25}">{escape(name)}</text>{speed}',
        ]
    )


def moving_weights(formula: unsoft.Formula) -> torch.Tensor:
    """The weight of one key for each of its logits, the other keys of the row standing still."""
    others = torch.tensor(OTHERS, dtype=torch.float64).expand(len(LOGITS), -1)
    return formula.row(torch.cat([others, LOGITS[:, None]], dim=1))[:, -1]


def measured_ratios(record: Path) -> dict[str, float]:
    """Return the time of training relative to PyTorch's fused softmax, for each mechanism of the record."""
    board = json.loads(record.read_text())["scoreboard"]
    cells = {row["mechanism"]: row["cells"].get("training", {"value": None}) for row in board}
    return {name: cell["value"] for name, cell in cells.items() if cell["value"] is not None}


if __name__ == "__main__":
    main()
