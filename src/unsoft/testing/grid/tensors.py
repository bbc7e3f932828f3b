"""The tensors of one point of the grid, drawn from a seed.

Queries and keys are multiples of 1/4, times a power of two. So every dtype holds them, and their products and
sums are exact in float32 in any order: a logit is exactly 0 in all engines or in none, and no comparison
hangs on a rounding where a formula jumps or has a corner.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from unsoft.testing.grid.point import Point

DOUBLE = torch.float64


@dataclass(frozen=True)
class Tensors:
    """What a call gets, in float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor | None
    """A bool mask, if there is one."""
    bias: Tensor | None
    """A float mask, if there is one."""
    upstream: Tensor
    """The gradient of the output: 0 but for the chosen rows."""
    rows: Tensor
    """The rows that are compared."""


def draw(point: Point, seed: str, query_heads: int) -> Tensors:
    """A function of the point and the seed."""
    source = Generator().manual_seed(zlib.crc32(f"{seed} {point}".encode()))
    heads, kv_heads = point.head_counts
    keys = point.key_count

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=DOUBLE)

    query, key = (
        normal(point.batch, query_heads, point.length, point.width),
        normal(point.batch, kv_heads, keys, point.width),
    )
    query, key = INPUTS[point.inputs](point, query, key, normal)
    rows = _rows(point, source)
    upstream = torch.zeros(point.batch, heads, point.length, point.value_width, dtype=DOUBLE)
    upstream[:, :, rows] = _narrow(normal(point.batch, heads, len(rows), point.value_width))
    value = _narrow(normal(point.batch, kv_heads, keys, point.value_width))
    mask = MASKS[point.mask](point, source, query_heads)
    visible, bias = (None, mask) if mask is not None and mask.is_floating_point() else (mask, None)
    return Tensors(query, key, value, visible, bias, upstream, rows)


def _rows(point: Point, source: Generator) -> Tensor:
    """All rows of short calls; of long ones the first, the last, those around blocks, and some at random."""
    if point.length <= 40:
        return torch.arange(point.length)
    edges = [0, 1, 62, 63, 64, 65, 126, 127, 128, 129, 192, 255, 256, 257, 511, 512, 1023, 1024, 2047, 2048]
    some = torch.randint(point.length, (6,), generator=source).tolist()
    chosen = {*edges, *some, point.length - 2, point.length - 1}
    return torch.tensor(sorted(row for row in chosen if row < point.length))


def _narrow(x: Tensor) -> Tensor:
    """The nearest numbers that every dtype holds."""
    return x.bfloat16().double()


def _quarters(x: Tensor) -> Tensor:
    return (4 * x).round() / 4


Draw = Callable[[Point, Tensor, Tensor, Callable[..., Tensor]], tuple[Tensor, Tensor]]


def _normal(point: Point, query: Tensor, key: Tensor, normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    return _quarters(query), _quarters(key)


def _real(point: Point, query: Tensor, key: Tensor, normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """As in SmolLM2-135M: |q| = 15, |k| = 17 at width 64, of which 14 are the same for all keys;
    logits spread by 3.5."""
    return _quarters(1.9 * query), _quarters(1.2 * key + 1.75 * normal(1, key.shape[1], 1, key.shape[3]))


def _zero_rows(
    point: Point, query: Tensor, key: Tensor, normal: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    query[:, :, 1::3], key[:, :, 1::4] = 0.0, 0.0
    return _quarters(query), _quarters(key)


def _equal_keys(
    point: Point, query: Tensor, key: Tensor, normal: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    return _quarters(query), _quarters(normal(key.shape[0], key.shape[1], 1, key.shape[3])).expand_as(
        key
    ).clone()


def _opposite_keys(
    point: Point, query: Tensor, key: Tensor, normal: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    pairs = _quarters(key)
    pairs[:, :, 1::2] = -pairs[:, :, : 2 * (key.shape[2] // 2) : 2]
    return _quarters(query), pairs


def _times(query_power: dict[str, int], key_power: dict[str, int]) -> Draw:
    def scaled(
        point: Point, query: Tensor, key: Tensor, normal: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor]:
        return _quarters(query) * 2.0 ** query_power[point.dtype], _quarters(key) * 2.0 ** key_power[
            point.dtype
        ]

    return scaled


INPUTS: dict[str, Draw] = {
    "normal": _normal,
    "real norms": _real,
    "zero rows": _zero_rows,
    "equal keys": _equal_keys,
    "opposite keys": _opposite_keys,
    "logits of 1e4": _times(
        dict.fromkeys(("float64", "float32", "bfloat16"), 13),
        dict.fromkeys(("float64", "float32", "bfloat16"), 0),
    ),
    "logits of 1e-30": _times(
        dict.fromkeys(("float64", "float32", "bfloat16"), -50),
        dict.fromkeys(("float64", "float32", "bfloat16"), -50),
    ),
    "denormal": _times(
        {"float64": -1040, "float32": -128, "bfloat16": -128},
        dict.fromkeys(("float64", "float32", "bfloat16"), 0),
    ),
}
"""Queries and keys by name."""


def _padding(point: Point, source: Generator, *, left: bool) -> Tensor:
    """(B, 1, 1, S): every sequence lacks some keys at one end."""
    keys = point.key_count
    absent = torch.randint(0, keys // 2 + 1, (point.batch, 1, 1, 1), generator=source)
    place = torch.arange(keys)
    return place >= absent if left else place < keys - absent


def _some(point: Point, source: Generator, heads: int) -> Tensor:
    return torch.rand(point.batch, heads, point.length, point.key_count, generator=source) < 0.7


def _dead(point: Point, source: Generator) -> Tensor:
    seen = _some(point, source, 1)
    seen[:, :, ::3] = False
    return seen


def _additive(*shape: int, source: Generator) -> Tensor:
    """A float mask with entries that hide."""
    mask = _narrow(torch.randn(*shape, generator=source, dtype=DOUBLE))
    return mask.masked_fill(torch.rand(*shape, generator=source) < 0.2, -torch.inf)


MASKS: dict[str, Callable[[Point, Generator, int], Tensor | None]] = {
    "none": lambda point, source, heads: None,
    "left padding": lambda point, source, heads: _padding(point, source, left=True),
    "right padding": lambda point, source, heads: _padding(point, source, left=False),
    "rows": lambda point, source, heads: _some(point, source, heads),
    "additive per key": lambda point, source, heads: _additive(
        point.batch, 1, 1, point.key_count, source=source
    ),
    "additive": lambda point, source, heads: _additive(point.length, point.key_count, source=source),
    "dead rows": lambda point, source, heads: _dead(point, source),
}
"""Masks by name. Bool: True = visible; floating: added."""
