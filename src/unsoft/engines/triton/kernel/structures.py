"""What the kernels are given, as plain tuples with names; no Triton is needed to make them."""

from __future__ import annotations

from typing import Any, NamedTuple


class View(NamedTuple):
    """A tensor: where it begins, None if there is none, and its strides. (B, H, rows, columns),
    or (B, H, rows) of numbers per row."""

    pointer: Any
    strides: tuple[int, ...]


class Extras(NamedTuple):
    """What a call may have besides q, k and v."""

    visible: View
    bias: View
    counts: View
    row_positions: View
    key_positions: View
    query_fields: View
    """(B, H, rows, fields); of keys likewise."""
    key_fields: View
    parameters: Any
    """(P, H)"""
    seed: Any


class Numbers(NamedTuple):
    """``keep_factor`` and ``threshold`` belong to dropout.

    The lower parts matter in float64, since numbers come as float32.
    """

    scale: float
    scale_low: float
    keep_factor: float
    keep_factor_low: float
    threshold: int


class Shape(NamedTuple):
    """Query heads, queries, keys; key j is visible to row i only if j <= i + offset, in causal calls."""

    heads: int
    queries: int
    keys: int
    offset: int


class RowGradients(NamedTuple):
    """What the backward kernels need of every row (B, H, L)."""

    peaks: View
    inverses: View
    """factor / norm"""
    totals: View
    """The gradient of the summed mass."""


class Head(NamedTuple):
    """Inside a kernel: what belongs to one head."""

    number: Any
    """b * H + h"""
    extras: Extras
    shape: Shape
    parameters: Any
    scale: Any
    keep_factor: Any
    threshold: Any


class Rows(NamedTuple):
    """Inside a kernel: rows start + local, and the symbols of the formula that belong to them; then what the
    backward kernels need of them."""

    start: Any
    local: Any
    n: Any
    i: Any
    fields: Any
    """The values of all fields of queries, and a number that is NaN where one of them is NaN or Inf."""
    m: Any
    inverse: Any
    d_total: Any


class Keys(NamedTuple):
    """Inside a kernel: keys start + local, and the symbols of the formula that belong to them."""

    start: Any
    local: Any
    j: Any
    fields: Any


class Fixed(NamedTuple):
    """What a kernel is compiled for, besides the formula and its tile sizes."""

    group: int
    """Query heads per key head."""
    width: int
    padded: int
    """The next power of two."""
    value_width: int
    value_padded: int
    causal: bool
    precision: str
    """Of products of float32 matrices, as tl.dot names it."""
    double: bool
    exact: bool
    """Are the rules for NaN and Inf followed? Such a kernel runs only if there are any."""


class States(NamedTuple):
    """States of linear attention before each chunk: (B, heads, chunks, F, V), and (B, heads, chunks, F) of
    the column that sums the keys."""

    matrices: Any
    columns: Any
    chunks: int
    """1 if all rows see the same."""


class ChunkShape(NamedTuple):
    """Heads of what is computed, heads of the states, tokens."""

    heads: int
    state_heads: int
    tokens: int


class ChunkFixed(NamedTuple):
    """What a kernel of linear attention is compiled for, besides its tile sizes."""

    feature_width: int
    value_width: int
    group: int
    """Query heads per key head."""
    members: int
    """Heads that are summed over, for each head of what is computed."""
    shared: int
    """Heads of what is computed that read the same head."""
    causal: bool
    inside: bool
    """Do rows take from other rows of their chunk?"""
    decays: bool
    backwards: bool
    """From the last token to the first?"""
    transposed: bool
    """Is the state read as (V, F)?"""
    totals: bool
    """Are the rows divided by the sums of their weights?"""
    gone: float
    """Such a sum counts as 0 below this."""
    precision: str
    double: bool
    exact: bool = False


class PairFixed(NamedTuple):
    """What a kernel of weights inside chunks is compiled for, besides its tile sizes."""

    feature_width: int
    group: int
    """Query heads per key head."""
    of_keys: bool
    """Is the gradient that of the keys?"""
    double: bool
    exact: bool = False


class GaussianShape(NamedTuple):
    """Points of the rows and of the columns, coordinates of a point; parts that columns are cut into, and
    columns of a part."""

    rows: int
    columns: int
    width: int
    parts: int
    span: int


class GaussianFixed(NamedTuple):
    """What a kernel of Gaussian matrices is compiled for, besides its tile sizes."""

    stored: bool
    """Are the tiles read, not made?"""
    coordinates: int
    """Of a tile of points."""
    precision: str
    exact: bool = False


class GatingFixed(NamedTuple):
    """What the kernel of gates on values is compiled for, besides its tile sizes."""

    width: int
    double: bool
    exact: bool = False
