"""The curve of a mechanism: the weight of one key against its logit, as text, SVG and Altair chart."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

CURVE_LOGITS = tuple(round(-6 + 0.25 * k, 10) for k in range(49))
"""Logits at which the weight of one key is drawn; those of the others are :func:`other_logits`."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the eight dots of a Braille character, by row and column."""
_WIDTH, _HEIGHT = 240.0, 120.0


def other_logits(count: int = 15) -> Tensor:
    """Return the logits of the other keys of a curve's row, the same for every mechanism."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, generator=generator, dtype=torch.float64)


def curve(row: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the weights of a key at :data:`CURVE_LOGITS`, among fifteen other keys.

    ``row`` is a function from logits to weights, such as ``Formula.row``.
    """
    logits = torch.tensor(CURVE_LOGITS, dtype=torch.float64)
    with torch.no_grad():
        weights = row(torch.cat([logits[:, None], other_logits().expand(len(logits), -1)], -1))
    values: list[float] = weights[:, 0].tolist()
    return values


def text_plot(values: Sequence[float], columns: int = 48, lines: int = 9) -> str:
    """Return a curve over :data:`CURVE_LOGITS` as lines of Braille dots, with the ends of both axes.

    >>> print(text_plot([s for s in CURVE_LOGITS], columns=6, lines=2))
         6 ⠀⠀⠀⣀⠔⠊
        -6 ⡩⠝⠉⠉⠉⠉
           -6   6  logit
    """
    low, high = min(*values, 0.0), max(*values, 0.0)
    grid = [[0] * columns for _ in range(lines)]

    def dot(x: float, y: float) -> None:
        across = min(int(x * (2 * columns - 1) + 0.5), 2 * columns - 1)
        down = min(int((high - y) / ((high - low) or 1.0) * (4 * lines - 1) + 0.5), 4 * lines - 1)
        grid[down // 4][across // 2] |= _DOTS[down % 4][across % 2]

    for k in range(2 * columns):
        place = k / (2 * columns - 1)
        at = place * (len(values) - 1)
        left = min(int(at), len(values) - 2)
        dot(place, 0.0)
        dot(place, values[left] + (at - left) * (values[left + 1] - values[left]))
    ends = {0: f"{high:.3g}", lines - 1: f"{low:.3g}"}
    rows = [
        f"{ends.get(k, ''):>6} {''.join(chr(0x2800 + bits) for bits in line)}" for k, line in enumerate(grid)
    ]
    first, last = f"{CURVE_LOGITS[0]:g}", f"{CURVE_LOGITS[-1]:g}"
    return "\n".join([*rows, f"{'':>6} {first}{last:>{columns - len(first)}}  logit"])


def svg_plot(values: Sequence[float], label: str) -> str:
    """Return a curve over :data:`CURVE_LOGITS` as a small inline SVG with the line of weight 0."""
    low, high = min(*values, 0.0), max(*values, 0.0)

    def y(value: float) -> float:
        return 4 + (high - value) / ((high - low) or 1.0) * (_HEIGHT - 8)

    points = " ".join(
        f"{k / (len(values) - 1) * _WIDTH:.1f},{y(value):.1f}" for k, value in enumerate(values)
    )
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{_WIDTH:g}" height="{_HEIGHT:g}"'
        f' viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}"><path d="M0 {y(0):.1f}H{_WIDTH:g}" stroke="#999"/>'
        f'<polyline points="{points}" fill="none" stroke="#0b62a4" stroke-width="2"/></svg>'
    )


def chart(curves: Mapping[str, Sequence[float]]) -> Any:
    """Return an Altair chart of curves over :data:`CURVE_LOGITS`; ImportError without altair."""
    try:
        import altair
    except ImportError:
        raise ImportError("plot() needs altair, which is not installed: pip install altair") from None
    rows = [
        {"mechanism": name, "logit": s, "weight": a}
        for name, values in curves.items()
        for s, a in zip(CURVE_LOGITS, values, strict=True)
    ]
    data = altair.Data(values=rows)  # type: ignore[no-untyped-call]
    lines = altair.Chart(data).mark_line()
    return lines.encode(x="logit:Q", y="weight:Q", color=altair.Color("mechanism:N", sort=list(curves)))
