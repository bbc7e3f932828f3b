"""Backward kernels of one formula, rendered behind forward.py (see there).

Tiles are recomputed from the peaks of the rows. ``query_gradients_kernel`` owns blocks of rows: dq and the
gradients of parameters, query fields and bias. ``key_gradients_kernel`` owns blocks of keys: dk, dv and the
gradients of key fields.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.density import point_weights
from unsoft.engines.triton.kernel.tiles import inside, tiles_of_keys


@triton.jit
def tile_gradients(s, raw_bias, d_weight, seen, rows, keys, head, FIXED: tl.constexpr):
    """Return logits and bias of a tile, its weights, and the gradients of the weights before the norm, of the
    logits and of the bias; from the logits before the bias, the bias, the gradient of the weights and which
    entries are seen."""
    s, b = biased(s, raw_bias, FIXED.exact)
    weight, by_s, mass_by_s, by_bias, mass_by_bias = slope(s, rows.m, rows, keys, b, head.parameters)
    weight, d_weight = weight * rows.inverse, d_weight * rows.inverse
    if head.extras.seed is not None:
        keep = survives(head, rows, keys)
        d_weight = tl.where(keep, d_weight * head.keep_factor, 0.0)
        weight = tl.where(keep, weight * head.keep_factor, 0.0)
    ds = chained(by_s, mass_by_s, d_weight, rows, seen)
    d_bias = ds
    if BIAS_IN_FORMULA:
        d_bias = chained(by_bias, mass_by_bias, d_weight, rows, seen)
    return s, b, only(seen, weight, 0.0), d_weight, ds, d_bias


@triton.jit
def chained(by_weight, by_mass, d_weight, rows, seen):
    """Apply the chain rule: the gradient of what weights and masses depend on with these slopes."""
    gradient = by_weight * d_weight
    if HAS_MASS:
        gradient += by_mass * rows.d_total
    return only(seen, gradient, 0.0)


@triton.jit
def in_slot(kind, part, SLOTS: tl.constexpr):
    """Return slots that are 0 except for column ``kind``: a number, or one for each row [M, 1]."""
    return tl.where(tl.arange(0, SLOTS)[None, :] == kind, part, 0.0)


@triton.jit
def add_query_gradients(
    sums, walk, tile, k, v, outputs, head, near, FIXED: tl.constexpr, CHECK: tl.constexpr
):
    """Add tiles of keys to the gradients of the queries [M, BD], the parameters [1, slots], the fields
    [M, slots], the points of the rows [M, W] with the sum of their weights [M, 1], and the power of densities
    [1, 1]. ``tile``: queries, gradients of the output, rows; where to store the gradient of the bias."""
    dq, dp, df, dx, dx_total, d_power = sums
    queries, grads, rows, dbias = tile
    local, limit, p = tl.arange(0, FIXED.N), head.shape.keys, head.parameters
    down = local[:, None]
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    begin, end = steps(walk, CHECK, FIXED.exact)
    for step in tl.range(begin, end):
        j0 = tile_number(walk, step, CHECK, FIXED.exact) * FIXED.N
        key_tile = cleaned(load_features(k, j0, down, limit, columns_d, FIXED, CHECK), FIXED.exact)
        values = cleaned(load_outputs(v, j0, down, limit, columns_v, FIXED, CHECK), FIXED.exact)
        s = tl.dot(queries, tl.trans(key_tile), input_precision=FIXED.precision, out_dtype=dq.dtype)
        d_weight = tl.dot(grads, tl.trans(values), input_precision=FIXED.precision, out_dtype=dq.dtype)
        keys = keys_at(head, j0, local[None, :], FIXED, CHECK)
        seen = seen_entries(head.extras.visible, head.shape, rows, keys, FIXED.causal, CHECK)
        raw_bias = load_bias(head, rows, keys, CHECK)
        if FIXED.density:
            density, block, own = near
            points = load_points(density, j0, limit, FIXED, FIXED.N)
            similar, rho = tile_densities(density, block, own, points, j0, limit, FIXED)
            raw_bias = bias_of_density(raw_bias, rho, density.power)
        s, b, weight, d_weight, ds, d_bias = tile_gradients(
            s * head.scale, raw_bias, d_weight, seen, rows, keys, head, FIXED
        )
        if FIXED.density:
            d_power -= tl.sum(d_bias * tl.log(rho))
            d_rho = -density.power * d_bias / rho
            at = block.to(tl.int64) * outputs.density.sums.strides[2] + (j0 + keys.local)
            sums_at = at_head(
                outputs.density.sums, head.number // head.shape.heads, head.number % head.shape.heads
            )
            tl.store(sums_at.pointer + at, tl.sum(d_rho, 0)[None, :], mask=keys.local < limit - j0)
            if FIXED.causal:
                of_points = point_weights(d_rho, similar, FIXED)
                dx += tl.dot(of_points, points.x, input_precision=FIXED.point_precision, out_dtype=dx.dtype)
                dx_total += tl.sum(of_points, 1)[:, None]
        if outputs.dparams.pointer is not None:
            for kind in tl.static_range(PARAMETERS):
                by_weight, by_mass = parameter_slope(kind, s, rows.m, rows, keys, b, p)
                part = tl.sum(chained(by_weight, by_mass, d_weight, rows, seen))
                dp += in_slot(kind, part, PARAMETER_SLOTS)
        if outputs.dfields.pointer is not None:
            for kind in tl.static_range(QUERY_FIELDS):
                by_weight, by_mass = query_field_slope(kind, s, rows.m, rows, keys, b, p)
                part = tl.sum(chained(by_weight, by_mass, d_weight, rows, seen), 1)
                df += in_slot(kind, part[:, None], QUERY_FIELD_SLOTS)
        if dbias.pointer is not None:
            if FIXED.exact:
                d_bias = tl.where(is_finite(load_bias(head, rows, keys, CHECK)), d_bias, 0.0)
            at = (rows.start + rows.local).to(tl.int64) * dbias.strides[2] + (j0 + keys.local)
            tl.store(dbias.pointer + at, d_bias, mask=inside(rows, keys, head.shape))
        dq = add_product(dq, ds, key_tile, GROWS, FIXED.precision)
    return dq, dp, df, dx, dx_total, d_power


@triton.jit
def query_gradients_kernel(
    inputs, grad, outputs, gradients, flag, context, lists, density, FIXED: tl.constexpr
):
    """Write the gradients of a block of queries, its part of those of the parameters, and of the bias."""
    shape = context.shape
    if must_run(flag, FIXED):
        REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
        block, batch, h, i0, head = owned_rows(context, FIXED)
        local, columns_d = tl.arange(0, FIXED.M)[:, None], tl.arange(0, FIXED.padded)[None, :]
        columns_v = tl.arange(0, FIXED.value_padded)[None, :]
        rows = rows_at(head, gradients, i0, local, FIXED, True)
        raw = load_features(at_head(inputs.q, batch, h), i0, local, shape.queries, columns_d, FIXED, True)
        g, queries = at_head(grad, batch, h), cleaned(raw, FIXED.exact)
        grads = load_outputs(g, i0, local, shape.queries, columns_v, FIXED, True)
        k, v = at_head(inputs.k, batch, h // FIXED.group), at_head(inputs.v, batch, h // FIXED.group)
        tile = (queries, grads, rows, at_head(outputs.dbias, batch, h))
        sums = (
            tl.zeros((FIXED.M, FIXED.padded), REAL),
            tl.zeros((1, PARAMETER_SLOTS), REAL),
            tl.zeros((FIXED.M, QUERY_FIELD_SLOTS), REAL),
            tl.zeros((FIXED.M, FIXED.point_padded), REAL),
            tl.zeros((FIXED.M, 1), REAL),
            tl.zeros((1, 1), REAL),
        )
        near = near_of(density, batch, h, block, i0, shape.queries, FIXED)
        walk = tiles_of_rows(i0, rows, shape, FIXED.causal, FIXED.M, FIXED.N)
        walk = listed(walk, at_head(lists, batch, h), block)
        if walk.listed is None and not FIXED.exact:
            sums = add_query_gradients(sums, walk, tile, k, v, outputs, head, near, FIXED, False)
        sums = add_query_gradients(sums, walk, tile, k, v, outputs, head, near, FIXED, True)
        result, dp, df, dx, dx_total, d_power = sums
        if FIXED.density:
            dpower = at_head(outputs.density.dpower, batch, h)
            tl.store(dpower.pointer + block + tl.zeros((1, 1), tl.int32), d_power)
            if FIXED.causal:
                dx = 2.0 * (dx - near[2].x * dx_total)
                columns = tl.arange(0, FIXED.point_padded)[None, :]
                of_points = at_head(outputs.density.dpoints, batch, h)
                store_rows(of_points, i0, local, shape.queries, columns, dx, FIXED.point_width)
        result = result * head.scale
        if FIXED.exact:
            result = tl.where(is_finite(raw), result, 0.0)
        store_rows(at_head(outputs.dq, batch, h), i0, local, shape.queries, columns_d, result, FIXED.width)
        if outputs.dparams.pointer is not None:
            at = head.number.to(tl.int64) * outputs.dparams.strides[0] + block * PARAMETER_SLOTS
            tl.store(outputs.dparams.pointer + at + tl.arange(0, PARAMETER_SLOTS)[None, :], dp)
        if outputs.dfields.pointer is not None:
            kinds, dfields = tl.arange(0, QUERY_FIELD_SLOTS)[None, :], at_head(outputs.dfields, batch, h)
            store_rows(dfields, i0, local, shape.queries, kinds, df, QUERY_FIELDS)


@triton.jit
def owned_keys(head, start, local, FIXED: tl.constexpr):
    """Return the keys of a program that owns them, with the rows that may see them."""
    keys = keys_at(head, start, local, FIXED, True)
    first, last = load_span(head.extras.key_spans, start, local, head.shape.keys)
    return Keys(start, local, keys.j, keys.fields, first, last)


@triton.jit
def add_key_gradients(
    sums, walk, tile, q, grad, gradients, outputs, head, FIXED: tl.constexpr, CHECK: tl.constexpr
):
    """Add tiles of rows to dk [N, BD], dv [N, BV], the gradients of fields [N, slots], bias [N, 1] and points
    [N, W], with the sum of their weights [N, 1].

    ``tile``: keys and values as matrices, the keys as the head sees them, the densities of the head and the
    points of the keys."""
    dk, dv, df, db, dx, dx_total = sums
    key_tile, value_tile, keys, density, points = tile
    local, limit = tl.arange(0, FIXED.M), head.shape.queries
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    begin, end = steps(walk, CHECK, FIXED.exact)
    for step in tl.range(begin, end):
        i0 = tile_number(walk, step, CHECK, FIXED.exact) * FIXED.M
        rows = rows_at(head, gradients, i0, local[None, :], FIXED, CHECK)
        queries = cleaned(load_features(q, i0, local[:, None], limit, columns_d, FIXED, CHECK), FIXED.exact)
        grads = load_outputs(grad, i0, local[:, None], limit, columns_v, FIXED, CHECK)
        s = tl.dot(key_tile, tl.trans(queries), input_precision=FIXED.precision, out_dtype=dk.dtype)
        d_weight = tl.dot(value_tile, tl.trans(grads), input_precision=FIXED.precision, out_dtype=dk.dtype)
        seen = seen_entries(head.extras.visible, head.shape, rows, keys, FIXED.causal, CHECK)
        raw_bias = load_bias(head, rows, keys, CHECK)
        if FIXED.density:
            own = load_points(density, i0, limit, FIXED, FIXED.M)
            similar, rho = tile_densities(
                density, i0 // FIXED.M, own, points, keys.start, head.shape.keys, FIXED
            )
            raw_bias = bias_of_density(raw_bias, tl.trans(rho), density.power)
        s, b, weight, d_weight, ds, d_bias = tile_gradients(
            s * head.scale, raw_bias, d_weight, seen, rows, keys, head, FIXED
        )
        if FIXED.density and FIXED.causal:
            of_points = point_weights(-density.power * tl.trans(d_bias) / rho, similar, FIXED)
            dx += tl.dot(
                tl.trans(of_points), own.x, input_precision=FIXED.point_precision, out_dtype=dx.dtype
            )
            dx_total += tl.sum(of_points, 0)[:, None]
        if outputs.dbias.pointer is not None:
            if FIXED.exact:
                d_bias = tl.where(is_finite(load_bias(head, rows, keys, CHECK)), d_bias, 0.0)
            db += tl.sum(d_bias, 1)[:, None]
        if outputs.dfields.pointer is not None:
            for kind in tl.static_range(KEY_FIELDS):
                by_weight, by_mass = key_field_slope(kind, s, rows.m, rows, keys, b, head.parameters)
                part = tl.sum(chained(by_weight, by_mass, d_weight, rows, seen), 1)
                df += in_slot(kind, part[:, None], KEY_FIELD_SLOTS)
        dv = add_product(dv, weight, grads, GROWS, FIXED.precision)
        dk = add_product(dk, ds, queries, GROWS, FIXED.precision)
    return dk, dv, df, db, dx, dx_total


@triton.jit
def key_gradients_kernel(
    inputs, grad, outputs, gradients, flag, context, lists, density, FIXED: tl.constexpr
):
    """Write the gradients of a block of keys and values; those of the fields for each query head."""
    shape = context.shape
    if must_run(flag, FIXED):
        REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
        kv_heads = shape.heads // FIXED.group
        block, number = block_and_head(tl.cdiv(shape.keys, FIXED.N))
        j0, batch, hk = block * FIXED.N, number // kv_heads, number % kv_heads
        local, columns_d = tl.arange(0, FIXED.N)[:, None], tl.arange(0, FIXED.padded)[None, :]
        columns_v = tl.arange(0, FIXED.value_padded)[None, :]
        k = at_head(inputs.k, batch, hk)
        raw_keys = load_features(k, j0, local, shape.keys, columns_d, FIXED, True)
        v = at_head(inputs.v, batch, hk)
        raw_values = load_outputs(v, j0, local, shape.keys, columns_v, FIXED, True)
        key_tile, value_tile = cleaned(raw_keys, FIXED.exact), cleaned(raw_values, FIXED.exact)
        d_keys = tl.zeros((FIXED.N, FIXED.padded), REAL)
        d_values = tl.zeros((FIXED.N, FIXED.value_padded), REAL)
        dx, dx_total = tl.zeros((FIXED.N, FIXED.point_padded), REAL), tl.zeros((FIXED.N, 1), REAL)
        points = 0.0
        if FIXED.density:
            points = load_points(
                density_at(density, batch, hk * FIXED.group, FIXED), j0, shape.keys, FIXED, FIXED.N
            )
        for member in range(FIXED.group):
            h = hk * FIXED.group + member
            head = head_of(context, batch * shape.heads + h, FIXED.double)
            keys = owned_keys(head, j0, local, FIXED)
            walk = tiles_of_keys(j0, keys, shape, FIXED.causal, FIXED.M, FIXED.N)
            walk = listed(walk, at_head(lists, batch, h), block)
            q, grad_h = at_head(inputs.q, batch, h), at_head(grad, batch, h)
            tile = (key_tile, value_tile, keys, density_at(density, batch, h, FIXED), points)
            df, db = tl.zeros((FIXED.N, KEY_FIELD_SLOTS), REAL), tl.zeros((FIXED.N, 1), REAL)
            sums = (d_keys, d_values, df, db, dx, dx_total)
            if walk.listed is None and not FIXED.exact:
                sums = add_key_gradients(sums, walk, tile, q, grad_h, gradients, outputs, head, FIXED, False)
            sums = add_key_gradients(sums, walk, tile, q, grad_h, gradients, outputs, head, FIXED, True)
            d_keys, d_values, df, db, dx, dx_total = sums
            if outputs.dbias.pointer is not None:
                dbias = at_head(outputs.dbias, batch, h)
                tl.store(dbias.pointer + (j0 + local), db, mask=local < shape.keys - j0)
            if outputs.dfields.pointer is not None:
                kinds = tl.arange(0, KEY_FIELD_SLOTS)[None, :]
                store_rows(at_head(outputs.dfields, batch, h), j0, local, shape.keys, kinds, df, KEY_FIELDS)
        if FIXED.density and FIXED.causal:
            dx = 2.0 * (dx - points.x * dx_total)
            columns = tl.arange(0, FIXED.point_padded)[None, :]
            of_points = at_head(outputs.dpoints, batch, hk)
            store_rows(of_points, j0, local, shape.keys, columns, dx, FIXED.point_width)
        scale = full_precision(context.numbers.scale, context.numbers.scale_low, FIXED.double)
        d_keys = d_keys * scale
        if FIXED.exact:
            d_keys = tl.where(is_finite(raw_keys), d_keys, 0.0)
            d_values = tl.where(is_finite(raw_values), d_values, 0.0)
        store_rows(at_head(outputs.dk, batch, hk), j0, local, shape.keys, columns_d, d_keys, FIXED.width)
        store_rows(
            at_head(outputs.dv, batch, hk), j0, local, shape.keys, columns_v, d_values, FIXED.value_width
        )
