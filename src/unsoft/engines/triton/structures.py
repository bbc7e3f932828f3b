"""Arguments of the kernels as named tuples, which Triton flattens. Making them needs no Triton."""

from typing import Any, NamedTuple


class View(NamedTuple):
    """A tensor (B, H, rows, columns) or (B, H, rows) and its strides; the pointer is None without a
    tensor."""

    pointer: Any
    strides: tuple[int, ...]


class KernelInputs(NamedTuple):
    """Queries, keys and values."""

    q: View
    k: View
    v: View


class Extras(NamedTuple):
    """Optional tensors of a call."""

    visible: View
    spans: View
    """(B, H, rows, 2): the first key that a row may see, and one past the last."""
    key_spans: View
    """(B, H, keys, 2): the first row that may see a key, and one past the last; for gradients of keys."""
    bias: View
    counts: View
    row_positions: View
    key_positions: View
    query_fields: View
    """(B, H, rows, fields); key fields likewise."""
    key_fields: View
    parameters: Any
    """(P, H)"""
    seed: Any


class Numbers(NamedTuple):
    """Scale of the logits; ``keep_factor`` and ``threshold`` of dropout.

    Triton passes numbers as float32. The low parts hold the remaining digits for float64.
    """

    scale: float
    scale_low: float
    keep_factor: float
    keep_factor_low: float
    threshold: int


class Shape(NamedTuple):
    """Query heads, queries, keys; key j is visible to row i only if j <= i + offset, in causal calls without
    spans."""

    heads: int
    queries: int
    keys: int
    offset: int


class Context(NamedTuple):
    """All arguments of a call besides q, k and v."""

    extras: Extras
    numbers: Numbers
    shape: Shape


class KernelResults(NamedTuple):
    """Output (B, H, L, Dv), row peaks and row totals (B, H, L)."""

    out: View
    peaks: Any
    totals: Any


class KernelParts(NamedTuple):
    """Sums over some of the keys: weighted values, peaks and masses."""

    sums: Any
    tops: Any
    masses: Any


class KernelDensity(NamedTuple):
    """Densities of keys, see kernel/density.py; all empty in calls without."""

    points: View
    """(B, Hk, S, W)"""
    squares: View
    """(B, Hk, S): |x|^2 of every point, Inf for those that do not count."""
    carry: View
    """(B, Hk, blocks, S): densities among the points before each block of rows."""
    power: Any
    """(H,)"""


class TilePoints(NamedTuple):
    """Inside a kernel: points [SIZE, W] and their squares [SIZE, 1]."""

    x: Any
    squares: Any


class DensityGradients(NamedTuple):
    """Gradients by densities, of the kernel that owns rows, for every query head."""

    dpoints: View
    """(B, H, L, W), of the points that a block owns."""
    sums: View
    """(B, H, blocks, S): gradients of the densities of keys, summed over a block of rows."""
    dpower: View
    """Partial sums (B, H, blocks)."""


NO_VIEW = View(None, ())
NO_DENSITY = KernelDensity(NO_VIEW, NO_VIEW, NO_VIEW, None)
NO_DENSITY_GRADIENTS = DensityGradients(NO_VIEW, NO_VIEW, NO_VIEW)


class QueryGradients(NamedTuple):
    """Outputs of the backward kernel that owns blocks of rows."""

    dq: View
    dparams: View
    """Partial sums (B, H, blocks, slots)."""
    dbias: View
    dfields: View
    density: DensityGradients = NO_DENSITY_GRADIENTS


class KeyGradients(NamedTuple):
    """Outputs of the backward kernel that owns blocks of keys."""

    dk: View
    dv: View
    dbias: View
    """(B, H, 1, S), for a bias that is the same in all rows; otherwise the other kernel writes it."""
    dfields: View
    dpoints: View = NO_VIEW
    """(B, Hk, S, W): gradients of the points of keys by densities in their own block's rows."""


class RowGradients(NamedTuple):
    """Numbers of every row (B, H, L) for the backward kernels, which ``prepare_kernel`` writes."""

    peaks: View
    inverses: View
    """factor / norm"""
    totals: View
    """The gradient of the summed mass."""
    deltas: View
    """The product of the output with its gradient, if the gradients of parameters need it."""


class Head(NamedTuple):
    """Inside a kernel: the context of one head."""

    number: Any
    """b * H + h"""
    extras: Extras
    shape: Shape
    parameters: Any
    scale: Any
    keep_factor: Any
    threshold: Any


class KernelRows(NamedTuple):
    """Inside a kernel: rows start + local, the formula's symbols that belong to them, and their gradients in
    backward kernels."""

    start: Any
    local: Any
    n: Any
    i: Any
    fields: Any
    """All query fields, then a number that is NaN where one of them is NaN or Inf."""
    first: Any
    """The first key that a row may see, and one past the ``last``; None: see :class:`Keys`."""
    last: Any
    m: Any
    inverse: Any
    d_total: Any


class Keys(NamedTuple):
    """Inside a kernel: keys start + local and the formula's symbols that belong to them."""

    start: Any
    local: Any
    j: Any
    fields: Any
    first: Any
    """The first row that may see a key, and one past the ``last``; None unless the program owns keys."""
    last: Any


class Walk(NamedTuple):
    """Inside a kernel: the tiles that a program visits, by number. Tiles ``whole`` .. ``checked`` are visible
    without exception; the others from ``begin`` to ``end`` cross the diagonal, a span or an edge."""

    begin: Any
    whole: Any
    checked: Any
    end: Any
    listed: Any
    """Pointer to the numbers of the tiles begin .. end, which a mask does not hide; None: they count up."""


class Fixed(NamedTuple):
    """Compile-time constants of a kernel, besides the formula and its tile sizes."""

    group: int
    """Query heads per key head."""
    width: int
    padded: int
    """The next power of two."""
    value_width: int
    value_padded: int
    causal: bool
    precision: str
    """Precision of float32 matrix products, as tl.dot names it."""
    double: bool
    exact: bool
    """True: follow the rules for NaN and Inf. Such a kernel runs only if the inputs have any."""
    parts: int
    """Programs of ``prepare_kernel``, which is the length of its flag."""
    density: bool = False
    """True: weights are divided by the densities of keys."""
    point_precision: str = "ieee"
    point_width: int = 0
    point_padded: int = 1
    M: int = 0
    """Rows and keys of a tile, or what a kernel has in their place: set when it is started, as in the other
    classes of constants."""
    N: int = 0


class ListFixed(NamedTuple):
    """Compile-time constants of the kernel that lists visible tiles, for blocks of rows or of keys."""

    of_keys: bool
    causal: bool
    M: int = 0
    N: int = 0


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
    """Compile-time constants of a kernel of linear attention, besides its tile sizes."""

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
    """True: rows attend to other rows of their chunk, not only to the state."""
    decays: bool
    backwards: bool
    """True: from the last token to the first."""
    transposed: bool
    """True: the state is read as (V, F)."""
    totals: bool
    """True: rows are divided by the sums of their weights."""
    gone: float
    """Such a sum counts as 0 below this."""
    precision: str
    double: bool
    M: int = 0
    N: int = 0


class PairFixed(NamedTuple):
    """Compile-time constants of a kernel of weights inside chunks, besides its tile sizes."""

    feature_width: int
    group: int
    """Query heads per key head."""
    of_keys: bool
    """True: the gradient of the keys; False: of the queries."""
    double: bool
    M: int = 0
    N: int = 0


class GaussianShape(NamedTuple):
    """Points of the rows and of the columns, coordinates of a point; parts that columns are cut into, and
    columns of a part."""

    rows: int
    columns: int
    width: int
    parts: int
    span: int


class GaussianFixed(NamedTuple):
    """Compile-time constants of a kernel of Gaussian matrices, besides its tile sizes."""

    stored: bool
    """True: tiles are read from memory; False: they are computed."""
    coordinates: int
    """Coordinates of the points of a tile."""
    precision: str
    M: int = 0
    N: int = 0


class GatingFixed(NamedTuple):
    """Compile-time constants of the kernel of gates on values, besides its tile sizes."""

    width: int
    double: bool
    M: int = 0
    N: int = 0
