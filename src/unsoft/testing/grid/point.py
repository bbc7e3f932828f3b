"""The sizes and states that every mechanism is tried at, and two ways to walk them: a sample, and all pairs."""

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
        "normal", "real norms", "zero rows", "equal keys", "opposite keys", "logits of 1e4", "logits of 1e-30", "denormal",
    ),
    "mask": ("none", "left padding", "right padding", "rows", "additive per key", "additive", "dead rows"),
    "causal": ("no", "upper left", "lower right"),
}  # fmt: skip
"""What is varied. Lengths stand around the blocks of engines, widths around those of real models."""

EVEN_KEY_HEADS = AXES | {"heads": ("2/2", "4/2")}
"""For mechanisms whose key heads come in pairs."""

_COMMON = {"keys": ("same", 3), "batch": (1, 3), "causal": ("upper left", 3), "inputs": ("normal", 2)}
"""Values that a sample should prefer, and how often it takes them for each time it takes another one."""


@dataclass(frozen=True)
class Point:
    """One value for every axis; prints as text that :meth:`parse` reads.

    >>> point = Point(length=129, width=96, dtype="float32")
    >>> print(point)
    length=129 keys=same width=96 values=same heads=2/2 batch=1 dtype=float32 inputs=normal mask=none causal=upper left
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
        return counts[self.keys]  # fmt: skip

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
    common, often = _COMMON.get(axis, (None, 0))
    column = list(values)
    while len(column) < count:
        column.append(source.choice([*values, *[common] * often] if common in values else list(values)))
    source.shuffle(column)
    return column


def all_pairs(seed: str, axes: Mapping[str, Sequence[Any]] = AXES) -> Iterator[Point]:
    """Points that show every pair of values of every two axes; the rest of each point is drawn by the seed."""
    source = random.Random(zlib.crc32(seed.encode()))
    wanted = [
        {(a, x), (b, y)}
        for a, b in combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
    ]  # fmt: skip
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
