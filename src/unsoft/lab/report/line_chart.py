"""A line as the coordinates that the template draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unsoft.lab.report.page import number

_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 350, 10, 172


def line_chart(xs: Sequence[float], ys: Sequence[float], x_name: str) -> dict[str, Any]:
    """What the macro ``line_chart`` needs. The axis of y begins at 0 unless numbers are negative.

    >>> chart = line_chart([0, 1, 2], [0.0, 5.0, 10.0], "depth")
    >>> chart["points"].split()[0], chart["marks"][0]["label"], chart["spoken"]
    ('52.0,172.0', '0', 'from 0.000 at depth 0 to 10 at depth 2')
    """
    ticks = _ticks(min(0.0, *ys), max(0.0, *ys))
    low, span = ticks[0], ticks[-1] - ticks[0]
    first, last = min(xs), max(xs)

    def x_of(x: float) -> float:
        return round(_LEFT + (x - first) / ((last - first) or 1) * (_RIGHT - _LEFT), 1)

    def y_of(y: float) -> float:
        return round(_BOTTOM - (y - low) / span * (_BOTTOM - _TOP), 1)

    places = [(x_of(x), y_of(y)) for x, y in zip(xs, ys, strict=True)]
    step = max(1, -(-len(xs) // 8))
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _RIGHT,
        "bottom": _BOTTOM,
        "points": " ".join(f"{x},{y}" for x, y in places),
        "dots": [
            {"x": x, "y": y, "label": f"{x_name} {number(at)}: {number(value)}"}
            for (x, y), at, value in zip(places, xs, ys, strict=True)
        ],
        "ticks": [{"y": y_of(tick), "label": f"{tick:g}"} for tick in ticks],
        "marks": [{"x": x_of(x), "label": f"{x:g}"} for x in xs[::step]],
        "spoken": (
            f"from {number(ys[0])} at {x_name} {number(xs[0])} to {number(ys[-1])} at {x_name}"
            f" {number(xs[-1])}"
        ),
    }


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers that reach from ``low`` or below to ``high`` or above.

    >>> _ticks(0.0, 0.31), _ticks(-3.0, 8.0)
    ([0.0, 0.1, 0.2, 0.3, 0.4], [-5.0, 0.0, 5.0, 10.0])
    """
    rough = (high - low) / 4 or 0.25
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, max(last, first + 1) + 1)]
