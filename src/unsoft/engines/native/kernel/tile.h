// A formula on a tile: included after the generated `struct Formula`, which offers
//   constants  has_peak, has_mass, strength, operand, parameters, query_fields, key_fields, mass_degree
//   struct Key { V j; V field[]; }                       what belongs to the key: its position and its fields
//   Row row(V m, V n, V i, const V *fields, const real *params)    what depends on the query only, computed once a row
//   V peak(V s, const Row &, const Key &, V b)           b: the float mask, read only if it is an operand of the formula
//   void value(V s, const Row &, const Key &, V b, V &weight, V &mass)
//   void slope(V s, const Row &, const Key &, V b, V &weight, V &dweight, V &mass, V &dmass)    derivatives by the logit
//   void field_slopes(V s, const Row &, const Key &, V b, FieldSlopes &)       the same, and by the fields of query and key
//   void bias_slopes(V s, const Row &, const Key &, V b, V &dweight, V &dmass)                  derivatives by such a mask
//   void parameter_slopes(V s, const Row &, const Key &, V b, V *dweight, V *dmass)             derivatives by each parameter
//   V offset(m, n, i, fields, params), norm(z, ...), norm_slope(z, ...)
//   void row_parameter_slopes(V z, V m, V n, V i, const V *fields, const real *params, V *doffset, V *dnorm)
//   void row_field_slopes(the same)                      derivatives by the fields of the query
// Nothing here knows which formula it is.
#pragma once
#include <type_traits>
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

struct Value {
    V weight, mass;
    void scale(V a, V b) { weight *= a, mass *= b; }
};
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

template <bool ROWS, bool PLAIN> bool forward_tile(const Tile &t) {
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
        V total = {};
        for (int key = 0; key < t.keys; key += step) {
            size_t at = At::at(t, query, key);
            V s = load(t.s + at), index = At::key_index(key);
            const Formula::Key j = At::key(t, query, key);
            Value y;
            if (PLAIN) {
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
        if (ROWS) t.mass[query] += horizontal_sum(total);
        else store(t.mass + query, load(t.mass + query) + total);
    }
    return rescaled;
}
template <bool ROWS> bool forward(const Tile &t) {
    return t.plain ? forward_tile<ROWS, true>(t) : forward_tile<ROWS, false>(t);
}

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

void finish(const Tile &t, real *total, real *inverse) {
    for (int query = 0; query < t.queries; query += VL) {
        const Lanes x = Layout<false>::lanes(t, query);
        V m = load(t.peak + query), z = load(t.mass + query);
        I dead = Formula::has_peak ? m == splat(NOTHING_SEEN) : (I)(V{} != V{});
        m = vselect(dead, V{}, m);
        V norm = splat(1);
        if (Formula::has_mass) {
            z += Formula::offset(m, x.count, x.position, x.field, t.parameters);
            norm = Formula::norm(z, m, x.count, x.position, x.field, t.parameters);
        } else {
            z = splat(1);
        }
        dead |= vanishes(norm);
        store(t.peak + query, m);
        store(total + query, z);
        store(inverse + query, vselect(dead, V{}, real(1) / norm));
    }
}

void prepare(const Tile &t, const real *total, const real *delta, real *inverse, real *slope) {
    for (int query = 0; query < t.queries; query += VL) {
        V one = splat(1), zero = {};
        if (!Formula::has_mass) {
            store(inverse + query, one), store(slope + query, zero);
            continue;
        }
        const Lanes x = Layout<false>::lanes(t, query);
        V m = load(t.peak + query), n = x.count, i = x.position;
        V z = load(total + query), d = load(delta + query);
        V norm = Formula::norm(z, m, x.count, x.position, x.field, t.parameters);
        I dead = vanishes(norm);
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
    static const Mechanism table = {Formula::parameters, Formula::query_fields, Formula::key_fields, Formula::has_peak, Formula::has_mass, Formula::mass_degree,
                                    forward<false>, forward<true>, backward, finish, prepare};
    return &table;
}
