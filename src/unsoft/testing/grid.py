"""The grid of sizes, dtypes, masks and inputs of the theme "sizes", as a sample or as all pairs.

Queries and keys are multiples of 1/4, times a power of two. So every dtype represents them, and their
products and sums are exact in float32 in any order: a logit is exactly 0 in all engines or in none, and no
comparison depends on a rounding where a formula jumps or has a corner.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Generator, Tensor

from unsoft.testing.case import DOUBLE, DTYPES, Case, CaseInputs, Normal, add_mask

Pair = tuple[Tensor, Tensor]


def _real_norms(query: Tensor, key: Tensor, normal: Normal) -> Pair:
    """Return the lengths of SmolLM2-135M: |q| = 15, |k| = 17 at width 64, 14 of it the same for all keys.

    Logits have a standard deviation of 3.5.
    """
    return 1.9 * query, 1.2 * key + 1.75 * normal(1, key.shape[1], 1, key.shape[3])


def _zero_rows(query: Tensor, key: Tensor, normal: Normal) -> Pair:
    query[:, :, 1::3], key[:, :, 1::4] = 0.0, 0.0
    return query, key


def _equal_keys(query: Tensor, key: Tensor, normal: Normal) -> Pair:
    return query, normal(*key.shape[:2], 1, key.shape[3]).expand_as(key)


def _opposite_keys(query: Tensor, key: Tensor, normal: Normal) -> Pair:
    key[:, :, 1::2] = -key[:, :, : 2 * (key.shape[2] // 2) : 2]
    return query, key


_POWERS = {"logits of 1e4": (13, 0), "logits of 1e-30": (-50, -50), "denormal": (-128, 0)}
"""Powers of two that multiply queries and keys."""
_DENORMAL_DOUBLE = (-1040, 0)
INPUTS: dict[str, Callable[[Tensor, Tensor, Normal], Pair]] = {
    "normal": lambda query, key, normal: (query, key),
    "real norms": _real_norms,
    "zero rows": _zero_rows,
    "equal keys": _equal_keys,
    "opposite keys": _opposite_keys,
    **dict.fromkeys(_POWERS, lambda query, key, normal: (query, key)),
}
"""Queries and keys by name, before they are rounded to quarters and scaled."""

KEYS: dict[str, Callable[[int], int]] = {
    "same": lambda length: length,
    "fewer": lambda length: max(1, length - 13),
    "more": lambda length: length + 133,
    "many": lambda length: 1500,
    "none": lambda length: 0,
}
"""Number of keys for a number of queries; "many" is what a decoder has in its cache."""
AXES: dict[str, tuple[Any, ...]] = {
    "length": (0, 1, 2, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 1000, 2049),
    "keys": tuple(KEYS),
    "width": (1, 3, 20, 64, 80, 96, 128, 160, 256),
    "value_width": ("same", 5, 40),
    "heads": ((2, 2), (4, 2), (4, 1)),
    "batch": (1, 2, 0),
    "dtype": tuple(DTYPES.values()),
    "inputs": tuple(INPUTS),
    "mask": (
        "none",
        "left padding",
        "padding",
        "bool",
        "additive per key with -inf",
        "additive with -inf",
        "dead rows",
    ),
    "causal": (False, True, "lower_right"),
}
"""What is varied. Lengths are around the block sizes of engines, widths around those of real models."""
EVEN_KEY_HEADS = AXES | {"heads": ((2, 2), (4, 2))}
"""For mechanisms whose key heads come in pairs."""

_COMMON = {"keys": ("same", 2), "batch": (1, 2), "causal": (True, 1), "inputs": ("normal", 1)}
"""Values that a sample contains more often than others."""
_ONCE = {"length": (0,), "keys": ("none",), "batch": (0,), "inputs": ("denormal",)}
"""Values that test little else, so that a sample contains them only once."""

COMBINED = [
    Case.parse(text)
    for text in (
        "length=1 keys=134 width=64 heads=4/2 batch=2 dtype=float32 mask=left padding causal=lower_right",
        "length=1 keys=134 heads=4/2 batch=2 dtype=float32 mask=bool causal=lower_right",
        "length=1 heads=4/2 batch=2 mask=left padding",
        "heads=4/2 batch=2 dtype=float32 mask=left padding",
        "length=17 keys=150 causal=lower_right",
        "length=17 keys=150 dtype=float32",
        "length=129 width=64 dtype=float32",
        "length=30 keys=17 mask=additive with -inf causal=lower_right",
        "length=40 width=80 dtype=float32 inputs=real norms",
        "length=40 width=128 dtype=float32 inputs=real norms",
        "inputs=zero rows causal=False",
        "dtype=float32 inputs=logits of 1e4 causal=False",
        "inputs=logits of 1e-30 causal=False",
        "mask=additive with -inf causal=False",
        "length=0 dtype=float32 mask=left padding",
        "length=9 keys=0 dtype=float32",
        "length=9 keys=0 dtype=float32 causal=False",
        "length=9 batch=0 dtype=float32",
    )
]
"""Three things at once, which a sample contains at best in pairs; each of these was a defect once."""


def sample(seed: str, axes: Mapping[str, Sequence[Any]] = AXES) -> list[Case]:
    """Return as few cases as contain every value of every axis once, combined at random by the seed.

    >>> cases = sample("7 cog")
    >>> len(cases), {case.width for case in cases} == set(AXES["width"])
    (15, True)
    """
    source = random.Random(zlib.crc32(seed.encode()))
    count = max(len(values) for values in axes.values())
    columns = {axis: _shuffled(source, axis, values, count) for axis, values in axes.items()}
    return [_case({axis: column[row] for axis, column in columns.items()}, axes) for row in range(count)]


def _shuffled(source: random.Random, axis: str, values: Sequence[Any], count: int) -> list[Any]:
    """Return every value, filled up with the common one and others, in random order."""
    common, often = _COMMON.get(axis, (values[0], 0))
    column, more = list(values), [x for x in values if x not in _ONCE.get(axis, ())] + [common] * often
    while len(column) < count:
        column.append(source.choice(more))
    source.shuffle(column)
    return column


def all_pairs(seed: str, axes: Mapping[str, Sequence[Any]] = AXES) -> Iterator[Case]:
    """Yield cases that contain every pair of values of every two axes; the seed draws the rest of each."""
    source = random.Random(zlib.crc32(seed.encode()))
    wanted = [{(a, x), (b, y)} for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]]
    missing = {frozenset(pair) for pair in wanted}
    for pair in sorted(wanted, key=lambda pair: source.random()):
        if frozenset(pair) not in missing:
            continue
        chosen = dict(pair)
        for axis in source.sample(sorted(axes), len(axes)):
            if axis not in chosen:  # the value that settles most missing pairs, among a few drawn at random
                chosen[axis] = max(
                    source.sample(list(axes[axis]), min(4, len(axes[axis]))),
                    key=lambda x: sum(frozenset({(axis, x), other}) in missing for other in chosen.items()),
                )
        missing -= {frozenset(two) for two in combinations(chosen.items(), 2)}
        yield _case(chosen, axes)


def _case(chosen: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> Case:
    """Return a case. Long ones have fewer heads and sequences: what those test, shorter ones test."""
    content = dict(chosen)
    length, keys = content["length"], KEYS[content["keys"]](content["length"])
    heads, kv_heads = content["heads"]
    if max(length, keys) > 600:
        heads, kv_heads = (2, 1) if heads != kv_heads and (4, 1) in axes["heads"] else (2, 2)
        content["batch"] = min(content["batch"], 1)
    if content["value_width"] == "same":
        content["value_width"] = content["width"]
    return Case(**content | {"keys": keys, "heads": heads, "kv_heads": kv_heads})


def draw_exact(case: Case, seed: str, query_heads: int) -> CaseInputs:
    """Return inputs whose logits are exact, with a gradient of the output at :func:`compared_rows` only."""
    normal = Normal(Generator().manual_seed(zlib.crc32(f"{seed} {case}".encode())), torch.bfloat16)
    wide = Normal(normal.source, DOUBLE)
    query = wide(case.batch, query_heads, case.length, case.width)
    key = wide(case.batch, case.kv_heads, case.keys, case.width)
    powers = _POWERS.get(case.inputs, (0, 0))
    if case.inputs == "denormal" and case.dtype == DOUBLE:
        powers = _DENORMAL_DOUBLE
    query, key = (
        (4 * x).round() / 4 * 2.0**power
        for x, power in zip(INPUTS[case.inputs](query, key, wide), powers, strict=True)
    )
    rows = compared_rows(case, seed)
    grad_out = torch.zeros(case.batch, case.heads, case.length, case.value_width, dtype=DOUBLE)
    grad_out[:, :, rows] = normal(case.batch, case.heads, len(rows), case.value_width)
    value = normal(case.batch, case.kv_heads, case.keys, case.value_width)
    # Layers with two maps have more query heads than the output has.
    leaves = {"query": query, "key": key, "value": value}
    visible = add_mask(leaves, replace(case, heads=query_heads), normal)
    return CaseInputs(case, leaves, grad_out, visible)


def compared_rows(case: Case, seed: str) -> Tensor:
    """Return all rows of short calls; of long ones the first, the last, those around blocks, some more."""
    if case.length <= 40:
        return torch.arange(case.length)
    edges = [0, 1, 62, 63, 64, 65, 126, 127, 128, 129, 192, 255, 256, 257, 511, 512, 1023, 1024, 2047, 2048]
    source = random.Random(zlib.crc32(f"rows {seed} {case}".encode()))
    some = [source.randrange(case.length) for _ in range(6)]
    chosen = {*edges, *some, case.length - 2, case.length - 1}
    return torch.tensor(sorted(row for row in chosen if row < case.length))
