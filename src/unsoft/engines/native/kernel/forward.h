// Forward: blocks of queries meet tiles of keys, with the running peak and total of every query ("online").
#pragma once
#include <cmath>
#include "measure.h"

struct ForwardScratch {
    int width, value_width;
    Buffer<real> query_rows, packed, keys, values, logits, sums, bias, clean_values, sums_before;
    Buffer<uint8_t> visible;
    Buffer<uint16_t> counts;  // visible keys of each query in each tile
    Buffer<Pair> query_pairs, key_pairs, value_pairs, weight_pairs, remainders;
    int64_t counted[4] = {-1, -1, -1, -1};  // batch, first row, first and last key of what `counts` holds
    Rows rows;
    static constexpr int tile = std::max(KEY_TILE * LANES, KEY_TILE_ROWS * FEW);
    // For blocks of up to `rows` queries. Small calls spend much of their time on memory: none is taken that will not be used.
    ForwardScratch(const Call &c, int rows)
        : ForwardScratch(c, rows, paired(c) && rows > FEW) {}
    ForwardScratch(const Call &c, int rows, bool pairs)
        : width(padded(c.width)), value_width(padded(c.value_width)), query_rows(size_t(rows) * width), packed(size_t(padded(rows)) * width),
          keys(c.k.direct(int(c.width)) ? 0 : KEY_TILE_ROWS * width),
          values(c.v.direct(int(c.value_width)) ? 0 : KEY_TILE_ROWS * value_width), logits(tile),
          sums(size_t(padded(rows)) * value_width), bias(c.bias.data ? tile : 0),
          clean_values(may_hide(c) ? KEY_TILE_ROWS * value_width : 0), sums_before(may_hide(c) ? FEW * value_width : 0),
          visible(may_hide(c) ? tile : 0), counts(c.visible.data ? size_t(rows) * (c.keys / KEY_TILE + 1) : 0),
          query_pairs(pairs ? size_t(padded(rows)) * width / 2 : 0), key_pairs(pairs ? KEY_TILE * width / 2 : 0),
          value_pairs(pairs ? KEY_TILE * value_width / 2 : 0), weight_pairs(pairs ? KEY_TILE * LANES / 2 : 0),
          remainders(pairs && !c.mechanism->exact_peak ? KEY_TILE * LANES / 2 : 0), rows(c) {}
};

// Adds what rounding has lost of the weights of a tile to the sums of rows that softmax would give to one key (measure_concentration). Its
// largest weight is 1, so that PyTorch rounds little more of such a row than the output; rounded weights would have 1.4 times its error.
static void add_remainders(ForwardScratch &w, const Tile &t, int rows, real *sums) {
    bool paired = false;
    for (int begin = 0, end; begin < rows; begin = end + 1) {
        for (end = begin; end < rows && t.others[end] < real(1.0 / 3);) end++;
        if (begin == end) continue;
        if (!paired) pair_remainders(t.s, t.stride, t.keys, t.stride, w.weight_pairs, w.remainders), paired = true;
        accumulate<true, Pair>(end - begin, w.value_width, (t.keys + 1) / 2, w.remainders + begin, t.stride, w.value_pairs, w.value_width,
                               sums + long(begin) * w.value_width, w.value_width);
    }
}

// Multiplies the accumulated rows by what the new peak costs them.
static inline void rescale_sums(real *sums, int count, int width, const real *factor) {
    for (int r = 0; r < count; r++)
        if (factor[r] != 1)
            for (int x = 0; x < width; x += VL) store(sums + long(r) * width + x, load(sums + long(r) * width + x) * factor[r]);
}

static const real *query_rows(const Call &c, ForwardScratch &w, const Block &block, long &ld) {
    if (block.members == 1) return c.q.rows(block.b, block.h0, block.i0, block.span, int(c.width), w.width, w.query_rows, ld);
    for (int member = 0; member < block.members; member++) {
        real *to = w.query_rows + long(member) * block.span * w.width;
        const real *from = c.q.rows(block.b, block.h0 + member, block.i0, block.span, int(c.width), w.width, to, ld);
        if (from != to) pack_rows(from, ld, block.span, w.width, 1, to);
    }
    ld = w.width;
    return w.query_rows;
}

// Sums weights and values of a block over the keys j_begin .. j_end into w.sums and w.rows, and keeps the weights if `kept`. Returns whether queries and keys
// are finite: an infinite one can vanish in a formula (exp(-inf) is 0), so that the output alone does not betray it. Without a
// mask, keys are looked at by the last queries only, which see the most of them; with one, by all queries that see a tile.
static bool sum_over_keys(const Call &c, ForwardScratch &w, const Block &block, int64_t j_begin, int64_t j_end, Weights *kept = nullptr) {
    const int64_t hk = block.h0 / (c.heads / c.kv_heads);
    const int count = block.count();
    const bool few = count <= FEW, pairs = paired(c) && !few, last = block.i0 + block.span == c.queries;
    for (int index = 0; index < count; index++) w.rows.set(c, index, block.b, block.head(index), block.row(index));
    w.rows.pad(count, padded(count));
    long ldq;
    const real *q = query_rows(c, w, block, ldq);
    bool finite = all_finite(q, ldq, count, w.width) & all_finite(w.rows.fields, QUERY_TILE, w.rows.query_field_count, count);
    if (few) pack_rows(q, ldq, count, w.width, real(c.scale), w.packed);
    for (int first = 0; !few && first < count; first += LANES) {
        int rows = std::min(LANES, count - first);
        if (pairs) pair_lanes(q + first * ldq, ldq, rows, padded(rows), int(c.width), w.query_pairs + first * w.width / 2);
        else pack_lanes(q + first * ldq, ldq, rows, padded(rows), int(c.width), real(c.scale), w.packed + first * w.width);
    }
    std::fill_n((real *)w.sums, long(padded(count)) * w.value_width, real(0));
    const int tile_keys = few ? KEY_TILE_ROWS : KEY_TILE, panel = few ? FEW : LANES;
    const bool masked = may_hide(c);
    Extent extents[PANELS];
    int64_t first_seen = c.keys, last_seen = 0, shortest = c.keys;
    for (int first = 0; first < count; first += panel) {
        const Extent e = extents[first / panel] = extent_of(c, block.b, block.lowest(first), block.highest(first, std::min(panel, count - first)));
        first_seen = std::min(first_seen, e.first_min), last_seen = std::max(last_seen, e.last_max);
        shortest = std::min(shortest, e.shortest());
    }
    j_begin = std::max(j_begin, first_seen), j_end = std::min(j_end, last_seen);
    const int64_t tiles = j_end > j_begin ? (j_end - j_begin + tile_keys - 1) / tile_keys : 0;
    if (kept) kept->begin(block, j_begin, j_end, tile_keys);
    const int64_t wanted[4] = {block.b, block.i0, j_begin, j_end};
    if (c.visible.data && (c.visible.head || !std::equal(wanted, wanted + 4, w.counted))) {
        std::copy_n(wanted, 4, w.counted);
        for (int index = 0; index < count; index++)
            count_tiles(c, block.b, block.head(index), block.row(index), j_begin, j_end, tile_keys, w.counts + index * tiles);
    }
    // Pairs are read where keys and values lie, unless numbers have to be looked at, replaced or padded, or are wanted as float32.
    const bool in_place = pairs && !masked && c.k.pairs(int(c.width)) && c.v.pairs(int(c.value_width)) && c.value_width % VL == 0;
    const bool bytes = few && !masked && c.k.bytes(int(c.width)) && c.v.bytes(int(c.value_width));
    const bool wide_keys = !bytes && (!in_place || last), wide_values = !bytes && (!in_place || shortest < FEW_WEIGHTS);
    BadKeys bad;
    for (int64_t j0 = j_begin; j0 < j_end; j0 += tile_keys) {
        const int keys = int(std::min<int64_t>(tile_keys, j_end - j0));
        long ldk = 0, ldv = 0;
        const real *k = wide_keys ? c.k.rows(block.b, hk, j0, keys, int(c.width), w.width, w.keys, ldk) : nullptr;
        const real *v = wide_values ? c.v.rows(block.b, hk, j0, keys, int(c.value_width), w.value_width, w.values, ldv) : nullptr;
        if (!masked && last && !few) finite &= all_finite(k, ldk, keys, w.width);
        const Pair *key_pairs = in_place ? (const Pair *)c.k.at(block.b, hk, j0) : w.key_pairs;
        const real *paired_values = nullptr;  // what w.value_pairs holds
        if (in_place) pair_rows((const uint16_t *)c.v.at(block.b, hk, j0), c.v.row, keys, w.value_width, w.value_pairs), paired_values = v;
        else if (pairs) pair_columns(k, ldk, keys, w.width, w.key_pairs);
        bad.any = false;
        bool checked = few;  // few queries look at the logits instead, which are far fewer numbers
        for (int first = 0; first < count; first += panel) {
            const int rows = std::min(panel, count - first), lanes = padded(rows);
            Tile t = {};
            fill_tile(c, w.rows, t, first, block.h0);
            const Extent &e = extents[first / panel];
            t.keys = int(std::min<int64_t>(keys, e.last_max - j0));
            if (t.keys <= 0 || e.first_min >= j0 + t.keys) continue;
            const int number = int((j0 - j_begin) / tile_keys);
            t.s = kept && !few ? kept->tile(number, first) : (real *)w.logits, t.queries = few ? rows : lanes, t.stride = few ? KEY_TILE_ROWS : lanes;
            set_keys(c, w.rows, t, block.b, j0);
            bool fields = few ? copy_key_fields(c, w.rows, t, block.b, j0, rows, [&](int index) { return block.head(first + index); })
                              : set_key_fields(c, w.rows, t, block.b, block.h0, j0, t.keys);
            if (!masked && last) finite &= fields;
            for (int index = first; index < first + rows; index++) w.rows.limit[index] = limit(c, block.b, block.row(index), j0, t.keys);
            Seen seen = bring_masks(c, t, block.b, j0, rows, !few, e.first_max > j0, w.visible, w.bias, t.limit, w.rows.seen + first,
                                    t.keys == keys ? w.counts + first * tiles + number : nullptr, tiles, [&](int index) { return std::make_pair(block.head(first + index), block.row(first + index)); });
            if (seen == NONE) continue;
            if (masked && !checked) {
                checked = true;
                bad.mark_rows(k, ldk, keys, w.width);
                if (bad.mark_rows(v, ldv, keys, w.value_width)) {
                    bad.clean(v, ldv, keys, w.value_width, w.clean_values);
                    v = w.clean_values, ldv = w.value_width;
                }
            }
            for (int f = 0; masked && !fields && f < w.rows.key_field_count; f++)
                bad.mark_columns(t.key_fields + f * t.key_field_step, t.key_field_row, few ? rows : 1, t.keys);
            const bool diagonal = e.last_min < j0 + t.keys;
            t.plain = seen == ALL && !diagonal && !t.bias && !t.drop_key && (!few || t.keys % VL == 0);
            bool rescaled;
            real *sums = w.sums + long(first) * w.value_width;
            if (few) {
                if (bytes) by_two(rows, [&](int r, auto n) {
                    int8_dots<n>(t.keys, w.width, w.packed + r * w.width, w.width, c.k.at(block.b, hk, j0), c.k.row, t.s + r * t.stride, t.stride);
                });
                else few_products(count, t.keys, w.width, w.packed, w.width, k, ldk, t.s, t.stride, 1);
                if (!all_finite(t.s, t.stride, rows, t.keys)) {
                    if (masked) bad.mark_columns(t.s, t.stride, rows, t.keys);
                    else finite = false;
                }
                rescaled = c.mechanism->forward_rows(t);
                if (rescaled) rescale_sums(sums, rows, w.value_width, t.rescale);
                if (masked) std::copy_n(sums, rows * w.value_width, (real *)w.sums_before);
                if (bytes) by_two(rows, [&](int r, auto n) {
                    int8_accumulate<n>(t.keys, w.value_width, t.s + r * t.stride, t.stride, c.v.at(block.b, hk, j0), c.v.row, sums + r * w.value_width, w.value_width);
                });
                else accumulate<false>(rows, w.value_width, t.keys, t.s, t.stride, v, ldv, sums, w.value_width);
                if (masked && !all_finite(sums, w.value_width, rows, w.value_width) && bad.mark_rows(v, ldv, t.keys, w.value_width)) {
                    bad.clean(v, ldv, t.keys, w.value_width, w.clean_values);
                    std::copy_n((real *)w.sums_before, rows * w.value_width, sums);
                    accumulate<false>(rows, w.value_width, t.keys, t.s, t.stride, w.clean_values, w.value_width, sums, w.value_width);
                }
            } else if (pairs) {
                panel_product<Pair>(t.keys, (int(c.width) + 1) / 2, key_pairs, in_place ? c.k.row / 2 : w.width / 2, w.query_pairs + first * w.width / 2, lanes, t.s,
                                    lanes, lanes / VL, real(c.scale));
                t.half = true;
                rescaled = c.mechanism->forward(t);
                if (rescaled) rescale_sums(sums, rows, w.value_width, t.rescale);
                if (e.shortest() < FEW_WEIGHTS) {
                    accumulate<true>(rows, w.value_width, t.keys, t.s, lanes, v, ldv, sums, w.value_width);
                } else {
                    if (v != paired_values) pair_rows(v, ldv, keys, w.value_width, w.value_pairs), paired_values = v;
                    pair_rows(t.s, lanes, t.keys, lanes, w.weight_pairs);
                    accumulate<true, Pair>(rows, w.value_width, (t.keys + 1) / 2, w.weight_pairs, lanes, w.value_pairs, w.value_width, sums, w.value_width);
                    if (!c.mechanism->exact_peak) add_remainders(w, t, rows, sums);
                }
            } else {
                panel_product(t.keys, int(c.width), k, ldk, w.packed + first * w.width, lanes, t.s, lanes, lanes / VL);
                rescaled = c.mechanism->forward(t);
                if (rescaled) rescale_sums(sums, rows, w.value_width, t.rescale);
                accumulate<true>(rows, w.value_width, t.keys, t.s, lanes, v, ldv, sums, w.value_width);
            }
            if (kept) kept->add(t, number, first, rows, few, rescaled);
            finite &= !bad.seen(t, rows, !few);
        }
    }
    return finite;
}

// Divides by the norm and writes outputs, peaks and totals. Returns whether all outputs are finite.
static bool write_outputs(const Call &c, ForwardScratch &w, const Block &block) {
    Tile t = {};
    fill_tile(c, w.rows, t, 0, block.h0);
    t.queries = padded(block.count());
    c.mechanism->finish(t, w.rows.total, w.rows.inverse);
    bool finite = true;
    for (int index = 0; index < block.count(); index++) {
        int64_t h = block.head(index), i = block.row(index), at = (block.b * c.heads + h) * c.queries + i;
        finite &= c.out.write(block.b, h, i, int(c.value_width), w.sums + long(index) * w.value_width, w.rows.inverse[index]);
        if (c.peak) c.peak[at] = w.rows.peak[index], c.total[at] = w.rows.total[index];
    }
    return finite;
}

// What one block has summed over a part of the keys, and how such parts are put together.
struct Partial {
    Buffer<real> sums, peak, mass, seen;
    Partial(int count, int width) : sums(size_t(count) * width), peak(count), mass(count), seen(count) {}
    void keep(const ForwardScratch &w, int count) {
        std::copy_n((real *)w.sums, size_t(count) * w.value_width, (real *)sums);
        std::copy_n(w.rows.peak, count, (real *)peak), std::copy_n(w.rows.mass, count, (real *)mass);
        std::copy_n(w.rows.seen, count, (real *)seen);
    }
    void add_to(ForwardScratch &w, int count, const Mechanism &mechanism) const {
        for (int r = 0; r < count; r++) {
            real &top = w.rows.peak[r], old = top;
            top = std::max(old, peak[r]);
            w.rows.seen[r] += seen[r];
            real before = top == old ? real(1) : std::exp(old - top), factor = top == peak[r] ? real(1) : std::exp(peak[r] - top);
            w.rows.mass[r] = w.rows.mass[r] * std::pow(before, real(mechanism.mass_degree)) + mass[r] * std::pow(factor, real(mechanism.mass_degree));
            real *to = w.sums + long(r) * w.value_width;
            for (int x = 0; x < w.value_width; x++) to[x] = to[x] * before + sums[long(r) * w.value_width + x] * factor;
        }
    }
};

static bool forward(const Call &c, const Statistics *statistics = nullptr) {
    const int64_t group = c.heads / c.kv_heads;
    // Parameters belong to a head, so heads share a block only if there are none; fields of keys do where queries are not rows.
    const int64_t most = c.mechanism->parameters ? 0 : c.mechanism->key_fields ? FEW : QUERY_TILE;
    const int members = c.queries * group <= most ? int(group) : 1;
    std::vector<Block> all_blocks;
    for (int64_t b = 0; b < c.batch; b++) {
        const std::vector<Piece> pieces = pieces_of(c, b, QUERY_TILE);
        const int64_t heads = c.heads / members, count = int64_t(pieces.size());
        if (b == 0) all_blocks.reserve(c.batch * heads * count);
        for (int64_t x = 0; x < heads * count; x++) {
            // Neighbouring blocks read the same keys, or the same mask if all heads share one. Longest causal rows come first.
            const bool by_rows = c.visible.data && !c.visible.head;
            const Piece &piece = pieces[count - 1 - (by_rows ? x / heads : x % count)];
            all_blocks.push_back({b, (by_rows ? x % heads : x / count) * members, piece.i0, members, piece.count});
        }
    }
    const int64_t blocks = int64_t(all_blocks.size());
    // Few blocks and many keys (decoding): cut the keys, so that every thread has the same share.
    int64_t parts = 1;
    if (blocks < 4 * c.threads && !statistics) parts = std::clamp<int64_t>(c.threads / std::gcd(blocks, c.threads), 1, std::max<int64_t>(c.keys / (2 * KEY_TILE_ROWS), 1));
    const int64_t step = (c.keys + parts - 1) / parts;
    const int rows = members * int(std::min<int64_t>(QUERY_TILE, c.queries));
    // Waking other threads takes as long as some 100,000 multiplications.
    const bool tiny = c.batch * c.heads * c.queries * c.keys * (c.width + c.value_width) < 1 << 17;
    std::vector<std::unique_ptr<Partial>> partial(parts > 1 ? blocks * parts : 0);
    std::atomic<bool> finite{true};
    std::mutex adding;
    share(tiny ? 1 : int(c.threads), blocks * parts, [&](auto next) {
        ForwardScratch w(c, rows);
        const std::unique_ptr<Weights> kept(statistics ? new Weights(c, rows) : nullptr);
        for (int64_t item; (item = next()) < blocks * parts;) {
            const Block &block = all_blocks[item / parts];
            const int64_t j_begin = item % parts * step;
            bool good = sum_over_keys(c, w, block, j_begin, std::min(j_begin + step, c.keys), kept.get());
            if (parts > 1) {
                partial[item] = std::make_unique<Partial>(block.count(), w.value_width);
                partial[item]->keep(w, block.count());
            } else {
                good &= write_outputs(c, w, block);
                if (kept) kept->measure(c, w.rows, *statistics, adding);
            }
            if (!good) finite = false;
        }
    });
    if (parts > 1) {
        ForwardScratch w(c, rows);
        for (int64_t number = 0; number < blocks; number++) {
            const Block &block = all_blocks[number];
            for (int index = 0; index < block.count(); index++) w.rows.set(c, index, block.b, block.head(index), block.row(index));
            w.rows.pad(block.count(), padded(block.count()));
            std::fill_n((real *)w.sums, long(block.count()) * w.value_width, real(0));
            for (int64_t part = 0; part < parts; part++) partial[number * parts + part]->add_to(w, block.count(), *c.mechanism);
            if (!write_outputs(c, w, block)) finite = false;
        }
    }
    return finite;
}
