"""Linear attention in chunks of M tokens. Two kernels serve the forward and the backward pass:

state_kernel    walks over the chunks and sums products of rows, x_t [y_t, e_t]^T: the state before each chunk
chunk_kernel    rows of a chunk from the other rows of that chunk and from the state

            x, y, z of chunk_kernel      state
output      queries, keys, values        of keys and values
dq          gradients, values, keys      the same, transposed
dk          values, gradients, queries   of queries and gradients, from the end to the beginning; transposed
dv          keys, queries, gradients     the same

Values have an additional column of ones, which sums the weights themselves. The gradient of that sum is the
additional column of the gradients. Every program owns what it writes. Widths are cut into blocks of N.

If features are logarithms, the weights inside chunks are an argument, and before a chunk is added
to the state, each feature of the state is multiplied by ``kept`` of that chunk.

Those weights, of rows and keys of the same chunk of M tokens, and their gradients are

    W_ij = sum_f exp(q_if + k_jf - top_i)    j <= i

with every term computed on its own (pairs_kernel, pair_gradients_kernel), N features at a time. A matrix
product would need a common factor per feature for all keys of the chunk. A row that does not see the largest
key could then underflow to 0. ``top_i`` is the largest exponent of a row over all keys it sees, also those
before the chunk.

decay_kernel computes the gradient of log d: summed over the weights d^(i-j) q_i . k_j inside a chunk, over
what its rows read from the state before it, and over how that state becomes the state after it.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import LOG2E
from unsoft.engines.triton.kernel.tiles import at_head, load_rows, load_values, store_rows


@triton.jit
def rows_of(x, t0, tokens, limit, columns, WIDTH: tl.constexpr, FIXED: tl.constexpr):
    """Load columns of tokens t0 + ``tokens``, in the orientation of the index tensors; 0 outside."""
    PADDED: tl.constexpr = -(-WIDTH // FIXED.N) * FIXED.N
    tile = load_rows(x, t0, tokens, limit, columns, WIDTH, PADDED, True)
    return tile.to(tl.float64 if FIXED.double else tl.float32)


@triton.jit
def logarithm_at(log_decay, head):
    """Return log2 of a head's decay, 0 without decay."""
    if log_decay is None:
        return 0.0
    else:
        return tl.load(log_decay + head)


@triton.jit
def state_at(states, number, chunk, FIXED: tl.constexpr):
    """Return pointers to the state before a chunk: its matrix (F, V) and its column (F)."""
    at = number.to(tl.int64) * states.chunks + chunk
    matrix = states.matrices + at * (FIXED.feature_width * FIXED.value_width)
    return matrix, states.columns + at * FIXED.feature_width


@triton.jit
def multiplied(left, right, acc, FIXED: tl.constexpr):
    """Return acc + left @ right in the precision of the call."""
    return tl.dot(left, right, acc, input_precision=FIXED.precision, out_dtype=acc.dtype)


@triton.jit
def state_kernel(x, y, extra, log_decay, kept, start, after, states, shape, FIXED: tl.constexpr):
    """Write the state before each chunk and the state after the last.

    ``extra``: the additional column of y, None = all 1. ``start`` and ``after``: (B, heads, F, V + 1);
    ``kept``: (B, heads, chunks, F)."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    blocks: tl.constexpr = (FIXED.value_width + FIXED.N - 1) // FIXED.N
    block, number = tl.program_id(0), tl.program_id(1)
    batch, own = number // shape.heads, number % shape.heads
    f, v = block // blocks * FIXED.N + tl.arange(0, FIXED.N), block % blocks * FIXED.N + tl.arange(0, FIXED.N)
    inside = (f < FIXED.feature_width)[:, None] & (v < FIXED.value_width)[None, :]
    # The first of the programs with the same f writes the column.
    in_column = f + block % blocks * FIXED.feature_width < FIXED.feature_width
    tokens, log_d = tl.arange(0, FIXED.M), logarithm_at(log_decay, own)
    WIDE: tl.constexpr = FIXED.value_width + 1
    outer = number.to(tl.int64) * (FIXED.feature_width * WIDE) + f * WIDE
    matrix, column = tl.zeros((FIXED.N, FIXED.N), REAL), tl.zeros((FIXED.N,), REAL)
    if start is not None:
        matrix += tl.load(start + outer[:, None] + v[None, :], mask=inside, other=0.0)
        column += tl.load(start + outer + FIXED.value_width, mask=in_column, other=0.0)
    chunks = tl.cdiv(shape.tokens, FIXED.M)
    for c in tl.range(0, chunks):
        chunk = c
        if FIXED.backwards:
            chunk = chunks - 1 - c
        if FIXED.causal:
            to, to_column = state_at(states, number, chunk, FIXED)
            tl.store(to + f[:, None] * FIXED.value_width + v[None, :], matrix, mask=inside)
            tl.store(to_column + f, column, mask=in_column)
        t0 = chunk * FIXED.M
        there = tl.minimum(shape.tokens - t0, FIXED.M)
        fade = tl.full((1, FIXED.M), 1.0, REAL)
        if kept is not None:
            kept_at = kept + (number.to(tl.int64) * chunks + chunk) * FIXED.feature_width + f
            share = tl.load(kept_at, mask=f < FIXED.feature_width, other=0.0)
            matrix, column = matrix * share[:, None], column * share
        if FIXED.decays:
            share = tl.exp2(log_d * there.to(REAL))
            matrix, column = matrix * share, column * share
            age = tl.maximum(there - 1 - tokens, 0)
            if FIXED.backwards:
                age = tokens + 1
            fade = tl.exp2(log_d * age.to(REAL))[None, :]
        for member in range(FIXED.members):
            head = (own * FIXED.members + member) // FIXED.shared
            x_h, y_h = at_head(x, batch, head), at_head(y, batch, head)
            left = rows_of(x_h, t0, tokens[None, :], shape.tokens, f[:, None], FIXED.feature_width, FIXED)
            right = rows_of(y_h, t0, tokens[:, None], shape.tokens, v[None, :], FIXED.value_width, FIXED)
            left = left * fade
            matrix = multiplied(left, right, matrix, FIXED)
            e = 1.0
            if extra.pointer is not None:
                extra_h = at_head(extra, batch, head)
                e = load_values(extra_h, t0, tokens[None, :], shape.tokens, 0.0, True).to(REAL)
            column += tl.sum(left * e, 1)
    tl.store(after + outer[:, None] + v[None, :], matrix, mask=inside)
    tl.store(after + outer + FIXED.value_width, column, mask=in_column)
    if not FIXED.causal:  # all rows see the state after the last key
        to, to_column = state_at(states, number, 0, FIXED)
        tl.store(to + f[:, None] * FIXED.value_width + v[None, :], matrix, mask=inside)
        tl.store(to_column + f, column, mask=in_column)


@triton.jit
def add_before(sums, x, slopes, states, number, chunk, at, log_d, shape, FIXED: tl.constexpr):
    """Add what the rows of a chunk read from the state to the sums: a block of columns, and totals."""
    result, total = sums
    INNER: tl.constexpr = FIXED.value_width if FIXED.transposed else FIXED.feature_width
    OUTER: tl.constexpr = FIXED.feature_width if FIXED.transposed else FIXED.value_width
    t0, a, age, o = at
    state, column = state_at(states, number, chunk if FIXED.causal else 0, FIXED)
    seen, mass = tl.zeros(result.shape, result.dtype), tl.zeros(total.shape, total.dtype)
    for start in tl.range(0, INNER, FIXED.N):
        i = start + tl.arange(0, FIXED.N)
        rows = rows_of(x, t0, a, shape.tokens, i[None, :], INNER, FIXED)
        if FIXED.transposed:
            entry = o[None, :] * FIXED.value_width + i[:, None]
        else:
            entry = i[:, None] * FIXED.value_width + o[None, :]
        tile = tl.load(state + entry, mask=(i < INNER)[:, None] & (o < OUTER)[None, :], other=0.0)
        seen = multiplied(rows, tile, seen, FIXED)
        if FIXED.totals:
            mass += tl.sum(rows * tl.load(column + i, mask=i < INNER, other=0.0)[None, :], 1)[:, None]
    if FIXED.transposed:
        extra = tl.load(column + o, mask=o < OUTER, other=0.0)[None, :]
        if FIXED.backwards:
            seen += extra
        elif slopes.pointer is not None:
            seen += extra * load_values(slopes, t0, a, shape.tokens, 0.0, True)
    if FIXED.decays:
        fade = tl.exp2(log_d * age.to(result.dtype))
        seen, mass = seen * fade, mass * fade
    return result + seen, total + mass


@triton.jit
def add_inside(sums, x, y, z, slopes, weights_in, at, log_d, shape, FIXED: tl.constexpr):
    """Add what the rows of a chunk read from rows of the same chunk to the sums. ``weights_in``: the weights
    by row and by index of the key in the chunk; None = they are computed here."""
    result, total = sums
    INNER: tl.constexpr = FIXED.value_width if FIXED.transposed else FIXED.feature_width
    OUTER: tl.constexpr = FIXED.feature_width if FIXED.transposed else FIXED.value_width
    t0, a, age, o = at
    b = tl.arange(0, FIXED.M)
    distance = a - b[None, :]
    if FIXED.backwards:
        distance = -distance
    weights = tl.zeros((FIXED.M, FIXED.M), result.dtype)
    if weights_in.pointer is not None:
        if FIXED.backwards:
            weights += load_rows(weights_in, t0, b[None, :], shape.tokens, a, FIXED.M, FIXED.M, True)
        else:
            weights += load_rows(weights_in, t0, a, shape.tokens, b[None, :], FIXED.M, FIXED.M, True)
    else:
        for start in tl.range(0, INNER, FIXED.N):
            i = start + tl.arange(0, FIXED.N)
            rows = rows_of(x, t0, a, shape.tokens, i[None, :], INNER, FIXED)
            others = rows_of(y, t0, b[None, :], shape.tokens, i[:, None], INNER, FIXED)
            weights = multiplied(rows, others, weights, FIXED)
    if FIXED.transposed and slopes.pointer is not None:
        if FIXED.backwards:
            weights += load_values(slopes, t0, b[None, :], shape.tokens, 0.0, True)
        else:
            weights += load_values(slopes, t0, a, shape.tokens, 0.0, True)
    if FIXED.decays:
        weights = weights * tl.exp2(log_d * tl.maximum(distance, 0).to(result.dtype))
    weights = tl.where(distance >= 0, weights, 0.0)
    if FIXED.totals:
        total += tl.sum(weights, 1)[:, None]
    values = rows_of(z, t0, b[:, None], shape.tokens, o[None, :], OUTER, FIXED)
    return multiplied(weights, values, result, FIXED), total


@triton.jit
def chunk_kernel(x, y, z, slopes, weights_in, log_decay, states, out, totals, shape, FIXED: tl.constexpr):
    """Write the rows of a chunk.

    ``slopes``: the additional column of the gradients, for dq and dk. ``weights_in``: the weights inside
    chunks, None = computed here. ``totals``: sums of the weights of each row, by which rows are divided."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    OUTER: tl.constexpr = FIXED.feature_width if FIXED.transposed else FIXED.value_width
    blocks: tl.constexpr = (OUTER + FIXED.N - 1) // FIXED.N
    chunk, o = tl.program_id(0) // blocks, tl.program_id(0) % blocks * FIXED.N + tl.arange(0, FIXED.N)
    batch, h = tl.program_id(1) // shape.heads, tl.program_id(1) % shape.heads
    t0, a = chunk * FIXED.M, tl.arange(0, FIXED.M)[:, None]
    age = a + 1
    if FIXED.backwards:
        age = tl.maximum(tl.minimum(shape.tokens - t0, FIXED.M) - 1 - a, 0)
    sums = (tl.zeros((FIXED.M, FIXED.N), REAL), tl.zeros((FIXED.M, 1), REAL))
    at, own, x_h = (t0, a, age, o), batch * shape.state_heads, at_head(x, batch, h)
    if not FIXED.decays:  # one state for all heads that share a key
        owner, slopes_x = own + h * FIXED.members // FIXED.group, at_head(slopes, batch, h)
        sums = add_before(sums, x_h, slopes_x, states, owner, chunk, at, 0.0, shape, FIXED)
    for member in range(FIXED.members):
        head = h * FIXED.members + member
        other = head // FIXED.shared
        mate = other if FIXED.backwards else h  # the query head
        slopes_h = at_head(slopes, batch, mate)
        log_d = logarithm_at(log_decay, head)
        if FIXED.decays:
            sums = add_before(sums, x_h, slopes_h, states, own + head, chunk, at, log_d, shape, FIXED)
        if FIXED.inside:
            y_h, z_h = at_head(y, batch, other), at_head(z, batch, other)
            weights_h = at_head(weights_in, batch, mate)
            sums = add_inside(sums, x_h, y_h, z_h, slopes_h, weights_h, at, log_d, shape, FIXED)
    result, total = sums
    if FIXED.totals:
        gone = tl.abs(total) < FIXED.gone
        result = tl.where(gone, 0.0, result / tl.where(gone, 1.0, total))
        total_at = totals + tl.program_id(1).to(tl.int64) * shape.tokens + t0 + a
        # The first of the programs with the same rows writes.
        tl.store(
            total_at,
            total,
            mask=a + tl.program_id(0) % blocks * FIXED.M < tl.minimum(shape.tokens - t0, FIXED.M),
        )
    store_rows(at_head(out, batch, h), t0, a, shape.tokens, o[None, :], result, OUTER)


@triton.jit
def decay_kernel(q, k, v, grad, slopes, log_decay, states, later, out, shape, FIXED: tl.constexpr):
    """Write the gradient of log d of a chunk. ``states``: before each chunk; ``later``: gradients of the
    states after each chunk; ``out``: (B, H, chunks)."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    chunk, number = tl.program_id(0), tl.program_id(1)
    batch, h = number // shape.heads, number % shape.heads
    q, k = at_head(q, batch, h), at_head(k, batch, h // FIXED.group)
    grad, v = at_head(grad, batch, h), at_head(v, batch, h // FIXED.group)
    log_d, t0, tokens = tl.load(log_decay + h), chunk * FIXED.M, tl.arange(0, FIXED.M)
    there = tl.minimum(shape.tokens - t0, FIXED.M)
    a, b = tokens[:, None], tokens[None, :]
    since, until = (a + 1).to(REAL), tl.maximum(there - 1 - a, 0).to(REAL)
    before, column = state_at(states, number, chunk, FIXED)
    after, after_column = state_at(later, number, chunk, FIXED)
    slope = tl.zeros((FIXED.M, 1), REAL)
    if slopes.pointer is not None:
        slope += load_values(at_head(slopes, batch, h), t0, a, shape.tokens, 0.0, True)
    weights, d_weights = tl.zeros((FIXED.M, FIXED.M), REAL), tl.zeros((FIXED.M, FIXED.M), REAL) + slope
    rows, keys = tl.zeros((FIXED.M, 1), REAL), tl.zeros((FIXED.M, 1), REAL)
    kept = tl.zeros((1,), REAL)
    for f0 in tl.range(0, FIXED.feature_width, FIXED.N):
        f = f0 + tl.arange(0, FIXED.N)
        queries = rows_of(q, t0, a, shape.tokens, f[None, :], FIXED.feature_width, FIXED)
        own_keys = rows_of(k, t0, a, shape.tokens, f[None, :], FIXED.feature_width, FIXED)
        weights = multiplied(queries, tl.trans(own_keys), weights, FIXED)
        sums = tl.load(column + f, mask=f < FIXED.feature_width, other=0.0)[None, :]
        d_sums = tl.load(after_column + f, mask=f < FIXED.feature_width, other=0.0)[None, :]
        rows += tl.sum(queries * sums, 1)[:, None] * slope
        keys += tl.sum(own_keys * d_sums, 1)[:, None]
        kept += tl.sum(sums * d_sums, 1)
        for v0 in tl.range(0, FIXED.value_width, FIXED.N):
            c = v0 + tl.arange(0, FIXED.N)
            at = f[:, None] * FIXED.value_width + c[None, :]
            inside = (f < FIXED.feature_width)[:, None] & (c < FIXED.value_width)[None, :]
            state = tl.load(before + at, mask=inside, other=0.0)
            d_state = tl.load(after + at, mask=inside, other=0.0)
            grads = rows_of(grad, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED)
            values = rows_of(v, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED)
            read = tl.dot(queries, state, input_precision=FIXED.precision, out_dtype=REAL)
            written = tl.dot(own_keys, d_state, input_precision=FIXED.precision, out_dtype=REAL)
            rows += tl.sum(read * grads, 1)[:, None]
            keys += tl.sum(written * values, 1)[:, None]
            kept += tl.sum(tl.sum(state * d_state, 1)[None, :], 1)
    for v0 in tl.range(0, FIXED.value_width, FIXED.N):
        c = v0 + tl.arange(0, FIXED.N)
        grads = rows_of(grad, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED)
        values = rows_of(v, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED)
        d_weights = multiplied(grads, tl.trans(values), d_weights, FIXED)
    distance = tl.maximum(a - b, 0).to(REAL)
    inside_chunk = distance * tl.exp2(log_d * distance) * weights * d_weights
    by_row = tl.sum(inside_chunk, 1)[:, None]
    by_row += since * tl.exp2(log_d * since) * rows + until * tl.exp2(log_d * until) * keys
    length = there.to(REAL)
    result = tl.sum(by_row, 0) + length * tl.exp2(log_d * length) * kept
    tl.store(out + number * tl.num_programs(0) + chunk + tl.arange(0, 1), result)


@triton.jit
def entries(x, t0, local, columns, limit, WIDTH: tl.constexpr, other):
    """Load rows t0 + local of a matrix, in the orientation of the index tensors; ``other`` outside."""
    at = x.pointer + tl.cast(t0, tl.int64) * x.strides[2] + (local * x.strides[2] + columns * x.strides[3])
    return tl.load(at, mask=(local < limit - t0) & (columns < WIDTH), other=other)


@triton.jit
def terms(q, k, tops, t0, f, tokens, FIXED: tl.constexpr):
    """Return exp(q_if + k_jf - top_i), [M, M, features]; 0 for keys that a row does not see."""
    i, j = tl.arange(0, FIXED.M)[:, None, None], tl.arange(0, FIXED.M)[None, :, None]
    queries = entries(q, t0, i, f, tokens, FIXED.feature_width, 0.0)
    keys = entries(k, t0, j, f, tokens, FIXED.feature_width, float("-inf"))
    top = entries(tops, t0, i, i * 0, tokens, 1, 0.0)
    exponents = (queries - top) * LOG2E + keys * LOG2E
    return tl.exp2(tl.where(j <= i, exponents, float("-inf")))


@triton.jit
def pairs_kernel(q, k, tops, weights, shape, FIXED: tl.constexpr):
    """Write the weights (B, H, tokens, M), by row and by index of the key in the chunk."""
    batch, h = tl.program_id(1) // shape.heads, tl.program_id(1) % shape.heads
    t0 = tl.program_id(0) * FIXED.M
    q, k = at_head(q, batch, h), at_head(k, batch, h // FIXED.group)
    tops = at_head(tops, batch, h)
    sums = tl.zeros((FIXED.M, FIXED.M), tl.float64 if FIXED.double else tl.float32)
    for f0 in tl.range(0, FIXED.feature_width, FIXED.N):
        f = f0 + tl.arange(0, FIXED.N)[None, None, :]
        sums += tl.sum(terms(q, k, tops, t0, f, shape.tokens, FIXED), 2)
    weights = at_head(weights, batch, h)
    i, j = tl.arange(0, FIXED.M)[:, None], tl.arange(0, FIXED.M)[None, :]
    at = weights.pointer + (tl.cast(t0, tl.int64) + i) * FIXED.M + j
    tl.store(at, sums, mask=i < shape.tokens - t0)


@triton.jit
def pair_gradients_kernel(q, k, tops, grad, out, shape, FIXED: tl.constexpr):
    """Write the gradient of queries, or of keys if ``FIXED.of_keys``, from that of the weights."""
    AXIS: tl.constexpr = 0 if FIXED.of_keys else 1
    members: tl.constexpr = FIXED.group if FIXED.of_keys else 1
    batch, own = tl.program_id(1) // shape.heads, tl.program_id(1) % shape.heads
    t0, local = tl.program_id(0) * FIXED.M, tl.arange(0, FIXED.M)
    out = at_head(out, batch, own)
    for f0 in tl.range(0, FIXED.feature_width, FIXED.N):
        f = f0 + tl.arange(0, FIXED.N)
        result = tl.zeros((FIXED.M, FIXED.N), tl.float64 if FIXED.double else tl.float32)
        for member in range(members):
            h = own * members + member
            grad_h, i, j = at_head(grad, batch, h), local[:, None, None], local[None, :, None]
            slopes = entries(grad_h, t0, i, j, shape.tokens, FIXED.M, 0.0)
            q_h, k_h, top = at_head(q, batch, h), at_head(k, batch, h // FIXED.group), at_head(tops, batch, h)
            e = terms(q_h, k_h, top, t0, f[None, None, :], shape.tokens, FIXED)
            result += tl.sum(slopes * e, AXIS)
        at = out.pointer + (tl.cast(t0, tl.int64) + local[:, None]) * out.strides[2]
        at = at + f[None, :] * out.strides[3]
        inside = (local[:, None] < shape.tokens - t0) & (f[None, :] < FIXED.feature_width)
        tl.store(at, result, mask=inside)
