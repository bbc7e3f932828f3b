// Gradients of a formula on a tile: by the logit, a float mask, the parameters and the fields. Included by tile.h.
#pragma once
#include <type_traits>
#include "tile_lanes.h"

namespace {

struct Slope {
    V weight, dweight, mass, dmass;
    void of(V s, const Formula::Row &row, const Formula::Key &key, V b) { Formula::slope(s, row, key, b, weight, dweight, mass, dmass); }
    void scale(V a, V b) { weight *= a, dweight *= a, mass *= b, dmass *= b; }
};
struct FieldSlopes : Formula::FieldSlopes {
    void of(V s, const Formula::Row &row, const Formula::Key &key, V b) { Formula::field_slopes(s, row, key, b, *this); }
    void scale(V a, V b) {
        weight *= a, dweight *= a, mass *= b, dmass *= b;
        for (int f = 0; f < Formula::query_fields; f++) query_dweight[f] *= a, query_dmass[f] *= b;
        for (int f = 0; f < Formula::key_fields; f++) key_dweight[f] *= a, key_dmass[f] *= b;
    }
};
struct ParameterSlopes {
    V dweight[Formula::parameters + 1], dmass[Formula::parameters + 1];
    void scale(V a, V b) {
        for (int k = 0; k < Formula::parameters; k++) dweight[k] *= a, dmass[k] *= b;
    }
};

// What each field adds to its gradient at one vector: the derivatives of weight and mass by it, chained.
UNSOFT_INLINE void add_field_gradients(const Tile &t, const Formula::FieldSlopes &y, V g, V slope, I visible, int key, V *query_sum) {
    for (int f = 0; f < Formula::query_fields; f++) {
        V term = Formula::has_mass ? y.query_dweight[f] * g + y.query_dmass[f] * slope : y.query_dweight[f] * g;
        query_sum[f] += vselect(visible, term, V{});
    }
    if (!t.key_field_gradient) return;
    for (int f = 0; f < Formula::key_fields; f++) {
        V term = Formula::has_mass ? y.key_dweight[f] * g + y.key_dmass[f] * slope : y.key_dweight[f] * g;
        real *sum = t.key_field_gradient + f * t.key_field_gradient_step + key * VL;
        store(sum, load(sum) + vselect(visible, term, V{}));
    }
}

// FIELDS: also the gradients of fields, whose derivatives share most of their arithmetic with that by the logit.
template <bool PLAIN, bool FIELDS> void backward_tile(const Tile &t) {
    typedef Layout<false> At;
    for (int query = 0; query < t.queries; query += VL) {
        const Lanes x = At::lanes(t, query);
        const V m = load(t.peak + query), inverse = load(t.inverse + query), slope = load(t.slope + query);
        const Formula::Row row = x.row(m, t);
        [[maybe_unused]] V query_sum[Formula::query_fields + 1] = {};
        for (int key = 0; key < t.keys; key++) {
            size_t at = At::at(t, query, key);
            V s = load(t.s + at), g = load(t.p + at), index = At::key_index(key);
            const Formula::Key j = At::key(t, query, key);
            std::conditional_t<FIELDS, FieldSlopes, Slope> y;
            if (PLAIN) {
                y.of(s, row, j, V{});
                if constexpr (FIELDS) add_field_gradients(t, y, Formula::has_mass ? g * inverse : g, slope, (I)(V{} == V{}), key, query_sum);
                V weight = Formula::has_mass ? y.weight * inverse : y.weight;
                V ds = Formula::has_mass ? y.dweight * (g * inverse) + y.dmass * slope : y.dweight * g;
                store(t.s + at, weight), store(t.p + at, ds);
                continue;
            }
            y = biased<decltype(y)>(t, x, s, m, at, row, [&](const Formula::Row &r, [[maybe_unused]] V b) {
                decltype(y) z;
                z.of(s, r, j, b);
                return z;
            });
            I visible = seen<false>(t, x, index, at);
            V drop = t.drop_key ? kept(t, x, index) : splat(1);
            g = g * drop * inverse;
            V ds = vselect(visible, Formula::has_mass ? y.dweight * g + y.dmass * slope : y.dweight * g, V{});
            if constexpr (FIELDS) add_field_gradients(t, y, g, slope, visible, key, query_sum);
            if (t.bias_gradient) {
                V db = ds;
                if (Formula::strength) {
                    db = y.weight * g;
                    if (Formula::has_mass) db += real(Formula::mass_degree) * y.mass * slope;
                } else if (Formula::operand) {
                    V dweight, dmass;
                    Formula::bias_slopes(s, row, j, load(t.bias + at), dweight, dmass);
                    db = Formula::has_mass ? dweight * g + dmass * slope : dweight * g;
                }
                store(t.bias_gradient + at, vselect(visible, db, V{}));
            }
            store(t.s + at, vselect(visible, y.weight * inverse * drop, V{}));
            store(t.p + at, ds);
        }
        if constexpr (FIELDS)
            for (int f = 0; f < Formula::query_fields && t.query_field_gradient; f++) {
                real *sum = t.query_field_gradient + f * t.query_field_step + query;
                store(sum, load(sum) + query_sum[f]);
            }
    }
}

template <int PARAMETERS> void parameter_tile(const Tile &t) {  // before backward_tile, which overwrites s and p
    typedef Layout<false> At;
    for (int query = 0; query < t.queries; query += VL) {
        const Lanes x = At::lanes(t, query);
        const V m = load(t.peak + query), inverse = load(t.inverse + query), slope = load(t.slope + query);
        const Formula::Row row = x.row(m, t);
        V sum[PARAMETERS] = {};
        for (int key = 0; key < t.keys; key++) {
            size_t at = At::at(t, query, key);
            V s = load(t.s + at), g = load(t.p + at) * inverse, index = At::key_index(key);
            const Formula::Key j = At::key(t, query, key);
            ParameterSlopes y = biased<ParameterSlopes>(t, x, s, m, at, row, [&](const Formula::Row &r, [[maybe_unused]] V b) {
                ParameterSlopes z;
                Formula::parameter_slopes(s, r, j, b, z.dweight, z.dmass);
                return z;
            });
            I visible = seen<false>(t, x, index, at);
            if (t.drop_key) g *= kept(t, x, index);
            for (int k = 0; k < PARAMETERS; k++) {
                V term = y.dweight[k] * g;
                if (Formula::has_mass) term += y.dmass[k] * slope;
                sum[k] += vselect(visible, term, V{});
            }
        }
        for (int k = 0; k < PARAMETERS; k++) t.parameter_gradient[k] += horizontal_sum(sum[k]);
    }
}

void backward(const Tile &t) {
    if constexpr (Formula::parameters > 0)
        if (t.parameter_gradient) parameter_tile<Formula::parameters>(t);
    if constexpr (Formula::query_fields + Formula::key_fields > 0)
        if (t.query_field_gradient || t.key_field_gradient) return t.plain ? backward_tile<true, true>(t) : backward_tile<false, true>(t);
    if (t.plain) backward_tile<true, false>(t);
    else backward_tile<false, false>(t);
}

}  // namespace
