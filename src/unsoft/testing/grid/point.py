"""The sizes and states that every mechanism is tried at, and two ways to walk them: a sample,
and all pairs."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "length": (0, 1, 2, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 1000, 2049),
    "keys": ("same", "fewer", "more", "many", "none"),
    "width": (1, 3, 20, 64, 80, 96, 128, 160, 256),
    "values": ("same", 5, 40),
    "heads": ("2/2", "4/2", "4/1"),
    "batch": (1, 2, 0),
    "dtype": ("float64", "float32", "bfloat16"),
    "inputs": (
        "normal",
        "real norms",
        "zero rows",
        "equal keys",
        "opposite keys",
        "logits of 1e4",
        "logits of 1e-30",
        "denormal",
    ),
    "mask": ("none", "left padding", "right padding", "rows", "additive per key", "additive", "dead rows"),
    "causal": ("no", "upper left", "lower right"),
}
"""What is varied. Lengths stand around the blocks of engines, widths around those of real models."""

EVEN_KEY_HEADS = AXES | {"heads": ("2/2", "4/2")}
"""For mechanisms whose key heads come in pairs."""

_COMMON = {"keys": ("same", 2), "batch": (1, 2), "causal": ("upper left", 1), "inputs": ("normal", 1)}
"""Values that a sample takes more often than others."""
_ONCE = {"length": (0,), "keys": ("none",), "batch": (0,), "inputs": ("denormal",)}
"""Values that show little else, so that a sample takes them only once."""


@dataclass(frozen=True)
class Point:
    """One value for every axis; prints as text that :meth:`parse` reads.

    >>> point = Point(length=129, width=96, dtype="float32")
    >>> print(point)
    length=129 keys=same width=96 values=same heads=2/2 batch=1 dtype=float32 inputs=normal mask=none
    causal=upper left
    >>> Point.parse(str(point)) == point
    True
    """

    length: int = 20
    keys: str = "same"
    width: int = 20
    values: str | int = "same"
    heads: str = "2/2"
    batch: int = 1
    dtype: str = "float64"
    inputs: str = "normal"
    mask: str = "none"
    causal: str = "upper left"

    @property
    def key_count(self) -> int:
        """S: as many as queries; a few less; a few more; what a decoder has behind it; none."""
        counts = {
            "same": self.length,
            "fewer": max(1, self.length - 13),
            "more": self.length + 133,
            "many": 1500,
            "none": 0,
        }
        return counts[self.keys]

    @property
    def value_width(self) -> int:
        return self.width if self.values == "same" else int(self.values)

    @property
    def head_counts(self) -> tuple[int, int]:
        """Heads of the output and of the keys."""
        heads, kv_heads = self.heads.split("/")
        return int(heads), int(kv_heads)

    @property
    def offset(self) -> int | None:
        """Row i sees the keys up to i + offset; None = not causal."""
        return {"no": None, "upper left": 0, "lower right": self.key_count - self.length}[self.causal]

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> Point:
        """The inverse of ``str``; axes that are not named keep their defaults."""
        found: dict[str, Any] = {}
        name = ""
        for word in text.split():
            head, equals, tail = word.partition("=")
            name = head if equals else name
            found[name] = tail if equals else f"{found[name]} {word}"
        if unknown := found.keys() - AXES.keys():
            raise ValueError(f"case: unknown axes {', '.join(sorted(unknown))} (known: {', '.join(AXES)})")
        for axis, value in found.items():
            known = {str(x): x for x in (*AXES[axis], getattr(cls, axis))}
            if value not in known and not (
                value.isdigit() and axis in ("length", "width", "values", "batch")
            ):
                raise ValueError(f"case: {axis}={value!r} is not one of {', '.join(known)}")
            found[axis] = known.get(value, int(value) if value.isdigit() else value)
        return cls(**found)


def sample(seed: str, axes: Mapping[str, Sequence[Any]] = AXES) -> list[Point]:
    """As few points as show every value of every axis once, combined at random by the seed.

    >>> points = sample("7 cog")
    >>> len(points), {p.width for p in points} == set(AXES["width"])
    (15, True)
    """
    source = random.Random(zlib.crc32(seed.encode()))
    count = max(len(values) for values in axes.values())
    columns = {axis: _shuffled(source, axis, values, count) for axis, values in axes.items()}
    return [
        _affordable({axis: column[row] for axis, column in columns.items()}, axes) for row in range(count)
    ]


def _shuffled(source: random.Random, axis: str, values: Sequence[Any], count: int) -> list[Any]:
    """Every value, filled up with the common one and others, in random order."""
    common, often = _COMMON.get(axis, (values[0], 0))
    column, more = list(values), [x for x in values if x not in _ONCE.get(axis, ())] + [common] * often
    while len(column) < count:
        column.append(source.choice(more))
    source.shuffle(column)
    return column


COMBINED = [
    Point.parse(text)
    for text in (
        "length=1 keys=more width=64 heads=4/2 batch=2 dtype=float32 mask=left padding causal=lower right",
        "length=1 keys=more width=20 heads=4/2 batch=2 dtype=float32 mask=rows causal=lower right",
        "length=1 keys=same width=20 heads=4/2 batch=2 dtype=float64 mask=left padding",
        "length=20 width=20 heads=4/2 batch=2 dtype=float32 mask=left padding",
        "length=17 keys=more width=20 dtype=float64 causal=lower right",
        "length=17 keys=more width=20 dtype=float32 causal=upper left",
        "length=129 width=64 dtype=float32",
        "length=30 keys=fewer width=20 dtype=float64 mask=additive causal=lower right",
        "length=40 width=80 dtype=float32 inputs=real norms",
        "length=40 width=128 dtype=float32 inputs=real norms",
        "length=20 width=20 dtype=float64 inputs=zero rows causal=no",
        "length=20 width=20 dtype=float32 inputs=logits of 1e4 causal=no",
        "length=20 width=20 dtype=float64 inputs=logits of 1e-30 causal=no",
        "length=20 width=20 dtype=float64 mask=additive causal=no",
        "length=0 width=20 dtype=float32 mask=left padding",
        "length=9 keys=none width=20 dtype=float32",
        "length=9 keys=none width=20 dtype=float32 causal=no",
        "length=9 width=20 batch=0 dtype=float32",
    )
]
"""Three things at once, which a sample shows at best in pairs; each of these was a defect once."""


def all_pairs(seed: str, axes: Mapping[str, Sequence[Any]] = AXES) -> Iterator[Point]:
    """Points that show every pair of values of every two axes; the rest of each point is drawn by the
    seed."""
    source = random.Random(zlib.crc32(seed.encode()))
    wanted = [{(a, x), (b, y)} for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]]
    missing = {frozenset(pair) for pair in wanted}
    for pair in sorted(wanted, key=lambda pair: source.random()):
        if frozenset(pair) not in missing:
            continue
        chosen = dict(pair)
        for axis in source.sample(sorted(axes), len(axes)):
            if (
                axis not in chosen
            ):  # the value that settles most of what is missing, among a few drawn at random
                options = source.sample(list(axes[axis]), min(4, len(axes[axis])))
                chosen[axis] = max(
                    options,
                    key=lambda x: sum(frozenset({(axis, x), other}) in missing for other in chosen.items()),
                )
        missing -= {frozenset(two) for two in combinations(chosen.items(), 2)}
        yield _affordable(chosen, axes)


def _affordable(chosen: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> Point:
    """The point, with fewer heads and sequences where it is long: what they show, shorter ones show."""
    point = Point(**chosen)
    if max(point.length, point.key_count) <= 600:
        return point
    heads = "2/1" if point.heads != "2/2" and "4/1" in axes["heads"] else "2/2"
    return Point(**{**chosen, "heads": heads, "batch": min(point.batch, 1)})
