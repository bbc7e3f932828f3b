// Backward: the tiles of the forward pass again, with logits recomputed; all five products stay in one tile.
//
// A work item is one key head (all queries of its group), so dk and dv are summed by one thread. The heads left over when
// threads do not divide them are cut into parts by query tiles; their dk and dv are added up at the end, in a fixed order.
#pragma once
#include "forward.h"

struct BackwardScratch {
    int width, value_width;
    Buffer<real> query_rows, grad_rows, out_rows, packed_queries, packed_grads, keys, values, logits, slopes, dq, bias, bias_gradient, clean_keys;
    Buffer<uint8_t> visible;
    Buffer<uint16_t> counts;
    // By lanes as in the forward pass; rows of queries, their gradients and keys side by side, for the sums over them; and the tile.
    const bool pairs;
    Buffer<Pair> query_lanes, grad_lanes, query_pairs, grad_pairs, key_columns, value_columns, key_pairs, weights, slopes_by_query, slopes_by_key;
    Rows rows;
    explicit BackwardScratch(const Call &c)
        : width(padded(c.width)), value_width(padded(c.value_width)), query_rows(QUERY_TILE * width),
          grad_rows(QUERY_TILE * value_width), out_rows(QUERY_TILE * value_width), packed_queries(QUERY_TILE * width),
          packed_grads(QUERY_TILE * value_width), keys(KEY_TILE * width), values(KEY_TILE * value_width), logits(KEY_TILE * LANES),
          slopes(KEY_TILE * LANES), dq(QUERY_TILE * width), bias(KEY_TILE * LANES), bias_gradient(KEY_TILE * LANES),
          clean_keys(may_hide(c) ? KEY_TILE * width : 0), visible(KEY_TILE * LANES), counts(c.visible.data ? size_t(QUERY_TILE) * (c.keys / KEY_TILE + 1) : 0),
          pairs(paired(c) && c.grad_out.type == BFLOAT16), query_lanes(half(QUERY_TILE * width)), grad_lanes(half(QUERY_TILE * value_width)),
          query_pairs(half(QUERY_TILE * width)), grad_pairs(half(QUERY_TILE * value_width)), key_columns(half(KEY_TILE * width)),
          value_columns(half(KEY_TILE * value_width)), key_pairs(half(KEY_TILE * width)), weights(half(KEY_TILE * LANES)),
          slopes_by_query(half(KEY_TILE * LANES)), slopes_by_key(half(KEY_TILE * LANES)), rows(c, true) {}

private:
    size_t half(int numbers) const { return pairs ? size_t(numbers) / 2 : 0; }
};

// Adds the partial sums that a key tile has gathered to the gradients of the fields of its keys, (fields, keys).
static void add_key_fields(const Call &c, const Rows &rows, int64_t j0, int keys, real *dfields) {
    for (int f = 0; f < rows.key_field_count; f++)
        for (int key = 0; key < keys; key++) dfields[f * c.keys + j0 + key] += horizontal_sum(load(rows.key_gradient + (f * KEY_TILE + key) * VL));
}

static bool write_query_fields(const Call &c, const Rows &rows, int64_t b, int64_t h, int64_t i0, int count) {
    for (int f = 0; f < rows.query_field_count; f++)
        std::copy_n(rows.field_gradient + f * QUERY_TILE, count, c.query_field_gradient + ((f * c.batch + b) * c.heads + h) * c.queries + i0);
    return all_finite(rows.field_gradient, QUERY_TILE, rows.query_field_count, count);
}

static void write_bias_gradient(const Call &c, const Tile &t, int64_t b, int64_t h, int64_t i, int rows) {
    const Tensor &g = c.bias_gradient;
    for (int r = 0; r < rows; r++) {
        real *to = (real *)g.data + b * g.batch + h * g.head + (i + r) * g.row + t.first_key * g.column;
        for (int key = 0; key < t.keys; key++) to[key * g.column] = t.bias_gradient[long(key) * t.stride + r];
    }
}

// One tile of queries against all the keys it sees: adds to dk and dv (rows of padded width), writes dq.
static bool backward_tile(const Call &c, BackwardScratch &w, int64_t b, int64_t h, int64_t i0, int count, real *dk, real *dv, real *dfields,
                          double *dparameters) {
    const int64_t hk = h / (c.heads / c.kv_heads);
    Rows &rows = w.rows;
    long ldq, ldg, ldo;
    const real *q = c.q.rows(b, h, i0, count, int(c.width), w.width, w.query_rows, ldq);
    const real *g = c.grad_out.rows(b, h, i0, count, int(c.value_width), w.value_width, w.grad_rows, ldg);
    const real *o = c.saved_out.rows(b, h, i0, count, int(c.value_width), w.value_width, w.out_rows, ldo);
    for (int index = 0; index < count; index++) {
        rows.set(c, index, b, h, i0 + index);
        int64_t at = (b * c.heads + h) * c.queries + i0 + index;
        rows.peak[index] = c.peak[at], rows.total[index] = c.total[at];
        V delta = {};
        for (int x = 0; x < w.value_width; x += VL) delta += load(g + index * ldg + x) * load(o + index * ldo + x);
        rows.delta[index] = horizontal_sum(delta);
    }
    rows.pad(count, padded(count));
    Tile all = {};
    fill_tile(c, rows, all, 0, h);
    all.queries = padded(count), all.parameter_gradient = dparameters;
    if (c.query_field_gradient) {
        std::fill_n((real *)rows.field_gradient, rows.query_field_count * QUERY_TILE, real(0));
        all.query_field_gradient = rows.field_gradient;
    }
    c.mechanism->prepare(all, rows.total, rows.delta, rows.inverse, rows.slope);
    const bool few = count <= FEW, pairs = w.pairs && !few;
    if (few) pack_rows(q, ldq, count, w.width, real(c.scale), w.packed_queries);
    for (int p = 0; !few && p * LANES < count; p++) {
        int n = std::min(LANES, count - p * LANES);
        if (pairs) {
            pair_lanes(q + long(p) * LANES * ldq, ldq, n, padded(n), int(c.width), w.query_lanes + p * LANES * w.width / 2);
            pair_lanes(g + long(p) * LANES * ldg, ldg, n, padded(n), int(c.value_width), w.grad_lanes + p * LANES * w.value_width / 2);
            continue;
        }
        pack_lanes(q + long(p) * LANES * ldq, ldq, n, padded(n), int(c.width), real(c.scale), w.packed_queries + p * LANES * w.width);
        pack_lanes(g + long(p) * LANES * ldg, ldg, n, padded(n), int(c.value_width), 1, w.packed_grads + p * LANES * w.value_width);
    }
    if (pairs) {
        pair_rows(q, ldq, count, w.width, w.query_pairs);
        pair_rows(g, ldg, count, w.value_width, w.grad_pairs);
    }
    std::fill_n((real *)w.dq, long(count) * w.width, real(0));
    Extent extents[PANELS];
    int64_t begin = c.keys, end = 0;
    for (int first = 0; first < count; first += LANES) {
        const Extent e = extents[first / LANES] = extent_of(c, b, i0 + first, i0 + std::min(first + LANES, count) - 1);
        begin = std::min(begin, e.first_min), end = std::max(end, e.last_max);
    }
    const int64_t tiles = end > begin ? (end - begin + KEY_TILE - 1) / KEY_TILE : 0;
    for (int index = 0; c.visible.data && index < count; index++)
        count_tiles(c, b, h, i0 + index, begin, end, KEY_TILE, w.counts + index * tiles);
    BadKeys bad;
    for (int64_t j0 = begin; j0 < end; j0 += KEY_TILE) {
        const int keys = int(std::min<int64_t>(KEY_TILE, end - j0));
        long ldk, ldv;
        const real *given_k = c.k.rows(b, hk, j0, keys, int(c.width), w.width, w.keys, ldk);
        const real *v = c.v.rows(b, hk, j0, keys, int(c.value_width), w.value_width, w.values, ldv);
        bad.any = false;
        bool checked = !may_hide(c);
        const real *paired_keys = nullptr;  // what w.key_pairs and w.key_columns hold
        if (pairs) pair_columns(v, ldv, keys, w.value_width, w.value_columns);
        if (dfields) std::fill_n((real *)rows.key_gradient, rows.key_field_count * KEY_TILE * VL, real(0));
        for (int p = 0; p * LANES < count; p++) {
            const int first = p * LANES, n = std::min(LANES, count - first), lanes = padded(n);
            Tile t = all;
            fill_tile(c, rows, t, first, h);
            const Extent &e = extents[p];
            t.keys = int(std::min<int64_t>(keys, e.last_max - j0));
            if (t.keys <= 0 || e.first_min >= j0 + t.keys) continue;
            t.s = w.logits, t.p = w.slopes, t.queries = t.stride = lanes;
            set_keys(c, rows, t, b, j0);
            set_key_fields(c, rows, t, b, h, j0, t.keys);
            if (c.query_field_gradient) t.query_field_gradient = rows.field_gradient + first;
            if (dfields) t.key_field_gradient = rows.key_gradient, t.key_field_gradient_step = KEY_TILE * VL;
            t.inverse = rows.inverse + first, t.slope = rows.slope + first;
            t.bias_gradient = c.bias_gradient.data ? w.bias_gradient.data : nullptr;
            for (int index = first; index < first + n; index++) rows.limit[index] = limit(c, b, i0 + index, j0, t.keys);
            Seen seen = bring_masks(c, t, b, j0, n, true, e.first_max > j0, w.visible, w.bias, t.limit, rows.seen + first,
                                    t.keys == keys ? w.counts + first * tiles + (j0 - begin) / KEY_TILE : nullptr, tiles, [&](int index) { return std::make_pair(h, i0 + first + index); });
            if (seen == NONE) continue;
            if (!checked && bad.mark_rows(given_k, ldk, keys, w.width)) bad.clean(given_k, ldk, keys, w.width, w.clean_keys);
            checked = true;
            const bool hidden = bad.any && !bad.seen(t, n, true);  // NaN that is seen must come out as NaN
            const real *k = hidden ? w.clean_keys : given_k;
            const long ld = hidden ? w.width : ldk;
            const bool diagonal = e.last_min < j0 + t.keys;
            t.plain = seen == ALL && !diagonal && !t.bias && !t.drop_key && n == lanes;
            if (few) {
                few_products(n, t.keys, w.width, w.packed_queries, w.width, k, ld, w.logits, 1, lanes);
                few_products(n, t.keys, w.value_width, g, ldg, v, ldv, w.slopes, 1, lanes);
            } else if (pairs) {
                if (k != paired_keys) pair_columns(k, ld, keys, w.width, w.key_columns), pair_rows(k, ld, keys, w.width, w.key_pairs);
                paired_keys = k;
                const Pair *queries = w.query_lanes + first * w.width / 2, *grads = w.grad_lanes + first * w.value_width / 2;
                panel_product<Pair>(t.keys, (int(c.width) + 1) / 2, w.key_columns, w.width / 2, queries, lanes, w.logits, lanes, lanes / VL, real(c.scale));
                panel_product<Pair>(t.keys, (int(c.value_width) + 1) / 2, w.value_columns, w.value_width / 2, grads, lanes, w.slopes, lanes, lanes / VL);
            } else {
                const real *queries = w.packed_queries + first * w.width, *grads = w.packed_grads + first * w.value_width;
                panel_product(t.keys, int(c.width), k, ld, queries, lanes, w.logits, lanes, lanes / VL);
                panel_product(t.keys, int(c.value_width), v, ldv, grads, lanes, w.slopes, lanes, lanes / VL);
            }
            c.mechanism->backward(t);
            if (t.bias_gradient) write_bias_gradient(c, t, b, h, i0 + first, n);
            if (pairs && e.shortest() >= FEW_WEIGHTS) {
                // The last of an odd number of queries shares its pair with a lane that holds none, where the formula may give anything.
                for (int key = 0; n % 2 && key < t.keys; key++) w.logits[key * lanes + n] = w.slopes[key * lanes + n] = 0;
                pair_columns(w.logits, lanes, t.keys, lanes, w.weights);
                pair_columns(w.slopes, lanes, t.keys, lanes, w.slopes_by_query);
                pair_rows(w.slopes, lanes, t.keys, lanes, w.slopes_by_key);
                const Pair *queries = w.query_pairs + first * w.width / 2, *grads = w.grad_pairs + first * w.value_width / 2;
                accumulate<false, Pair>(t.keys, w.value_width, (n + 1) / 2, w.weights, lanes / 2, grads, w.value_width, dv + j0 * w.value_width, w.value_width);
                accumulate<false, Pair>(t.keys, w.width, (n + 1) / 2, w.slopes_by_query, lanes / 2, queries, w.width, dk + j0 * w.width, w.width);
                accumulate<true, Pair>(n, w.width, (t.keys + 1) / 2, w.slopes_by_key, lanes, w.key_pairs, w.width, w.dq + first * w.width, w.width);
                continue;
            }
            accumulate<false>(t.keys, w.value_width, n, w.logits, lanes, g + first * ldg, ldg, dv + j0 * w.value_width, w.value_width);
            accumulate<false>(t.keys, w.width, n, w.slopes, lanes, q + first * ldq, ldq, dk + j0 * w.width, w.width);
            accumulate<true>(n, w.width, t.keys, w.slopes, lanes, k, ld, w.dq + first * w.width, w.width);
        }
        if (dfields) add_key_fields(c, rows, j0, keys, dfields);
    }
    bool finite = !c.query_field_gradient || write_query_fields(c, rows, b, h, i0, count);
    for (int index = 0; index < count; index++)
        finite &= c.dq.write(b, h, i0 + index, int(c.width), w.dq + long(index) * w.width, real(c.scale));
    return finite;
}

// The sums of one key head: dk, dv, and the gradients of the fields of its keys for each query head of its group.
static bool write_keys(const Call &c, int64_t unit, const real *dk, const real *dv, const real *dfields) {
    bool finite = true;
    const int64_t group = c.heads / c.kv_heads, fields = c.key_field_gradient ? c.mechanism->key_fields : 0;
    for (int64_t member = 0; member < group; member++)
        for (int64_t f = 0; f < fields; f++) {
            const real *from = dfields + (member * fields + f) * c.keys;
            std::copy_n(from, c.keys, c.key_field_gradient + ((f * c.batch + unit / c.kv_heads) * c.heads + unit % c.kv_heads * group + member) * c.keys);
            finite &= all_finite(from, 0, 1, int(c.keys));
        }
    for (int64_t j = 0; j < c.keys; j++) {
        finite &= c.dk.write(unit / c.kv_heads, unit % c.kv_heads, j, int(c.width), dk + j * padded(c.width), real(c.scale));
        finite &= c.dv.write(unit / c.kv_heads, unit % c.kv_heads, j, int(c.value_width), dv + j * padded(c.value_width), 1);
    }
    return finite;
}

static bool backward(const Call &c) {
    const int64_t group = c.heads / c.kv_heads, units = c.batch * c.kv_heads, parameters = c.mechanism->parameters;
    std::vector<std::vector<Piece>> pieces;
    for (int64_t b = 0; b < c.batch; b++) pieces.push_back(pieces_of(c, b, QUERY_TILE));
    const int64_t tiles = (c.queries + QUERY_TILE - 1) / QUERY_TILE;  // at least
    const int64_t over = units % c.threads, whole = units - over;
    // The smallest number of parts that gives every thread the same share of the left-over heads.
    const int64_t parts = over ? std::min<int64_t>(c.threads / std::gcd(over, c.threads), std::max<int64_t>(tiles * group, 1)) : 1;
    const int64_t items = whole + over * parts;
    const int64_t fields = c.key_field_gradient ? c.mechanism->key_fields : 0;
    const size_t dk_size = size_t(c.keys) * padded(c.width), before_fields = dk_size + size_t(c.keys) * padded(c.value_width);
    const size_t size = before_fields + size_t(c.keys) * group * fields;
    Buffer<real> shared_sums(parts > 1 ? size * over * parts : 0);
    std::vector<double> dparameters(items * group * parameters, 0.0);
    std::atomic<bool> finite{true};
    share(int(c.threads), items, [&](auto next) {
        BackwardScratch w(c);
        Buffer<real> own_sums(size);
        for (int64_t item; (item = next()) < items;) {
            const int64_t left = item - whole, unit = left < 0 ? item : whole + left / parts;
            const int64_t part = left < 0 ? 0 : left % parts, step = left < 0 ? 1 : parts;
            real *sums = left >= 0 && parts > 1 ? shared_sums + size * left : own_sums;
            std::fill_n(sums, size, real(0));
            bool good = true;
            const std::vector<Piece> &own = pieces[unit / c.kv_heads];
            for (int64_t turn = part; turn < group * int64_t(own.size()); turn += step) {
                const int64_t member = turn / int64_t(own.size());
                const Piece &piece = own[turn % int64_t(own.size())];
                good &= backward_tile(c, w, unit / c.kv_heads, unit % c.kv_heads * group + member, piece.i0, piece.count, sums, sums + dk_size,
                                      fields ? sums + before_fields + member * fields * c.keys : nullptr,
                                      c.parameter_gradient ? dparameters.data() + (item * group + member) * parameters : nullptr);
            }
            if (step == 1) good &= write_keys(c, unit, sums, sums + dk_size, sums + before_fields);
            if (!good) finite = false;
        }
    });
    if (parts > 1)
        share(int(c.threads), over, [&](auto next) {
            for (int64_t left; (left = next()) < over;) {
                real *sums = shared_sums + size * left * parts;
                for (int64_t part = 1; part < parts; part++)
                    for (size_t x = 0; x < size; x++) sums[x] += sums[part * size + x];
                if (!write_keys(c, whole + left, sums, sums + dk_size, sums + before_fields)) finite = false;
            }
        });
    if (c.parameter_gradient)
        for (int64_t item = 0; item < items; item++) {
            int64_t unit = item < whole ? item : whole + (item - whole) / parts;
            for (int64_t x = 0; x < group * parameters; x++)
                c.parameter_gradient[unit % c.kv_heads * group * parameters + x] += dparameters[item * group * parameters + x];
        }
    return finite;
}
