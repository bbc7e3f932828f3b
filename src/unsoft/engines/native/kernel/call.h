// One attention call as Python hands it over, and what forward and backward share: tile sizes, masks, row symbols.
#pragma once
#ifdef __AVX512BW__
#include <immintrin.h>
#endif
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>
#include "interface.h"
#include "matmul.h"
#include "tensors.h"
#include "threads.h"

struct Fields {  // (field, batch, head, row) of real, strides in elements
    const real *data;
    int64_t field, batch, head, row;
    const real *at(int64_t b, int64_t h, int64_t r) const { return data + b * batch + h * head + r * row; }
};

// Filled by unsoft/engines/native/binding.py: 64-bit fields only, in this order.
struct Call {
    const Mechanism *mechanism;
    int64_t threads, batch, heads, kv_heads, queries, keys, width, value_width;
    int64_t causal, causal_offset;              // key j is visible to row i iff j <= i + causal_offset
    int64_t seed_low, seed_high, drop_below;    // dropout, if drop_below > 0
    double keep_scale, scale;
    Source q, k, v;
    Target out;
    real *peak, *total;                         // (batch, heads, queries), contiguous; null if not wanted
    Tensor count, visible, bias;                // data null if absent; count of real, visible of bytes, bias of real
    Tensor positions;                           // of real, (batch, queries + keys): i of every query, then j of every key; or null
    Tensor spans;                               // of int32, (batch, -, queries, 2): first visible key of a row, and one past its last; or null
    const real *parameters;                     // (heads, parameters)
    Fields query_fields, key_fields;            // as many as the mechanism says
    int64_t key_field_group;                    // query heads that share the fields of keys
    Source grad_out, saved_out;                 // from here on: backward only
    Target dq, dk, dv;
    Tensor bias_gradient;                       // of real, zero at the start
    double *parameter_gradient;                 // (heads, parameters), zero at the start
    real *query_field_gradient;                 // (fields, batch, heads, queries), or null
    real *key_field_gradient;                   // (fields, batch, heads, keys), or null
};

constexpr int LANES = PANEL * VL;   // queries that share one panel
constexpr int KEY_TILE = 96;        // keys per tile: logits of a panel and the values they meet stay in the first cache
constexpr int PANELS = LANES >= 48 ? 4 : 192 / LANES;
constexpr int QUERY_TILE = PANELS * LANES;

constexpr int KEY_TILE_ROWS = 256;  // keys per tile where queries are kept as rows
constexpr int FEW = 4;              // up to this many queries of a key head are kept as rows: filling lanes would not pay

static inline int padded(int64_t x) { return int((x + VL - 1) / VL * VL); }

static inline uint32_t mix(uint32_t x) {  // lowbias32, the hash shared by all engines
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// What one row may see besides the mask: the keys first .. last - 1. Causality, windows, documents and padding are all such spans.
struct Span {
    int64_t first, last;
};
static inline Span span_of(const Call &c, int64_t b, int64_t i) {
    if (c.spans.data) {
        const int32_t *x = (const int32_t *)c.spans.data + b * c.spans.batch + i * c.spans.row;
        return {x[0], x[1]};
    }
    return {0, c.causal ? std::clamp<int64_t>(i + c.causal_offset + 1, 0, c.keys) : c.keys};
}

// The smallest and the largest ends of the spans of some rows: no row sees a key outside first_min .. last_max, and every row sees
// (as far as the mask lets it) all keys of first_max .. last_min.
struct Extent {
    int64_t first_min, first_max, last_min, last_max;
    int64_t shortest() const { return last_min - first_max; }  // at most what any of the spans holds
};
static inline Extent extent_of(const Call &c, int64_t b, int64_t lowest, int64_t highest) {
    const Span start = span_of(c, b, lowest), stop = span_of(c, b, highest);
    Extent e = {start.first, stop.first, start.last, stop.last};  // right where spans grow with the row, as causal ones do
    for (int64_t i = lowest; c.spans.data && i <= highest; i++) {
        const Span s = span_of(c, b, i);
        e = {std::min(e.first_min, s.first), std::max(e.first_max, s.first), std::min(e.last_min, s.last), std::max(e.last_max, s.last)};
    }
    return e;
}

// Whether products are computed from pairs of bfloat16 (bfloat16.h).
static inline bool paired(const Call &c) { return PAIRED && c.q.type == BFLOAT16 && c.k.type == BFLOAT16 && c.v.type == BFLOAT16; }

// Rows that see fewer keys keep their weights in float32. Of a few weights softmax's largest is 1, without a rounding, and those of other
// formulas should not be much worse than it.
constexpr int FEW_WEIGHTS = 48;

// A mask or spans may hide NaN from some rows and not from others.
static inline bool may_hide(const Call &c) { return c.visible.data || c.spans.data; }

static inline const real *positions_of(const Call &c, int64_t b) { return (const real *)c.positions.data + b * c.positions.batch; }

// The row symbols of up to QUERY_TILE queries, and the tile buffers that masks are brought into.
struct Rows {
    real peak[QUERY_TILE], mass[QUERY_TILE], rescale[QUERY_TILE], count[QUERY_TILE], position[QUERY_TILE], limit[QUERY_TILE],
        top[QUERY_TILE], others[QUERY_TILE], seen[QUERY_TILE];  // seen: how many keys a query has seen so far
    real total[QUERY_TILE], inverse[QUERY_TILE], slope[QUERY_TILE], delta[QUERY_TILE];
    uint32_t drop_key[QUERY_TILE];
    real key_position[KEY_TILE_ROWS];
    const int query_field_count, key_field_count;
    Buffer<real> fields, key_fields;             // of queries, QUERY_TILE apart; of keys, for few queries
    Buffer<real> field_gradient, key_gradient;   // backward only

    Rows() : query_field_count(0), key_field_count(0), fields(0), key_fields(0), field_gradient(0), key_gradient(0) {}  // no fields
    explicit Rows(const Call &c, bool backward = false)
        : query_field_count(c.mechanism->query_fields), key_field_count(c.mechanism->key_fields), fields(query_field_count * QUERY_TILE),
          key_fields(backward ? 0 : key_field_count * FEW * KEY_TILE_ROWS),
          field_gradient(backward && c.query_field_gradient ? query_field_count * QUERY_TILE : 0),
          key_gradient(backward && c.key_field_gradient ? key_field_count * KEY_TILE * VL : 0) {}

    // Query `index` of the tile is row `i` of head `h`.
    void set(const Call &c, int index, int64_t b, int64_t h, int64_t i) {
        int64_t position_of_row = i + (c.causal ? c.causal_offset : 0);
        const Span span = span_of(c, b, i);
        peak[index] = top[index] = NOTHING_SEEN;
        mass[index] = others[index] = seen[index] = 0;
        position[index] = c.positions.data ? positions_of(c, b)[i] : real(position_of_row);
        for (int f = 0; f < query_field_count; f++) fields[f * QUERY_TILE + index] = c.query_fields.at(b, h, i)[f * c.query_fields.field];
        count[index] = real(std::max<int64_t>(span.last - span.first, 1));  // formulas divide by it
        if (c.count.data) count[index] = ((const real *)c.count.data)[b * c.count.batch + h * c.count.head + i * c.count.row];
        if (c.drop_below)
            drop_key[index] = mix(mix(mix(uint32_t(c.seed_low) + uint32_t(b * c.heads + h) * 0x9E3779B1u) ^ uint32_t(c.seed_high)) +
                                  uint32_t(i) * 0x85EBCA77u);
    }
    void pad(int from, int to) {  // lanes that hold no query
        for (int index = from; index < to; index++) {
            peak[index] = top[index] = NOTHING_SEEN;
            mass[index] = others[index] = seen[index] = position[index] = limit[index] = total[index] = delta[index] = 0;
            count[index] = 1;
            drop_key[index] = 0;
            for (int f = 0; f < query_field_count; f++) fields[f * QUERY_TILE + index] = 0;
        }
    }
};

// The part of a tile that its queries from `first` on (all of head h, or of heads without parameters) fill in.
static inline void fill_tile(const Call &c, Rows &rows, Tile &t, int first, int64_t h) {
    t.peak = rows.peak + first, t.mass = rows.mass + first, t.rescale = rows.rescale + first, t.top = rows.top + first, t.others = rows.others + first;
    t.count = rows.count + first, t.position = rows.position + first, t.limit = rows.limit + first, t.seen = rows.seen + first;
    t.drop_key = c.drop_below ? rows.drop_key + first : nullptr;
    t.drop_below = uint32_t(c.drop_below), t.keep_scale = real(c.keep_scale);
    t.parameters = c.parameters + h * c.mechanism->parameters;
    t.query_fields = rows.fields + first, t.query_field_step = QUERY_TILE;
}

// The tile's keys are those of batch b from j0 on.
static inline void set_keys(const Call &c, Rows &rows, Tile &t, int64_t b, int64_t j0) {
    t.first_key = j0;
    t.key_position = nullptr;
    if (!c.positions.data) return;
    std::copy_n(positions_of(c, b) + c.queries + j0, t.keys, rows.key_position);
    std::fill(rows.key_position + t.keys, rows.key_position + padded(t.keys), real(0));
    t.key_position = rows.key_position;
}

// The fields of `keys` keys from j0 on, for queries of one head: read where they lie. Returns whether they are finite.
static inline bool set_key_fields(const Call &c, const Rows &rows, Tile &t, int64_t b, int64_t h, int64_t j0, int keys) {
    if (!rows.key_field_count) return true;
    t.key_fields = c.key_fields.at(b, h / c.key_field_group, j0), t.key_field_step = c.key_fields.field;
    return all_finite(t.key_fields, t.key_field_step, rows.key_field_count, keys);
}

// The same for few queries, a row each: query `index` belongs to the head that head(index) says. Padded, so they are copied.
template <class Head>
static inline bool copy_key_fields(const Call &c, Rows &rows, Tile &t, int64_t b, int64_t j0, int queries, Head head) {
    if (!rows.key_field_count) return true;
    bool finite = true;
    t.key_fields = rows.key_fields, t.key_field_step = FEW * KEY_TILE_ROWS, t.key_field_row = KEY_TILE_ROWS;
    for (int f = 0; f < rows.key_field_count; f++)
        for (int index = 0; index < queries; index++) {
            real *to = rows.key_fields + f * t.key_field_step + index * t.key_field_row;
            std::copy_n(c.key_fields.at(b, head(index) / c.key_field_group, j0) + f * c.key_fields.field, t.keys, to);
            std::fill(to + t.keys, to + padded(t.keys), real(0));
            finite &= all_finite(to, 0, 1, t.keys);
        }
    return finite;
}

// How many of the `keys` keys from j0 on lie before the end of the span of row i.
static inline real limit(const Call &c, int64_t b, int64_t i, int64_t j0, int keys) {
    return real(std::clamp<int64_t>(span_of(c, b, i).last - j0, 0, keys));
}

enum Seen { NONE, SOME, ALL };

// The keys of a tile that hold NaN or Inf, of calls with a mask, which may hide them. What is seen of them is left to the engine that
// has rules for it; what is hidden must cost nothing, since the unused end of a cache is often uninitialised memory. Formulas drop
// hidden entries whatever they are, but products with values and keys do not: 0 * NaN is NaN. There such rows are replaced by 0.
// Out of line (RARE), so that the loops around them are compiled as if they were not there.
#define RARE __attribute__((noinline))
struct BadKeys {
    bool any = false;
    uint8_t bad[KEY_TILE_ROWS];

    // Marks the rows of a tile (keys, width) that are not finite. Returns whether there are any.
    bool mark_rows(const real *x, long ld, int keys, int width) { return !all_finite(x, ld, keys, width) && mark_each(x, ld, keys, width); }
    // Marks the keys for which one of `rows` rows of numbers per key is not finite.
    RARE void mark_columns(const real *x, long ld, int rows, int keys) {
        for (int row = 0; row < rows; row++) mark_each(x + row * ld, 1, keys, 1);
    }
    // Does any of the tile's first `queries` queries see such a key?
    bool seen(const Tile &t, int queries, bool transposed) const { return any && look(t, queries, transposed); }
    // Copies a tile (keys, width), with 0 in the rows that are marked.
    RARE void clean(const real *x, long ld, int keys, int width, real *to) const {
        for (int key = 0; key < keys; key++)
            if (bad[key]) std::fill_n(to + long(key) * width, width, real(0));
            else std::copy_n(x + key * ld, width, to + long(key) * width);
    }

private:
    RARE bool mark_each(const real *x, long ld, int keys, int width) {
        if (!any) std::fill_n(bad, KEY_TILE_ROWS, uint8_t(0));
        for (int key = 0; key < keys; key++) bad[key] |= !all_finite(x + key * ld, ld, 1, width);
        return any = true;
    }
    RARE bool look(const Tile &t, int queries, bool transposed) const {
        for (int key = 0; key < t.keys; key++)
            for (int index = 0; bad[key] && index < queries; index++)
                if (key < t.limit[index] && (!t.visible || t.visible[transposed ? long(key) * t.stride + index : long(index) * t.stride + key]))
                    return true;
        return false;
    }
};

// Both out of line: inlined into a larger function, the loops were compiled to something slower.
// How many entries of a mask for one query are not 0, among the keys `start` .. `limit` of a tile that begins with key j.
static __attribute__((noinline)) int count_entries(const Tensor &x, int64_t b, int64_t h, int64_t i, int64_t j, int start, int limit) {
    const uint8_t *from = (const uint8_t *)x.data + b * x.batch + h * x.head + i * x.row + j * x.column;
    int seen = 0, key = start;
#ifdef __AVX512BW__
    for (; x.column == 1 && key + 64 <= limit; key += 64) {
        const __m512i bytes = _mm512_loadu_si512(from + key);
        seen += __builtin_popcountll(_mm512_test_epi8_mask(bytes, bytes));
    }
#endif
    for (; x.column == 1 && key + 8 <= limit; key += 8) {  // neighbours in memory: eight at a time
        uint64_t word;
        memcpy(&word, from + key, 8);
        constexpr uint64_t low = 0x7f7f7f7f7f7f7f7f;
        seen += __builtin_popcountll((word | ((word & low) + low)) & ~low);  // the top bit of each byte that is not 0
    }
    for (; key < limit; key++) seen += from[key * x.column] != 0;
    return seen;
}
// The same for all tiles of `step` keys between j_begin and j_end at once: a mask that is read along its rows comes from memory many
// times faster than one that is read tile by tile.
static void count_tiles(const Call &c, int64_t b, int64_t h, int64_t i, int64_t j_begin, int64_t j_end, int step, uint16_t *to) {
    for (int64_t j = j_begin; j < j_end; j += step)
        *to++ = uint16_t(count_entries(c.visible, b, h, i, j, 0, int(std::min<int64_t>(step, j_end - j))));
}
// Copies a mask's or bias's entries for one query and `keys` keys to `to`, `step` apart.
template <class T>
static __attribute__((noinline)) void copy_entries(const Tensor &x, int64_t b, int64_t h, int64_t i, int64_t j, int keys, T *to, long step) {
    const T *from = (const T *)x.data + b * x.batch + h * x.head + i * x.row + j * x.column;
    for (int key = 0; key < keys; key++) to[key * step] = from[key * x.column];
}

// Brings the masks of a tile into `t` (laid out as t.s is): query number `index` of the tile is what row(index) says, and `limit`
// and `seen` are its own (Rows). `cut`: the span of some query begins inside the tile. `counts`: what count_tiles has found, `next_count`
// apart, or null if the tile has been cut short. Returns what the queries see of the keys before the ends of their spans; NONE: the tile can be skipped.
template <class Row>
static Seen bring_masks(const Call &c, Tile &t, int64_t b, int64_t j0, int queries, bool transposed, bool cut, uint8_t *visible, real *bias,
                        const real *limit, real *seen, const uint16_t *counts, long next_count, Row row) {
    t.visible = nullptr;
    t.bias = nullptr;
    long step = transposed ? t.stride : 1, next = transposed ? 1 : t.stride;
    auto start_of = [&](int index) { return cut ? int(std::clamp<int64_t>(span_of(c, b, row(index).second).first - j0, 0, t.keys)) : 0; };
    bool any = false, every = true;
    for (int index = 0; index < queries; index++) {
        const int allowed = int(limit[index]), start = start_of(index);
        int count = std::max(allowed - start, 0);
        if (c.visible.data)
            count = counts && count == t.keys ? counts[index * next_count] : count_entries(c.visible, b, row(index).first, row(index).second, j0, start, allowed);
        any |= count > 0, seen[index] += real(count);
        every &= count == allowed;
    }
    const Seen result = !any ? NONE : every ? ALL : SOME;
    if (result == SOME) {
        for (int index = 0; index < queries; index++) {
            uint8_t *to = visible + index * next;
            const int start = start_of(index);
            if (c.visible.data) copy_entries(c.visible, b, row(index).first, row(index).second, j0, t.keys, to, step);
            else
                for (int key = start; key < t.keys; key++) to[key * step] = 1;
            for (int key = 0; key < start; key++) to[key * step] = 0;
        }
        t.visible = visible;
    }
    if (c.bias.data && result != NONE) {
        for (int index = 0; index < queries; index++)
            copy_entries(c.bias, b, row(index).first, row(index).second, j0, t.keys, bias + index * next, step);
        t.bias = bias;
    }
    return result;
}

// Rows that are worked on together: `count` of them from i0 on. They never belong to two documents (spans without a common key), so
// that packed documents take the same tiles, and get the same numbers, as each of them would alone.
struct Piece {
    int64_t i0;
    int count;
};
static std::vector<Piece> pieces_of(const Call &c, int64_t b, int most) {
    std::vector<Piece> pieces;
    pieces.reserve((c.queries + most - 1) / most);
    for (int64_t i = 0; i < c.queries;) {
        int64_t stop = std::min<int64_t>(i + most, c.queries), next = i + 1;
        while (c.spans.data && next < stop && span_of(c, b, next).first < span_of(c, b, next - 1).last) next++;
        pieces.push_back({i, int((c.spans.data ? next : stop) - i)});
        i += pieces.back().count;
    }
    return pieces;
}

// Up to QUERY_TILE queries that read the same key head: `span` rows from row i0 on, of each of `members` query heads from h0
// on. Heads of a group are put into one block when their queries are few, so that keys are read once for all of them.
struct Block {
    int64_t b, h0, i0;
    int members, span;
    int count() const { return members * span; }
    // Asked for every row of every tile: a division would cost more than scanning its mask.
    int64_t head(int index) const { return members == 1 ? h0 : h0 + index / span; }
    int64_t row(int index) const { return members == 1 ? i0 + index : i0 + index % span; }
    // First and last row among the queries `first` .. `first + rows`.
    int64_t lowest(int first) const { return members == 1 ? i0 + first : i0; }
    int64_t highest(int first, int rows) const { return members == 1 ? i0 + first + rows - 1 : i0 + span - 1; }
};
