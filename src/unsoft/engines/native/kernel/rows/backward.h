// Backward of row-coupled attention: the logits of a panel again, then all products for the keys that matter to it only.
//
// A work item is one key head, or, if there are fewer of them than threads need, a part of its panels.
#pragma once
#include "forward.h"

struct RowBackwardScratch : RowScratch {
    Buffer<real> grad_rows, packed_grads, slopes, dq, tile_dk, tile_dv;
    Buffer<uint8_t> active;
    explicit RowBackwardScratch(const Call &c)
        : RowScratch(c), grad_rows(size_t(LANES) * value_width), packed_grads(size_t(LANES) * value_width),
          slopes(size_t(c.keys) * LANES), dq(size_t(LANES) * width), tile_dk(size_t(KEY_TILE) * width),
          tile_dv(size_t(KEY_TILE) * value_width), active(size_t(c.keys)) {}
};

static inline void add_rows(const real *from, const int32_t *chosen, int count, int width, real *to) {
    for (int r = 0; r < count; r++)
        for (int x = 0; x < width; x += VL) {
            real *at = to + long(chosen[r]) * width + x;
            store(at, load(at) + load(from + long(r) * width + x));
        }
}

// Adds to dk and dv (rows of padded width), writes dq.
static bool backward_block(const Call &c, RowBackwardScratch &w, const RowBlock &block, real *dk, real *dv, double *dparameters) {
    const RowRule &rule = rule_of(c);
    const int64_t hk = block.h / (c.heads / c.kv_heads);
    const Extent e = extent_of(c, block);
    Panel x = panel_of(c, block, w.rows, w.logits);
    x.p = w.slopes, x.parameter_gradient = dparameters;
    long ldq, ldg, ldk, ldv;
    const real *q = c.q.rows(block.b, block.h, block.i0, block.count, int(c.width), w.width, w.query_rows, ldq);
    const real *g = c.grad_out.rows(block.b, block.h, block.i0, block.count, int(c.value_width), w.value_width, w.grad_rows, ldg);
    pack_queries(block, q, ldq, x.lanes, c.width, w.width, real(c.scale), w.packed);
    pack_queries(block, g, ldg, x.lanes, c.value_width, w.value_width, 1, w.packed_grads);
    const int64_t from = panel_logits(c, block, e, w.packed, w.width, w.keys, x);
    for (int index = 0; index < block.count; index++) {  // as the forward pass found them
        const int64_t at = (block.b * c.heads + block.h) * c.queries + block.i0 + index;
        w.rows.peak[index] = c.peak[at], w.rows.total[index] = c.total[at];
    }
    x.s += from * x.lanes, x.keys = e.last_max - from;
    rule.active(x, w.active);
    w.chosen.clear();
    for (int64_t key = 0; key < x.keys; key++)
        if (w.active[key]) {
            const int64_t to = int64_t(w.chosen.size());
            if (to != key) std::copy_n(x.s + key * x.lanes, x.lanes, x.s + to * x.lanes);
            w.chosen.push_back(int32_t(from + key));
        }
    x.keys = long(w.chosen.size());
    for (long first = 0; first < x.keys; first += KEY_TILE) {
        const int keys = int(std::min<long>(KEY_TILE, x.keys - first));
        const real *v = gather(c.v, block.b, hk, w.chosen.data() + first, keys, int(c.value_width), w.value_width, w.values, ldv);
        real *p = x.p + first * x.lanes;
        if (block.count <= FEW) {
            std::fill_n(p, long(keys) * x.lanes, real(0));
            few_products(block.count, keys, w.value_width, w.packed_grads, w.value_width, v, ldv, p, 1, x.lanes);
        } else {
            panel_product(keys, int(c.value_width), v, ldv, w.packed_grads, x.lanes, p, x.lanes, x.lanes / VL);
        }
        if (c.drop_below)
            for (int key = 0; key < keys; key++) drop(c, w.rows, block.count, w.chosen[first + key], p + key * x.lanes);
    }
    rule.slopes(x);
    std::fill_n((real *)w.dq, long(block.count) * w.width, real(0));
    for (long first = 0; first < x.keys; first += KEY_TILE) {
        const int keys = int(std::min<long>(KEY_TILE, x.keys - first));
        const int32_t *chosen = w.chosen.data() + first;
        real *s = x.s + first * x.lanes, *p = x.p + first * x.lanes;
        if (c.drop_below)
            for (int key = 0; key < keys; key++) drop(c, w.rows, block.count, chosen[key], s + key * x.lanes);
        std::fill_n((real *)w.tile_dv, long(keys) * w.value_width, real(0));
        std::fill_n((real *)w.tile_dk, long(keys) * w.width, real(0));
        accumulate<false>(keys, w.value_width, block.count, s, x.lanes, g, ldg, w.tile_dv, w.value_width);
        accumulate<false>(keys, w.width, block.count, p, x.lanes, q, ldq, w.tile_dk, w.width);
        add_rows(w.tile_dv, chosen, keys, w.value_width, dv);
        add_rows(w.tile_dk, chosen, keys, w.width, dk);
        const real *k = gather(c.k, block.b, hk, chosen, keys, int(c.width), w.width, w.keys, ldk);
        accumulate<true>(block.count, w.width, keys, p, x.lanes, k, ldk, w.dq, w.width);
        if (c.bias_gradient.data)
            for (int key = 0; key < keys; key++)
                for (int index = 0; index < block.count; index++)
                    ((real *)c.bias_gradient.data)[block.b * c.bias_gradient.batch + block.h * c.bias_gradient.head +
                                                   (block.i0 + index) * c.bias_gradient.row + chosen[key] * c.bias_gradient.column] =
                        p[long(key) * x.lanes + index];
    }
    bool finite = true;
    for (int index = 0; index < block.count; index++)
        finite &= c.dq.write(block.b, block.h, block.i0 + index, int(c.width), w.dq + long(index) * w.width, real(c.scale));
    return finite;
}

static bool write_head(const Call &c, int64_t unit, const real *dk, const real *dv) {
    bool finite = true;
    for (int64_t j = 0; j < c.keys; j++) {
        finite &= c.dk.write(unit / c.kv_heads, unit % c.kv_heads, j, int(c.width), dk + j * padded(c.width), real(c.scale));
        finite &= c.dv.write(unit / c.kv_heads, unit % c.kv_heads, j, int(c.value_width), dv + j * padded(c.value_width), 1);
    }
    return finite;
}

static bool rows_backward(const Call &c) {
    const int64_t group = c.heads / c.kv_heads, units = c.batch * c.kv_heads, parameters = rule_of(c).parameters;
    std::vector<std::vector<Piece>> all_pieces;
    for (int64_t b = 0; b < c.batch; b++) all_pieces.push_back(pieces_of(c, b, LANES));
    const int64_t tiles = (c.queries + LANES - 1) / LANES;  // at least
    const int64_t parts = units % c.threads ? std::min<int64_t>(c.threads, std::max<int64_t>(tiles * group, 1)) : 1;
    const size_t dk_size = size_t(c.keys) * padded(c.width), size = dk_size + size_t(c.keys) * padded(c.value_width);
    Buffer<real> sums(size * size_t(units) * size_t(parts));
    std::vector<double> dparameters(size_t(units * parts * group * parameters), 0.0);
    std::atomic<bool> finite{true};
    share(int(c.threads), units * parts, [&](auto next) {
        RowBackwardScratch w(c);
        for (int64_t item; (item = next()) < units * parts;) {
            const int64_t unit = item / parts;
            real *own = sums + size * size_t(item);
            std::fill_n(own, size, real(0));
            bool good = true;
            const std::vector<Piece> &pieces = all_pieces[unit / c.kv_heads];
            for (int64_t turn = item % parts; turn < group * int64_t(pieces.size()); turn += parts) {
                const int64_t member = turn / int64_t(pieces.size());
                const Piece &piece = pieces[turn % int64_t(pieces.size())];
                const RowBlock block = {unit / c.kv_heads, unit % c.kv_heads * group + member, piece.i0, piece.count};
                good &= backward_block(c, w, block, own, own + dk_size,
                                       c.parameter_gradient ? dparameters.data() + (item * group + member) * parameters : nullptr);
            }
            if (parts == 1) good &= write_head(c, unit, own, own + dk_size);
            if (!good) finite = false;
        }
    });
    if (parts > 1)
        for (int64_t unit = 0; unit < units; unit++) {
            real *first = sums + size * size_t(unit * parts);
            for (int64_t part = 1; part < parts; part++)
                for (size_t x = 0; x < size; x++) first[x] += first[size * size_t(part) + x];
            if (!write_head(c, unit, first, first + dk_size)) finite = false;
        }
    if (c.parameter_gradient)
        for (int64_t item = 0; item < units * parts; item++)
            for (int64_t x = 0; x < group * parameters; x++)
                c.parameter_gradient[item / parts % c.kv_heads * group * parameters + x] += dparameters[size_t(item * group * parameters + x)];
    return finite;
}
