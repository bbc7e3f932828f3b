// What a formula needs to know at one vector of a tile: where it lies, what is visible, dropped, added to the logit.
// Included by tile.h after the generated `struct Formula`.
#pragma once
#include "interface.h"

namespace {

UNSOFT_INLINE U mix(U x) {  // lowbias32, the hash shared by all engines
    const U word32 = (U{} + 0xffffffffu);
    x = (x ^ (x >> 16)) * 0x7feb352du & word32;
    x = (x ^ (x >> 15)) * 0x846ca68bu & word32;
    return (x ^ (x >> 16)) & word32;
}

// Where the vector of one tile position lies, and what surrounds it: the only difference between the two layouts.
struct Lanes {
    V count, position, limit;
    V field[Formula::query_fields + 1];
    U drop_key;
    Formula::Row row(V m, const Tile &t) const { return Formula::row(m, count, position, field, t.parameters); }
};

template <bool ROWS> struct Layout {
    // ROWS: one query, VL keys from `key` on. Otherwise: VL queries from `query` on, one key.
    UNSOFT_INLINE Lanes lanes(const Tile &t, int query) {
        Lanes x;
        if (ROWS) {
            x.count = splat(t.count[query]);
            x.position = splat(t.position[query]);
            x.limit = splat(t.limit[query]);
            x.drop_key = U{} + uword(t.drop_key ? t.drop_key[query] : 0);
        } else {
            x.count = load(t.count + query);
            x.position = load(t.position + query);
            x.limit = load(t.limit + query);
            x.drop_key = U{};
            if (t.drop_key)
                for (int lane = 0; lane < VL; lane++) x.drop_key[lane] = t.drop_key[query + lane];
        }
        for (int f = 0; f < Formula::query_fields; f++) x.field[f] = statistic(t.query_fields + f * t.query_field_step, query);
        return x;
    }
    UNSOFT_INLINE size_t at(const Tile &t, int query, int key) {
        return ROWS ? size_t(query) * t.stride + key : size_t(key) * t.stride + query;
    }
    UNSOFT_INLINE V key_index(int key) { return ROWS ? iota() + real(key) : splat(real(key)); }
    // The symbol j of the key, or of VL keys, that `key_index` counts.
    UNSOFT_INLINE V key_position(const Tile &t, int key) {
        if (!t.key_position) return key_index(key) + real(t.first_key);
        return ROWS ? load(t.key_position + key) : splat(t.key_position[key]);
    }
    UNSOFT_INLINE Formula::Key key(const Tile &t, int query, int key) {
        Formula::Key x;
        x.j = key_position(t, key);
        for (int f = 0; f < Formula::key_fields; f++) {
            const real *field = t.key_fields + f * t.key_field_step + (ROWS ? query * t.key_field_row : 0) + key;
            x.field[f] = ROWS ? load(field) : splat(*field);
        }
        return x;
    }
    UNSOFT_INLINE V statistic(const real *x, int query) { return ROWS ? splat(x[query]) : load(x + query); }
};

template <bool ROWS> UNSOFT_INLINE I seen(const Tile &t, const Lanes &x, V key, size_t at) {
    I result = key < x.limit;
    if (t.visible) {
        I bytes;
        for (int lane = 0; lane < VL; lane++) bytes[lane] = t.visible[at + lane];
        result &= bytes != 0;
    }
    return result;
}

UNSOFT_INLINE V kept(const Tile &t, const Lanes &x, V key) {  // dropout's factor: 0 or keep_scale
    U index;
    for (int lane = 0; lane < VL; lane++) index[lane] = uword(uint32_t(int64_t(key[lane]) + t.first_key) * 0xC2B2AE3Du);
    U word = mix((x.drop_key + index) & (U{} + 0xffffffffu));
    V factor;
    for (int lane = 0; lane < VL; lane++) factor[lane] = uint32_t(word[lane]) < t.drop_below ? real(0) : t.keep_scale;
    return factor;
}

// The formula at one vector, with a strength bias b: weight * exp(b) and mass * exp(degree b). Formulas with a peak are
// homogeneous in exp(-m), so shifting m by -b is the same and cannot overflow.
template <class Result, class Evaluate>
UNSOFT_INLINE Result biased(const Tile &t, const Lanes &x, V &s, V m, size_t at, const Formula::Row &row, Evaluate evaluate) {
    if (!t.bias) return evaluate(row, V{});
    V b = load(t.bias + at);
    if (!Formula::strength) {
        if (!Formula::operand) s += b;
        return evaluate(row, b);
    }
    if (Formula::has_peak) return evaluate(x.row(m - b, t), b);
    Result result = evaluate(row, b);
    result.scale(vexp(b), vexp(b * real(Formula::mass_degree)));
    return result;
}

// Below the smallest normal number a normaliser counts as 0: its inverse may overflow.
UNSOFT_INLINE I vanishes(V norm) { return vabs(norm) < splat(std::numeric_limits<real>::min()); }

}  // namespace
