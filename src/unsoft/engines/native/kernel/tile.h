// A formula on a tile: included after the generated `struct Formula`, which offers
//   constants  has_peak, has_mass, exact_peak, strength, operand, parameters, query_fields, key_fields, mass_degree
//   struct Key { V j; V field[]; }                       what belongs to the key: its position and its fields
//   Row row(V m, V n, V i, const V *fields, const real *params)    what depends on the query only, computed once a row
//   V peak(V s, const Row &, const Key &, V b)           b: the float mask, read only if it is an operand of the formula
//   void value(V s, const Row &, const Key &, V b, V &weight, V &mass)
//   void value_half(the same)                            for weights that are rounded to bfloat16: shorter exponentials
//   void slope(V s, const Row &, const Key &, V b, V &weight, V &dweight, V &mass, V &dmass)    derivatives by the logit
//   void field_slopes(V s, const Row &, const Key &, V b, FieldSlopes &)       the same, and by the fields of query and key
//   void bias_slopes(V s, const Row &, const Key &, V b, V &dweight, V &dmass)                  derivatives by such a mask
//   void parameter_slopes(V s, const Row &, const Key &, V b, V *dweight, V *dmass)             derivatives by each parameter
//   V offset(m, n, i, fields, params), norm(z, ...), norm_slope(z, ...)
//   void row_parameter_slopes(V z, V m, V n, V i, const V *fields, const real *params, V *doffset, V *dnorm)
//   void row_field_slopes(the same)                      derivatives by the fields of the query
// Nothing here knows which formula it is.
#pragma once
#include "tile_gradients.h"
#include "tile_lanes.h"

namespace {

struct Value {
    V weight, mass;
    void scale(V a, V b) { weight *= a, mass *= b; }
};

// Every such key of a plain tile is looked at to find out how close softmax would come to giving a row to one key.
constexpr int SAMPLED = 16, SAMPLES = 8;

// Takes in the `count` logits looked at in a tile, whose largest logit (or one before) is m.
UNSOFT_INLINE void measure_concentration(const Tile &t, int query, V m, const V *sample, int count) {
    const V old = load(t.top + query);
    V others = load(t.others + query);
    others = vselect(m == old, others, (others + real(1)) * vexp((old - m) * real(2)));  // the old top is one of them now
    for (int k = 0; k < count; k++) others += vselect(sample[k] == m, V{}, vexp((sample[k] - m) * real(2)) * real(SAMPLED));
    store(t.top + query, m), store(t.others + query, others);
}

template <bool ROWS, bool PLAIN, bool HALF> bool forward_tile(const Tile &t) {
    typedef Layout<ROWS> At;
    constexpr int step = ROWS ? VL : 1;
    bool rescaled = false;
    for (int query = 0; query < t.queries; query += ROWS ? 1 : VL) {
        const Lanes x = At::lanes(t, query);
        V old = At::statistic(t.peak, query), m = old;
        if (Formula::has_peak) {
            Formula::Row row = x.row(V{}, t);
            for (int key = 0; key < t.keys; key += step) {
                size_t at = At::at(t, query, key);
                V s = load(t.s + at);
                const Formula::Key j = At::key(t, query, key);
                if (PLAIN) {
                    m = larger(m, Formula::peak(s, row, j, V{}));
                } else {
                    V b = t.bias ? load(t.bias + at) : V{};
                    V shifted = Formula::strength || Formula::operand ? s : s + b;
                    V top = Formula::peak(shifted, row, j, b);
                    if (Formula::strength) top += b;
                    m = vselect(seen<ROWS>(t, x, At::key_index(key), at), larger(m, top), m);
                }
            }
            if (ROWS) m = splat(horizontal_max(m));
            V factor = vselect(m == old, splat(1), vexp(old - m));
            bool changed = false;
            for (int lane = 0; lane < VL; lane++) changed |= factor[lane] != 1;
            rescaled |= changed;
            if (ROWS) {
                t.peak[query] = m[0], t.rescale[query] = factor[0];
                if (changed) t.mass[query] *= std::pow(factor[0], real(Formula::mass_degree));
            } else {
                store(t.peak + query, m), store(t.rescale + query, factor);
                if (changed) {
                    V mass_factor = Formula::mass_degree == 1 ? factor : vexp((old - m) * real(Formula::mass_degree));
                    mass_factor = vselect(m == old, splat(1), mass_factor);
                    store(t.mass + query, load(t.mass + query) * mass_factor);
                }
            }
        }
        const Formula::Row row = x.row(m, t);
        constexpr bool measured = HALF && !Formula::exact_peak;
        [[maybe_unused]] V total = {}, top = measured ? load(t.top + query) : V{}, sample[SAMPLES];
        for (int key = 0; key < t.keys; key += step) {
            size_t at = At::at(t, query, key);
            V s = load(t.s + at), index = At::key_index(key);
            const Formula::Key j = At::key(t, query, key);
            Value y;
            if (measured) {
                top = larger(top, s);
                if (key % SAMPLED == 0) sample[key / SAMPLED] = s;
            }
            if (HALF) {
                Formula::value_half(s, row, j, V{}, y.weight, y.mass);
            } else if (PLAIN) {
                Formula::value(s, row, j, V{}, y.weight, y.mass);
            } else {
                y = biased<Value>(t, x, s, m, at, row, [&](const Formula::Row &r, [[maybe_unused]] V b) {
                    Value z;
                    Formula::value(s, r, j, b, z.weight, z.mass);
                    return z;
                });
                I visible = seen<ROWS>(t, x, index, at);
                y.weight = vselect(visible, y.weight, V{});
                y.mass = vselect(visible, y.mass, V{});
                if (t.drop_key) y.weight *= kept(t, x, index);
            }
            store(t.s + at, y.weight);
            if (Formula::has_mass) total += y.mass;
        }
        if (measured) measure_concentration(t, query, top, sample, (t.keys + SAMPLED - 1) / SAMPLED);
        if (ROWS) t.mass[query] += horizontal_sum(total);
        else store(t.mass + query, load(t.mass + query) + total);
    }
    return rescaled;
}
template <bool ROWS> bool forward(const Tile &t) {
    if (!t.plain) return forward_tile<ROWS, false, false>(t);
    return !ROWS && t.half ? forward_tile<ROWS, true, !ROWS && SINGLE>(t) : forward_tile<ROWS, true, false>(t);
}

void finish(const Tile &t, real *total, real *inverse) {
    for (int query = 0; query < t.queries; query += VL) {
        const Lanes x = Layout<false>::lanes(t, query);
        V m = load(t.peak + query), z = load(t.mass + query);
        const I unseen = load(t.seen + query) == V{};
        m = vselect(m == splat(NOTHING_SEEN), V{}, m);
        V norm = splat(1);
        if (Formula::has_mass) {
            z += Formula::offset(m, x.count, x.position, x.field, t.parameters);
            norm = Formula::norm(z, m, x.count, x.position, x.field, t.parameters);
        } else {
            z = splat(1);
        }
        store(t.peak + query, vselect(unseen, splat(-std::numeric_limits<real>::infinity()), m));
        store(total + query, z);
        store(inverse + query, vselect(unseen | vanishes(norm), V{}, real(1) / norm));
    }
}

void prepare(const Tile &t, const real *total, const real *delta, real *inverse, real *slope) {
    for (int query = 0; query < t.queries; query += VL) {
        V one = splat(1), zero = {}, m = load(t.peak + query);
        const I unseen = m == splat(-std::numeric_limits<real>::infinity());
        m = vselect(unseen, zero, m);
        store(t.peak + query, m);
        if (!Formula::has_mass) {
            store(inverse + query, one), store(slope + query, zero);
            continue;
        }
        const Lanes x = Layout<false>::lanes(t, query);
        V n = x.count, i = x.position;
        V z = load(total + query), d = load(delta + query);
        V norm = Formula::norm(z, m, x.count, x.position, x.field, t.parameters);
        I dead = unseen | vanishes(norm);
        V inv = vselect(dead, zero, one / norm);
        V dz = vselect(dead, zero, -d * Formula::norm_slope(z, m, n, i, x.field, t.parameters) * inv);
        store(inverse + query, inv), store(slope + query, dz);
        if constexpr (Formula::query_fields > 0) {
            V doffset[Formula::query_fields], dnorm[Formula::query_fields];
            if (t.query_field_gradient) Formula::row_field_slopes(z, m, n, i, x.field, t.parameters, doffset, dnorm);
            for (int f = 0; f < Formula::query_fields && t.query_field_gradient; f++) {
                real *sum = t.query_field_gradient + f * t.query_field_step + query;
                store(sum, load(sum) + vselect((d == zero) | dead, zero, doffset[f] * dz - d * dnorm[f] * inv));
            }
        }
        if constexpr (Formula::parameters > 0) {
            if (!t.parameter_gradient) continue;
            V doffset[Formula::parameters], dnorm[Formula::parameters];
            Formula::row_parameter_slopes(z, m, n, i, x.field, t.parameters, doffset, dnorm);
            for (int k = 0; k < Formula::parameters; k++)  // a row with d == 0 may be padding, whose slopes can be NaN
                t.parameter_gradient[k] += horizontal_sum(vselect((d == zero) | dead, zero, doffset[k] * dz - d * dnorm[k] * inv));
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const Mechanism *unsoft_mechanism() {
    static const Mechanism table = {Formula::parameters, Formula::query_fields, Formula::key_fields, Formula::has_peak, Formula::has_mass, Formula::exact_peak, Formula::mass_degree,
                                    forward<false>, forward<true>, backward, finish, prepare};
    return &table;
}
