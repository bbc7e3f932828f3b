// Forward of row-coupled attention: the logits of a panel of queries and all their keys, then the rule, then the values of
// the keys that have any weight.
#pragma once
#include "../call.h"
#include "panel.h"

static inline const RowRule &rule_of(const Call &c) { return *static_cast<const RowRule *>(c.mechanism); }

// Up to LANES rows of one head, and the buffers of their panel.
struct RowBlock {
    int64_t b, h, i0;
    int count;
};

struct RowScratch {
    int width, value_width;
    Buffer<real> query_rows, packed, keys, values, logits, sums;
    std::vector<int32_t> chosen;  // keys that have any weight
    Rows rows;
    explicit RowScratch(const Call &c)
        : width(padded(c.width)), value_width(padded(c.value_width)), query_rows(size_t(LANES) * width), packed(size_t(LANES) * width),
          keys(size_t(KEY_TILE) * width), values(size_t(KEY_TILE) * value_width), logits(size_t(c.keys) * LANES),
          sums(size_t(LANES) * value_width), rows(c) {}
};

static inline Extent extent_of(const Call &c, const RowBlock &block) {
    return extent_of(c, block.b, block.i0, block.i0 + block.count - 1);
}

// Hides what the spans of rows, the mask and the padding of lanes hide, and adds the float mask, in the rows j0 .. j0 + keys of s.
static void apply_masks(const Call &c, const RowBlock &block, int64_t j0, int keys, int lanes, real *s) {
    for (int lane = 0; lane < lanes; lane++) {
        const int64_t i = block.i0 + lane;
        const Span span = lane < block.count ? span_of(c, block.b, i) : Span{0, 0};
        const int64_t limit = std::clamp<int64_t>(span.last - j0, 0, keys), start = std::clamp<int64_t>(span.first - j0, 0, limit);
        for (int64_t key = limit; key < keys; key++) s[key * lanes + lane] = HIDDEN;
        for (int64_t key = 0; key < start; key++) s[key * lanes + lane] = HIDDEN;
        if (lane >= block.count) continue;
        if (c.bias.data) {
            const real *bias = (const real *)c.bias.data + block.b * c.bias.batch + block.h * c.bias.head + i * c.bias.row + j0 * c.bias.column;
            for (int64_t key = start; key < limit; key++) s[key * lanes + lane] += bias[key * c.bias.column];
        }
        if (c.visible.data) {
            const uint8_t *visible =
                (const uint8_t *)c.visible.data + block.b * c.visible.batch + block.h * c.visible.head + i * c.visible.row + j0 * c.visible.column;
            for (int64_t key = start; key < limit; key++)
                if (!visible[key * c.visible.column]) s[key * lanes + lane] = HIDDEN;
        }
    }
}

// The logits of a block with the keys `from` (returned) .. e.last_max; the rule has scanned them. Row j of `logits` is key j.
static int64_t panel_logits(const Call &c, const RowBlock &block, const Extent &e, const real *packed, int width, real *tile, Panel &x) {
    const RowRule &rule = rule_of(c);
    const int64_t hk = block.h / (c.heads / c.kv_heads);
    const bool few = block.count <= FEW;
    rule.begin(x);
    int64_t j0 = e.last_max;
    while (j0 > e.first_min) {
        const int keys = int(std::min<int64_t>(KEY_TILE, j0 - e.first_min));
        j0 -= keys;
        long ldk;
        const real *k = c.k.rows(block.b, hk, j0, keys, int(c.width), width, tile, ldk);
        real *s = x.s + j0 * x.lanes;
        if (few) few_products(block.count, keys, width, packed, width, k, ldk, s, 1, x.lanes);
        else panel_product(keys, int(c.width), k, ldk, packed, x.lanes, s, x.lanes, x.lanes / VL);
        const bool cut = e.last_min < j0 + keys || e.first_max > j0;
        if (cut || c.bias.data || c.visible.data || block.count < x.lanes) apply_masks(c, block, j0, keys, x.lanes, s);
        if (!rule.scan(x, j0, j0 + keys)) break;
    }
    return j0;
}

static void pack_queries(const RowBlock &block, const real *q, long ldq, int lanes, int64_t width, int padded_width, real scale, real *to) {
    if (block.count <= FEW) pack_rows(q, ldq, block.count, padded_width, scale, to);
    else pack_lanes(q, ldq, block.count, lanes, int(width), scale, to);
}

static inline Panel panel_of(const Call &c, const RowBlock &block, Rows &rows, real *s) {
    for (int index = 0; index < block.count; index++) rows.set(c, index, block.b, block.h, block.i0 + index);
    const int lanes = padded(block.count);
    rows.pad(block.count, lanes);
    Panel x = {};
    x.s = s, x.lanes = lanes, x.peak = rows.peak, x.threshold = rows.total, x.count = rows.count, x.position = rows.position;
    x.parameters = c.parameters + block.h * rule_of(c).parameters;
    return x;
}

// Dropout's factor, 0 or keep_scale, for query `index` of a block and key j.
static inline real kept(const Call &c, const Rows &rows, int index, int64_t j) {
    return mix(rows.drop_key[index] + uint32_t(j) * 0xC2B2AE3Du) < uint32_t(c.drop_below) ? real(0) : real(c.keep_scale);
}

// Multiplies row `key` of a panel, which is key j of the call.
static inline void drop(const Call &c, const Rows &rows, int count, int64_t j, real *row) {
    for (int index = 0; index < count; index++) row[index] *= kept(c, rows, index, j);
}

// Some keys, or values, one after the other: where they lie, if they are neighbours, or copied together.
static const real *gather(const Source &source, int64_t b, int64_t hk, const int32_t *chosen, int count, int width, int padded_width, real *to, long &ld) {
    if (chosen[count - 1] - chosen[0] == count - 1) return source.rows(b, hk, chosen[0], count, width, padded_width, to, ld);
    for (int r = 0; r < count; r++) {
        real *row = to + long(r) * padded_width;
        const real *from = source.rows(b, hk, chosen[r], 1, width, padded_width, row, ld);
        if (from != row) std::copy_n(from, padded_width, row);
    }
    ld = padded_width;
    return to;
}

static bool forward_block(const Call &c, RowScratch &w, const RowBlock &block) {
    const RowRule &rule = rule_of(c);
    const int64_t hk = block.h / (c.heads / c.kv_heads);
    const Extent e = extent_of(c, block);
    Panel x = panel_of(c, block, w.rows, w.logits);
    long ldq, ldv;
    const real *q = c.q.rows(block.b, block.h, block.i0, block.count, int(c.width), w.width, w.query_rows, ldq);
    pack_queries(block, q, ldq, x.lanes, c.width, w.width, real(c.scale), w.packed);
    const int64_t from = panel_logits(c, block, e, w.packed, w.width, w.keys, x);
    x.s += from * x.lanes, x.keys = e.last_max - from;
    rule.solve(x);
    rule.weights(x);
    w.chosen.clear();  // the keys that weigh anything are moved together
    for (int64_t key = 0; key < x.keys; key++) {
        real *row = x.s + key * x.lanes;
        if (c.drop_below) drop(c, w.rows, block.count, from + key, row);
        V some = {};
        for (int lane = 0; lane < x.lanes; lane += VL) some += vabs(load(row + lane));
        if (horizontal_sum(some) == 0) continue;
        const int64_t to = int64_t(w.chosen.size());
        if (to != key) std::copy_n(row, x.lanes, x.s + to * x.lanes);
        w.chosen.push_back(int32_t(from + key));
    }
    std::fill_n((real *)w.sums, long(x.lanes) * w.value_width, real(0));
    for (size_t first = 0; first < w.chosen.size(); first += KEY_TILE) {
        const int keys = int(std::min<size_t>(KEY_TILE, w.chosen.size() - first));
        const real *v = gather(c.v, block.b, hk, w.chosen.data() + first, keys, int(c.value_width), w.value_width, w.values, ldv);
        accumulate<true>(block.count, w.value_width, keys, x.s + first * x.lanes, x.lanes, v, ldv, w.sums, w.value_width);
    }
    bool finite = true;
    for (int index = 0; index < block.count; index++) {
        const int64_t i = block.i0 + index, at = (block.b * c.heads + block.h) * c.queries + i;
        finite &= c.out.write(block.b, block.h, i, int(c.value_width), w.sums + long(index) * w.value_width, 1);
        c.peak[at] = w.rows.peak[index], c.total[at] = w.rows.total[index];
    }
    return finite;
}

static bool rows_forward(const Call &c) {
    std::vector<RowBlock> all_blocks;
    for (int64_t b = 0; b < c.batch; b++) {
        const std::vector<Piece> pieces = pieces_of(c, b, LANES);
        for (int64_t h = 0; h < c.heads; h++)
            for (size_t x = pieces.size(); x-- > 0;) all_blocks.push_back({b, h, pieces[x].i0, pieces[x].count});  // longest causal rows first
    }
    const int64_t blocks = int64_t(all_blocks.size());
    const bool tiny = c.batch * c.heads * c.queries * c.keys * (c.width + c.value_width) < 1 << 17;
    std::atomic<bool> finite{true};
    share(tiny ? 1 : int(c.threads), blocks, [&](auto next) {
        RowScratch w(c);
        for (int64_t item; (item = next()) < blocks;)
            if (!forward_block(c, w, all_blocks[item])) finite = false;
    });
    return finite;
}
