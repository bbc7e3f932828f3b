// Forward: tiles of queries meet tiles of keys, with the running peak and total of every query ("online").
#pragma once
#include <utility>
#include "call.h"

constexpr int KEY_TILE_ROWS = 256;

struct ForwardScratch {
    int width, value_width;
    Buffer<real> query_rows, packed, keys, values, logits, sums, bias;
    Buffer<uint8_t> visible;
    Rows rows;
    static constexpr int tile = std::max(KEY_TILE * LANES, KEY_TILE_ROWS * FEW);
    explicit ForwardScratch(const Call &c)
        : width(padded(c.width)), value_width(padded(c.value_width)), query_rows(QUERY_TILE * width), packed(QUERY_TILE * width),
          keys(KEY_TILE_ROWS * width), values(KEY_TILE_ROWS * value_width), logits(tile), sums(QUERY_TILE * value_width),
          bias(tile), visible(tile) {}
};

static inline void fill_tile(const Call &c, Rows &rows, Tile &t, int first) {
    t.peak = rows.peak + first, t.mass = rows.mass + first, t.rescale = rows.rescale + first;
    t.count = rows.count + first, t.position = rows.position + first, t.limit = rows.limit + first;
    t.drop_key = c.drop_below ? rows.drop_key + first : nullptr;
    t.drop_below = uint32_t(c.drop_below), t.keep_scale = real(c.keep_scale);
}

// Multiplies the accumulated rows by what the new peak costs them.
static inline void rescale_sums(real *sums, int count, int width, const real *factor) {
    for (int r = 0; r < count; r++)
        if (factor[r] != 1)
            for (int x = 0; x < width; x += VL) store(sums + long(r) * width + x, load(sums + long(r) * width + x) * factor[r]);
}

// Finishes `count` queries: row(index) names head and row of each. Returns whether all outputs are finite.
template <class Row> static bool write_outputs(const Call &c, ForwardScratch &w, int64_t b, int count, const real *parameters, Row row) {
    Tile t = {};
    fill_tile(c, w.rows, t, 0);
    t.queries = padded(count);
    t.parameters = parameters;
    c.mechanism->finish(t, w.rows.total, w.rows.inverse);
    bool finite = true;
    for (int index = 0; index < count; index++) {
        auto [h, i] = row(index);
        finite &= c.out.write(b, h, i, int(c.value_width), w.sums + long(index) * w.value_width, w.rows.inverse[index]);
        int64_t at = (b * c.heads + h) * c.queries + i;
        c.peak[at] = w.rows.peak[index], c.total[at] = w.rows.total[index];
    }
    return finite;
}

// An infinite query or key can vanish in a formula (exp(-inf) is 0), so that the output alone does not betray it. Keys
// are looked at by the last queries only, which see the most of them.

// Queries i0 .. i0 + count of one head, keys along rows of the tile and queries along lanes.
static bool forward_tile(const Call &c, ForwardScratch &w, int64_t b, int64_t h, int64_t i0, int count) {
    const int64_t hk = h / (c.heads / c.kv_heads);
    const real *parameters = c.parameters + h * c.mechanism->parameters;
    auto row = [&](int index) { return std::make_pair(h, i0 + index); };
    for (int index = 0; index < count; index++) w.rows.set(c, index, b, h, i0 + index);
    w.rows.pad(count, padded(count));
    long ldq;
    const real *q = c.q.rows(b, h, i0, count, int(c.width), w.width, w.query_rows, ldq);
    bool finite = all_finite(q, ldq, count, w.width);
    const bool last = i0 + count == c.queries;
    for (int p = 0; p * LANES < count; p++) {
        int rows = std::min(LANES, count - p * LANES);
        pack_lanes(q + long(p) * LANES * ldq, ldq, rows, padded(rows), int(c.width), real(c.scale), w.packed + p * LANES * w.width);
    }
    std::fill_n((real *)w.sums, long(padded(count)) * w.value_width, real(0));
    const int64_t end = c.causal ? std::clamp<int64_t>(i0 + count + c.causal_offset, 0, c.keys) : c.keys;
    for (int64_t j0 = 0; j0 < end; j0 += KEY_TILE) {
        const int keys = int(std::min<int64_t>(KEY_TILE, end - j0));
        long ldk, ldv;
        const real *k = c.k.rows(b, hk, j0, keys, int(c.width), w.width, w.keys, ldk);
        const real *v = c.v.rows(b, hk, j0, keys, int(c.value_width), w.value_width, w.values, ldv);
        if (last) finite &= all_finite(k, ldk, keys, w.width);
        for (int p = 0; p * LANES < count; p++) {
            const int first = p * LANES, rows = std::min(LANES, count - first), lanes = padded(rows);
            Tile t = {};
            fill_tile(c, w.rows, t, first);
            t.keys = c.causal ? int(std::min<int64_t>(keys, i0 + first + rows + c.causal_offset - j0)) : keys;
            if (t.keys <= 0) continue;
            t.s = w.logits, t.queries = t.stride = lanes, t.first_key = j0, t.parameters = parameters;
            Seen seen = bring_masks(c, t, b, j0, rows, true, w.visible, w.bias, [&](int index) { return row(first + index); });
            if (seen == NONE) continue;
            bool diagonal = c.causal && i0 + first + c.causal_offset < j0 + t.keys - 1;
            t.plain = seen == ALL && !diagonal && !t.bias && !t.drop_key;
            if (!t.plain)
                for (int index = 0; index < rows; index++)
                    w.rows.limit[first + index] = c.causal ? real(i0 + first + index + c.causal_offset + 1 - j0) : real(t.keys);
            panel_product(t.keys, int(c.width), k, ldk, w.packed + first * w.width, lanes, w.logits, lanes, lanes / VL);
            real *sums = w.sums + long(first) * w.value_width;
            if (c.mechanism->forward(t) && j0 > 0) rescale_sums(sums, rows, w.value_width, t.rescale);
            accumulate<true>(rows, w.value_width, t.keys, w.logits, lanes, v, ldv, sums, w.value_width);
        }
    }
    return write_outputs(c, w, b, count, parameters, row) && finite;
}

// All queries of one key head at once when they are few: decoding. Heads of a group share parameters only if there are
// none, so a formula with parameters is asked head by head (`members` = 1).
static bool forward_few(const Call &c, ForwardScratch &w, int64_t b, int64_t h0, int members) {
    const int64_t hk = h0 / (c.heads / c.kv_heads);
    const int count = members * int(c.queries);
    const real *parameters = c.parameters + h0 * c.mechanism->parameters;
    auto row = [&](int index) { return std::make_pair(h0 + index / c.queries, index % c.queries); };
    for (int index = 0; index < count; index++) {
        auto [h, i] = row(index);
        w.rows.set(c, index, b, h, i);
        long ld;
        const real *q = c.q.rows(b, h, i, 1, int(c.width), w.width, w.query_rows, ld);
        pack_rows(q, ld, 1, w.width, real(c.scale), w.packed + index * w.width);
    }
    w.rows.pad(count, padded(count));
    bool finite = all_finite(w.packed, w.width, count, w.width);
    std::fill_n((real *)w.sums, long(count) * w.value_width, real(0));
    const int64_t end = c.causal ? std::clamp<int64_t>(c.queries + c.causal_offset, 0, c.keys) : c.keys;
    for (int64_t j0 = 0; j0 < end; j0 += KEY_TILE_ROWS) {
        Tile t = {};
        fill_tile(c, w.rows, t, 0);
        t.keys = int(std::min<int64_t>(KEY_TILE_ROWS, end - j0));
        t.s = w.logits, t.queries = count, t.stride = KEY_TILE_ROWS, t.first_key = j0, t.parameters = parameters;
        Seen seen = bring_masks(c, t, b, j0, count, false, w.visible, w.bias, row);
        if (seen == NONE) continue;
        bool diagonal = c.causal && c.causal_offset < j0 + t.keys - 1;
        t.plain = seen == ALL && !diagonal && !t.bias && !t.drop_key && t.keys % VL == 0;
        for (int index = 0; index < count; index++)
            w.rows.limit[index] = real(c.causal ? std::min<int64_t>(t.keys, row(index).second + c.causal_offset + 1 - j0) : t.keys);
        long ldk, ldv;
        const real *k = c.k.rows(b, hk, j0, t.keys, int(c.width), w.width, w.keys, ldk);
        const real *v = c.v.rows(b, hk, j0, t.keys, int(c.value_width), w.value_width, w.values, ldv);
        finite &= all_finite(k, ldk, t.keys, w.width);
        few_products(count, t.keys, w.width, w.packed, w.width, k, ldk, w.logits, t.stride, 1);
        if (c.mechanism->forward_rows(t) && j0 > 0) rescale_sums(w.sums, count, w.value_width, t.rescale);
        accumulate<false>(count, w.value_width, t.keys, w.logits, t.stride, v, ldv, w.sums, w.value_width);
    }
    return write_outputs(c, w, b, count, parameters, row) && finite;
}

static bool forward(const Call &c) {
    const int64_t group = c.heads / c.kv_heads;
    const int64_t members = c.mechanism->parameters ? 1 : group;
    const bool few = c.queries * members <= FEW;
    const int64_t tiles = (c.queries + QUERY_TILE - 1) / QUERY_TILE;
    const int64_t items = few ? c.batch * c.heads / members : c.batch * c.heads * tiles;
    std::atomic<bool> finite{true};
    share(int(c.threads), items, [&](auto next) {
        ForwardScratch w(c);
        for (int64_t item; (item = next()) < items;) {
            bool good;
            if (few) {
                int64_t h0 = item * members;
                good = forward_few(c, w, h0 / c.heads, h0 % c.heads, int(members));
            } else {
                int64_t head = item / tiles, tile = tiles - 1 - item % tiles;  // the longest causal tiles first
                int64_t i0 = tile * QUERY_TILE;
                good = forward_tile(c, w, head / c.heads, head % c.heads, i0, int(std::min<int64_t>(QUERY_TILE, c.queries - i0)));
            }
            if (!good) finite = false;
        }
    });
    return finite;
}
