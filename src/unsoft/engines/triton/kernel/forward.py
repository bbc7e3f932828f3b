"""Forward kernels of one formula. codegen.py renders a module for every formula: the functions and constants
that it prints, then this file, then backward.py. It is never imported itself.

``prepare_kernel`` looks for NaN and Inf, and prepares the rows of a backward pass. ``forward_kernel`` owns a
block of rows and walks over the keys. ``decode_kernel`` and ``combine_kernel``
serve few queries on many keys (decoding): the keys are split among programs, and a second kernel adds their
sums.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.density import density_at, load_points, tile_densities
from unsoft.engines.triton.kernel.functions import LOG2E, is_finite
from unsoft.engines.triton.kernel.tiles import (
    add_product,
    any_bad,
    at_head,
    block_and_head,
    cleaned,
    extras_at_head,
    full_precision,
    listed,
    load_entries,
    load_rows,
    load_span,
    load_values,
    must_run,
    only,
    pointers,
    positions,
    seen_entries,
    steps,
    store_rows,
    survives,
    tile_number,
    tiles_of_rows,
)
from unsoft.engines.triton.structures import Head, KernelRows, Keys, Walk


@triton.jit
def head_of(context, number, DOUBLE: tl.constexpr):
    """Return the Head ``number`` of B * H; if that is a tensor [M, 1], one for each row."""
    extras, numbers, shape = context
    batch, h = number // shape.heads, number % shape.heads
    return Head(
        number,
        extras_at_head(extras, batch, h),
        shape,
        parameters(extras.parameters, shape.heads, h),
        full_precision(numbers.scale, numbers.scale_low, DOUBLE),
        full_precision(numbers.keep_factor, numbers.keep_factor_low, DOUBLE),
        numbers.threshold,
    )


@triton.jit
def load_features(x, start, local, limit, columns, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Load queries or keys start + local."""
    return load_rows(x, start, local, limit, columns, FIXED.width, FIXED.padded, CHECK)


@triton.jit
def load_outputs(x, start, local, limit, columns, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Load values, or gradients of the output, start + local."""
    return load_rows(x, start, local, limit, columns, FIXED.value_width, FIXED.value_padded, CHECK)


@triton.jit
def rows_at(head, gradients, start, local, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Return rows start + local of a head; with their peaks and ``gradients`` in backward kernels."""
    extras, limit, fields = head.extras, head.shape.queries, (0.0,)
    if extras.query_fields.pointer is not None:
        at, mask = pointers(extras.query_fields, start, local), local < limit - start
        fields = query_fields(at, extras.query_fields.strides[3], mask, FIXED.exact)
    n = load_values(extras.counts, start, local, limit, 1.0, CHECK)
    i = positions(extras.row_positions, start, local, head.shape.offset, limit, FIXED.double, CHECK)
    first, last = load_span(extras.spans, start, local, limit)
    if gradients is None:
        return KernelRows(start, local, n, i, fields, first, last, 0.0, 1.0, 0.0)
    else:
        batch, h = head.number // head.shape.heads, head.number % head.shape.heads
        m = load_values(at_head(gradients.peaks, batch, h), start, local, limit, 0.0, CHECK)
        inverse = load_values(at_head(gradients.inverses, batch, h), start, local, limit, 1.0, CHECK)
        d_total = load_values(at_head(gradients.totals, batch, h), start, local, limit, 0.0, CHECK)
        return KernelRows(start, local, n, i, fields, first, last, m, inverse, d_total)


@triton.jit
def keys_at(head, start, local, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Return keys start + local, as a head sees them."""
    extras, limit, fields = head.extras, head.shape.keys, (0.0,)
    if extras.key_fields.pointer is not None:
        at, mask = pointers(extras.key_fields, start, local), local < limit - start
        fields = key_fields(at, extras.key_fields.strides[3], mask, FIXED.exact)
    j = positions(extras.key_positions, start, local, 0, limit, FIXED.double, CHECK)
    return Keys(start, local, j, fields, None, None)


@triton.jit
def load_bias(head, rows, keys, CHECK: tl.constexpr):
    """Return a tile of the additive mask, or None without a mask."""
    if head.extras.bias.pointer is None:
        return None
    else:
        return load_entries(head.extras.bias, rows, keys, head.shape, CHECK)


@triton.jit
def bias_of_density(raw_bias, rho, power):
    """Return the additive mask with that of the densities, which divides weight and mass by rho^power."""
    if raw_bias is None:
        return -power * tl.log(rho)
    else:
        return raw_bias - power * tl.log(rho)


@triton.jit
def biased(s, raw_bias, EXACT: tl.constexpr):
    """Return the logits with the additive mask (unless the formula applies it elsewhere), and that mask."""
    if raw_bias is None:
        return s, 0.0
    else:
        b = cleaned(raw_bias, EXACT)
        if BIAS_IN_FORMULA:
            return s, b
        else:
            return s + b, b


@triton.jit
def no_sums(FIXED: tl.constexpr):
    """Return empty sums: weighted values [M, BV], the peak so far [M, 1] (0 once a key was seen, if only
    "nothing seen" = -inf matters) and the mass [M, 1]; in exact kernels also which rows see NaN or Inf in
    queries, keys, fields or bias [M, 1], and which outputs see it in the values [M, BV]."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    return (
        tl.zeros((FIXED.M, FIXED.value_padded), REAL),
        tl.full((FIXED.M, 1), float("-inf"), REAL),
        tl.zeros((FIXED.M, 1), REAL),
        tl.zeros((FIXED.M, 1), tl.int32),
        tl.zeros((FIXED.M, FIXED.value_padded if FIXED.exact else 1), tl.float32),
    )


@triton.jit
def add_keys(sums, walk, queries, rows, k, v, head, near, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Add tiles of keys to the sums, which are rescaled when the peak rises. ``near``: the densities of the
    head, its block of rows and the points that it owns."""
    acc, top, z, bad_rows, bad_sums = sums
    local, limit, p = tl.arange(0, FIXED.N), head.shape.keys, head.parameters
    columns_d, columns_v = tl.arange(0, FIXED.padded)[:, None], tl.arange(0, FIXED.value_padded)[None, :]
    begin, end = steps(walk, CHECK, FIXED.exact)
    for step in tl.range(begin, end):
        j0 = tile_number(walk, step, CHECK, FIXED.exact) * FIXED.N
        keys = keys_at(head, j0, local[None, :], FIXED, CHECK)
        raw_keys = load_features(k, j0, keys.local, limit, columns_d, FIXED, CHECK)
        key_tile = cleaned(raw_keys, FIXED.exact)
        query_tile = cleaned(queries, FIXED.exact)
        s = tl.dot(query_tile, key_tile, input_precision=FIXED.precision, out_dtype=acc.dtype)
        raw_bias = load_bias(head, rows, keys, CHECK)
        if FIXED.density:
            density, block, own = near
            points = load_points(density, j0, limit, FIXED, FIXED.N)
            _, rho = tile_densities(density, block, own, points, j0, limit, FIXED)
            raw_bias = bias_of_density(raw_bias, rho, density.power)
        s, b = biased(s * head.scale, raw_bias, FIXED.exact)
        seen = seen_entries(head.extras.visible, head.shape, rows, keys, FIXED.causal, CHECK)
        m = 0.0
        if HAS_PEAK:
            peaks = only(seen, peak(s, 0.0, rows, keys, b, p), float("-inf"))
            new = tl.maximum(top, tl.max(peaks, 1)[:, None])
            m = peak_or_zero(new)
            acc, z = lowered(acc, z, top, m)
            top = new
        elif UNDEFINED_ALONE:
            top = tl.maximum(top, tl.max(only(seen, tl.zeros_like(s), float("-inf")), 1)[:, None])
        weight, mass = value(s, m, rows, keys, b, p)
        weight = only(seen, weight, 0.0)
        if HAS_MASS:
            z += tl.sum(only(seen, mass, 0.0), 1)[:, None]
        if head.extras.seed is not None:
            weight = tl.where(survives(head, rows, keys), weight, 0.0)
        raw_values = load_outputs(v, j0, local[:, None], limit, columns_v, FIXED, CHECK)
        values = cleaned(raw_values, FIXED.exact)
        acc = add_product(acc, weight, values, GROWS, FIXED.precision)
        if FIXED.exact:
            bad = any_bad(queries, 1)[:, None] | any_bad(raw_keys, 0)[None, :]
            if head.extras.query_fields.pointer is not None:
                bad = bad | (is_finite(rows.fields[QUERY_FIELDS]) == 0)
            if head.extras.key_fields.pointer is not None:
                bad = bad | (is_finite(keys.fields[KEY_FIELDS]) == 0)
            if raw_bias is not None:
                bad = bad | (is_finite(raw_bias) == 0)
            bad_rows = tl.maximum(bad_rows, tl.max((seen & bad).to(tl.int32), 1)[:, None])
            bad_values = (is_finite(raw_values) == 0).to(tl.float16)
            bad_sums = tl.dot(seen.to(tl.float16), bad_values, bad_sums)
    return acc, top, z, bad_rows, bad_sums


@triton.jit
def peak_or_zero(top):
    """Return the peak of rows, 0 for those that have seen nothing."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def lowered(acc, z, top, m):
    """Rescale sums that belong to the peak ``top`` to the higher peak ``m``."""
    # top <= m, so the factors are at most 1; top = -inf (nothing seen) gives 0.
    drop = (top - m) * LOG2E
    acc = acc * tl.exp2(drop)
    if HAS_MASS:
        z = z * tl.exp2(drop * DEGREE)
    return acc, z


@triton.jit
def row_slopes(m, z, rows, p, DOUBLE: tl.constexpr):
    """Return factor / norm of rows, and the slope of the norm times -1 / norm; both 0 in rows whose weights
    are 0. ``m``: -inf if a row has seen no key and the formula may be undefined there."""
    live = m != float("-inf")
    m = tl.where(live, m, 0.0)
    if HAS_MASS:
        size = norm(m, rows, z, p) + tl.zeros_like(z)
        # The smallest normal number: below it 1 / size is Inf.
        TINY: tl.constexpr = 2.2250738585072014e-308 if DOUBLE else 1.1754943508222875e-38
        gone = (tl.abs(size) < TINY) | (live == 0)
        inverse = tl.where(gone, 0.0, 1.0 / tl.where(gone, 1.0, size))
        return inverse, tl.where(inverse == 0.0, 0.0, -inverse * norm_slope(m, rows, z, p))
    else:
        return tl.where(live, factor(m, rows, p) + tl.zeros_like(z), 0.0), tl.zeros_like(z)


@triton.jit
def finished(acc, top, z, rows, head, FIXED: tl.constexpr):
    """Return the output of rows, their peak and their total mass from the sums over all keys."""
    p, m = head.parameters, peak_or_zero(top)
    if HAS_MASS:
        z += offset_mass(m, rows, p)
    else:
        z = tl.zeros_like(z) + 1.0
    if UNDEFINED_ALONE:
        m = top
    inverse, _ = row_slopes(m, z, rows, p, FIXED.double)
    return acc * (inverse * head.keep_factor), m, z


@triton.jit
def store_values(x, batch, h, start, local, limit, values):
    """Store one number per row, if there is a tensor for it."""
    if x.pointer is not None:
        tl.store(pointers(at_head(x, batch, h), start, local), values, mask=local < limit - start)


@triton.jit
def store_row_gradients(gradients, grads, result, m, z, rows, head, FIXED: tl.constexpr):
    """Store the numbers of rows that backward kernels need, from their output and its gradient."""
    batch, h, limit = head.number // head.shape.heads, head.number % head.shape.heads, head.shape.queries
    delta = tl.sum(grads.to(z.dtype) * result.to(z.dtype), 1)[:, None]
    inverse, slope = row_slopes(m, z, rows, head.parameters, FIXED.double)
    # A row whose weights are 0 has no gradient, whatever delta is.
    d_total = tl.where(inverse == 0.0, 0.0, delta * slope)
    store_values(gradients.peaks, batch, h, rows.start, rows.local, limit, peak_or_zero(m))
    store_values(gradients.inverses, batch, h, rows.start, rows.local, limit, inverse)
    store_values(gradients.totals, batch, h, rows.start, rows.local, limit, d_total)
    store_values(gradients.deltas, batch, h, rows.start, rows.local, limit, delta)


@triton.jit
def prepare_kernel(inputs, results, grad, gradients, more, flag, batches, context, FIXED: tl.constexpr):
    """Write one of FIXED.parts sums of the inputs, NaN or Inf if they have any (or if the sum overflows: then
    the exact kernels run in vain). With ``grad``, also write what backward kernels need of every row.
    ``more``: the sum of the other inputs."""
    shape, part = context.shape, tl.program_id(0)
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    local, total = tl.arange(0, FIXED.M)[:, None], tl.zeros((FIXED.M, 1), REAL)
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    if more is not None:
        total += tl.load(more)
    blocks = tl.cdiv(shape.queries, FIXED.M)
    for step in tl.range(part, blocks * batches * shape.heads, FIXED.parts):
        i0, number = step % blocks * FIXED.M, step // blocks
        batch, h = number // shape.heads, number % shape.heads
        q = load_features(at_head(inputs.q, batch, h), i0, local, shape.queries, columns_d, FIXED, True)
        total += tl.sum(q.to(REAL), 1)[:, None]
        if grad.pointer is not None:
            head = head_of(context, number, FIXED.double)
            rows = rows_at(head, None, i0, local, FIXED, True)
            g = load_outputs(at_head(grad, batch, h), i0, local, shape.queries, columns_v, FIXED, True)
            out = at_head(results.out, batch, h)
            result = load_outputs(out, i0, local, shape.queries, columns_v, FIXED, True)
            at, exists = number.to(tl.int64) * shape.queries + i0 + local, local < shape.queries - i0
            m = tl.load(results.peaks + at, mask=exists, other=0.0)
            z = tl.load(results.totals + at, mask=exists, other=1.0)
            store_row_gradients(gradients, g, result, m, z, rows, head, FIXED)
    kv_heads, blocks = shape.heads // FIXED.group, tl.cdiv(shape.keys, FIXED.M)
    for step in tl.range(part, blocks * batches * kv_heads, FIXED.parts):
        j0, number = step % blocks * FIXED.M, step // blocks
        batch, hk = number // kv_heads, number % kv_heads
        k = load_features(at_head(inputs.k, batch, hk), j0, local, shape.keys, columns_d, FIXED, True)
        v = load_outputs(at_head(inputs.v, batch, hk), j0, local, shape.keys, columns_v, FIXED, True)
        total += tl.sum(k.to(REAL), 1)[:, None] + tl.sum(v.to(REAL), 1)[:, None]
    tl.store(flag + part, tl.sum(total))


@triton.jit
def near_of(density, batch, h, block, i0, limit, FIXED: tl.constexpr):
    """Return the densities of a head, the block of rows and the points that it owns; 0 without densities."""
    if not FIXED.density:
        return 0.0
    else:
        own = density_at(density, batch, h, FIXED)
        return own, block, load_points(own, i0, limit, FIXED, FIXED.M)


@triton.jit
def owned_rows(context, FIXED: tl.constexpr):
    """Return the block of rows that a program owns: its number, batch entry, head, first row and Head."""
    shape = context.shape
    blocks = tl.cdiv(shape.queries, FIXED.M)
    block, number = block_and_head(blocks)
    if FIXED.causal:
        block = blocks - 1 - block  # longest rows first
    head = head_of(context, number, FIXED.double)
    return block, number // shape.heads, number % shape.heads, block * FIXED.M, head


@triton.jit
def forward_kernel(inputs, results, grad, gradients, flag, context, lists, density, FIXED: tl.constexpr):
    """Write output, peaks and totals; or, with ``grad``, only what backward kernels need of every row, before
    NaN is added to the output."""
    shape = context.shape
    if must_run(flag, FIXED):
        block, batch, h, i0, head = owned_rows(context, FIXED)
        local, columns_d = tl.arange(0, FIXED.M)[:, None], tl.arange(0, FIXED.padded)[None, :]
        columns_v = tl.arange(0, FIXED.value_padded)[None, :]
        rows = rows_at(head, None, i0, local, FIXED, True)
        queries = load_features(at_head(inputs.q, batch, h), i0, local, shape.queries, columns_d, FIXED, True)
        sums, walk = no_sums(FIXED), tiles_of_rows(i0, rows, shape, FIXED.causal, FIXED.M, FIXED.N)
        walk = listed(walk, at_head(lists, batch, h), block)
        near = near_of(density, batch, h, block, i0, shape.queries, FIXED)
        k, v = at_head(inputs.k, batch, h // FIXED.group), at_head(inputs.v, batch, h // FIXED.group)
        if walk.listed is None and not FIXED.exact:
            sums = add_keys(sums, walk, queries, rows, k, v, head, near, FIXED, False)
        sums = add_keys(sums, walk, queries, rows, k, v, head, near, FIXED, True)
        acc, top, z, bad_rows, bad_sums = sums
        result, m, z = finished(acc, top, z, rows, head, FIXED)
        if grad.pointer is None:
            at = head.number.to(tl.int64) * shape.queries + i0 + local
            exists = local < shape.queries - i0
            if FIXED.exact:
                result = tl.where((bad_rows > 0) | (bad_sums > 0), float("nan"), result)
            out = at_head(results.out, batch, h)
            store_rows(out, i0, local, shape.queries, columns_v, result, FIXED.value_width)
            tl.store(results.peaks + at, m, mask=exists)
            tl.store(results.totals + at, z, mask=exists)
        else:
            g = at_head(grad, batch, h)
            grads = load_outputs(g, i0, local, shape.queries, columns_v, FIXED, True)
            store_row_gradients(gradients, grads, result, m, z, rows, head, FIXED)


@triton.jit
def decode_kernel(inputs, parts, context, splits, FIXED: tl.constexpr):
    """Write sums over one of several parts of the keys: (B, Hk, splits, M, BV), and peaks and masses (B, Hk,
    splits, M). With spans the parts are those of the keys that some row may see.

    The rows of a tile are all queries of all query heads that share a key head, so keys and values are read
    once. Reading them is nearly all the work, so the rules for NaN and Inf are followed at once."""
    shape = context.shape
    split, number = block_and_head(splits)
    kv_heads = shape.heads // FIXED.group
    batch, hk = number // kv_heads, number % kv_heads
    # Rows beyond the last query of the last head repeat another row; combine_kernel does not read them.
    r = tl.arange(0, FIXED.M)[:, None]
    h, local = hk * FIXED.group + r // shape.queries % FIXED.group, r % shape.queries
    head = head_of(context, batch * shape.heads + h, FIXED.double)
    rows = rows_at(head, None, 0, local, FIXED, True)
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    queries = load_features(at_head(inputs.q, batch, h), 0, local, shape.queries, columns_d, FIXED, True)
    begin, end = 0, tl.cdiv(shape.keys, FIXED.N)
    if rows.first is not None:
        hull = tiles_of_rows(0, rows, shape, False, FIXED.M, FIXED.N)
        begin, end = hull.begin, hull.end
    size = tl.cdiv(end - begin, splits)
    begin += split * size
    walk = Walk(begin, begin, begin, tl.minimum(begin + size, end), None)
    k, v = at_head(inputs.k, batch, hk), at_head(inputs.v, batch, hk)
    sums = add_keys(no_sums(FIXED), walk, queries, rows, k, v, head, None, FIXED, True)
    acc, top, z, bad_rows, bad_sums = sums
    acc = tl.where((bad_rows > 0) | (bad_sums > 0), float("nan"), acc)
    at = (number.to(tl.int64) * splits + split) * FIXED.M + r
    tl.store(parts.sums + at * FIXED.value_padded + columns_v, acc)
    tl.store(parts.tops + at, top)
    tl.store(parts.masses + at, z)


@triton.jit
def combine_kernel(parts, results, context, splits, ROWS: tl.constexpr, FIXED: tl.constexpr):
    """Write one row from the sums of its N or fewer splits; the tile of decode_kernel had ROWS rows.

    ``splits`` is no constexpr: it grows with the keys, and every new value would compile another kernel."""
    shape = context.shape
    row, number = block_and_head(shape.queries)
    batch, h = number // shape.heads, number % shape.heads
    kv_heads = shape.heads // FIXED.group
    r = (h % FIXED.group) * shape.queries + row
    split, columns = tl.arange(0, FIXED.N)[:, None], tl.arange(0, FIXED.value_padded)[None, :]
    at = ((batch * kv_heads + h // FIXED.group).to(tl.int64) * splits + split) * ROWS + r
    exists = split < splits
    part = tl.load(parts.sums + at * FIXED.value_padded + columns, mask=exists, other=0.0)
    z = tl.load(parts.masses + at, mask=exists, other=0.0)
    highest = tl.zeros((1, 1), z.dtype)
    if HAS_PEAK or UNDEFINED_ALONE:
        top = tl.load(parts.tops + at, mask=exists, other=float("-inf"))
        highest = tl.max(top, 0)[:, None]
    if HAS_PEAK:
        part, z = lowered(part, z, top, peak_or_zero(highest))
    one = tl.zeros((1, 1), tl.int32)
    head = head_of(context, number, FIXED.double)
    rows = rows_at(head, None, row, one, FIXED, True)
    result, m, z = finished(tl.sum(part, 0)[None, :], highest, tl.sum(z, 0)[:, None], rows, head, FIXED)
    out = at_head(results.out, batch, h)
    at_row = out.pointer + row.to(tl.int64) * out.strides[2] + columns * out.strides[3] + one
    tl.store(at_row, result.to(out.pointer.dtype.element_ty), mask=columns < FIXED.value_width)
    tl.store(results.peaks + number.to(tl.int64) * shape.queries + row + one, m)
    tl.store(results.totals + number.to(tl.int64) * shape.queries + row + one, z)
