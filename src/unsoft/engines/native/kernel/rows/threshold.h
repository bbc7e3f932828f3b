// A rule with a threshold t per row, solved so that the masses of the row sum to 1: included after the generated
// `struct Rule`, which offers
//   constant   parameters
//   Row row(V m, V n, V i, V t, const real *params)            what depends on the query and its threshold only
//   void mass(V s, const Row &, V &mass, V &mass_t)            and its derivative by t
//   void weight(V s, const Row &, V &weight)
//   void slope(V s, const Row &, V &weight, V &weight_s, V &weight_t, V &mass_s, V &mass_t)
//   void parameter_slopes(V s, const Row &, V *weight_p, V *mass_p)
//   V low(V n, V i, const real *params), high(...)             between them lies t
//   void straight(V z, V n, V i, const real *params, V &y, V &slope)    of the total mass: straighter in t than it is
#pragma once
#include "panel.h"

namespace {

constexpr int MOST_STEPS = 100;

UNSOFT_INLINE I seen(V s) { return s > splat(HIDDEN); }
UNSOFT_INLINE V where_seen(V s, V x) { return vselect(seen(s), x, V{}); }

void begin(const Panel &x) {
    for (int lane = 0; lane < x.lanes; lane++) x.peak[lane] = HIDDEN, x.threshold[lane] = 0;
}

template <int N> void scan_registers(const Panel &x, long from, long to, int first) {
    V m[N];
    for (int r = 0; r < N; r++) m[r] = load(x.peak + first + r * VL);
    for (long key = from; key < to; key++)
        for (int r = 0; r < N; r++) m[r] = larger(m[r], load(x.s + key * x.lanes + first + r * VL));
    for (int r = 0; r < N; r++) store(x.peak + first + r * VL, m[r]);
}

Rule::Row row_of(const Panel &x, int lane, V t) {
    V m = load(x.peak + lane);
    m = vselect(seen(m), m, V{});
    return Rule::row(m, load(x.count + lane), load(x.position + lane), t, x.parameters);
}

template <int N> void total_mass(const Panel &x, int first, const V *t, V *total, V *slope) {
    Rule::Row rows[N];
    V f[N] = {}, d[N] = {};
    for (int r = 0; r < N; r++) rows[r] = row_of(x, first + r * VL, t[r]);
    for (long key = 0; key < x.keys; key++)
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
            V s = load(x.s + key * x.lanes + first + r * VL), mass, mass_t;
            Rule::mass(s, rows[r], mass, mass_t);
            f[r] += where_seen(s, mass), d[r] += where_seen(s, mass_t);
        }
    for (int r = 0; r < N; r++) total[r] = f[r], slope[r] = d[r];
}

// Newton's method on a straightened total, inside a bracket that shrinks: where a step would leave it, it is halved. A row
// that has settled stays as it is: what other rows of the panel need must not change it.
template <int N> void solve_registers(const Panel &x, int first) {
    const V eps = splat(std::numeric_limits<real>::epsilon());
    V low[N], high[N], t[N];
    I done[N];
    for (int r = 0; r < N; r++) {
        V n = load(x.count + first + r * VL), i = load(x.position + first + r * VL);
        low[r] = t[r] = Rule::low(n, i, x.parameters), high[r] = Rule::high(n, i, x.parameters);
        done[r] = load(x.peak + first + r * VL) <= splat(HIDDEN);
    }
    for (int step = 0; step < MOST_STEPS; step++) {
        V total[N], slope[N];
        total_mass<N>(x, first, t, total, slope);
        bool settled = true;
        for (int r = 0; r < N; r++) {
            const int lane = first + r * VL;
            V n = load(x.count + lane), i = load(x.position + lane), y, by_total, one, unused;
            Rule::straight(total[r], n, i, x.parameters, y, by_total);
            Rule::straight(splat(1), n, i, x.parameters, one, unused);
            I above = total[r] >= splat(1);  // masses fall with t
            low[r] = vselect(above, t[r], low[r]), high[r] = vselect(above, high[r], t[r]);
            V next = t[r] - (y - one) / (by_total * slope[r]);
            I inside = (next >= low[r]) & (next <= high[r]);
            next = vselect(inside, next, (low[r] + high[r]) * real(0.5));
            V moved = vabs(next - t[r]), allowed = real(4) * eps * (real(1) + vabs(t[r]));
            t[r] = vselect(done[r], t[r], next);
            done[r] |= ~(moved > allowed);
            for (int k = 0; k < VL; k++) settled &= done[r][k] != 0;
        }
        if (settled) break;
    }
    for (int r = 0; r < N; r++) store(x.threshold + first + r * VL, t[r]);
}

template <int N> void weights_registers(const Panel &x, int first) {
    Rule::Row rows[N];
    for (int r = 0; r < N; r++) rows[r] = row_of(x, first + r * VL, load(x.threshold + first + r * VL));
    for (long key = 0; key < x.keys; key++)
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
            real *at = x.s + key * x.lanes + first + r * VL;
            V s = load(at), weight;
            Rule::weight(s, rows[r], weight);
            store(at, where_seen(s, weight));
        }
}


bool scan(const Panel &x, long from, long to) {
    if (x.lanes == 3 * VL) scan_registers<3>(x, from, to, 0);
    else if (x.lanes == 2 * VL) scan_registers<2>(x, from, to, 0);
    else scan_registers<1>(x, from, to, 0);
    return true;
}
void solve(const Panel &x) {
    if (x.lanes == 3 * VL) solve_registers<3>(x, 0);
    else if (x.lanes == 2 * VL) solve_registers<2>(x, 0);
    else solve_registers<1>(x, 0);
}
void weights(const Panel &x) {
    if (x.lanes == 3 * VL) weights_registers<3>(x, 0);
    else if (x.lanes == 2 * VL) weights_registers<2>(x, 0);
    else weights_registers<1>(x, 0);
}

void active(const Panel &x, uint8_t *result) {
    for (long key = 0; key < x.keys; key++) result[key] = 0;
    for (int lane = 0; lane < x.lanes; lane += VL) {
        const Rule::Row row = row_of(x, lane, load(x.threshold + lane));
        for (long key = 0; key < x.keys; key++) {
            V s = load(x.s + key * x.lanes + lane), weight, weight_s, weight_t, mass_s, mass_t;
            Rule::slope(s, row, weight, weight_s, weight_t, mass_s, mass_t);
            I some = seen(s) & ((weight != V{}) | (mass_s != V{}));
            word any = 0;
            for (int k = 0; k < VL; k++) any |= some[k];
            result[key] |= any != 0;
        }
    }
}

// t depends on every logit: dt / ds_j = -mass_s(j) / sum mass_t. A row gets d loss / dt = sum g weight_t through it.
void slopes(const Panel &x) {
    for (int lane = 0; lane < x.lanes; lane += VL) {
        const Rule::Row row = row_of(x, lane, load(x.threshold + lane));
        V by_threshold = {}, total = {};
        V own[Rule::parameters + 1] = {}, moving[Rule::parameters + 1] = {};
        for (long key = 0; key < x.keys; key++) {
            const long at = key * x.lanes + lane;
            V s = load(x.s + at), g = load(x.p + at), weight, weight_s, weight_t, mass_s, mass_t;
            Rule::slope(s, row, weight, weight_s, weight_t, mass_s, mass_t);
            by_threshold += where_seen(s, g * weight_t), total += where_seen(s, mass_t);
            if constexpr (Rule::parameters > 0)
                if (x.parameter_gradient) {
                    V weight_p[Rule::parameters], mass_p[Rule::parameters];
                    Rule::parameter_slopes(s, row, weight_p, mass_p);
                    for (int k = 0; k < Rule::parameters; k++)
                        own[k] += where_seen(s, g * weight_p[k]), moving[k] += where_seen(s, mass_p[k]);
                }
        }
        const V pull = vselect(total == V{}, V{}, -by_threshold / total);
        for (int k = 0; k < Rule::parameters; k++)
            if (x.parameter_gradient) x.parameter_gradient[k] += horizontal_sum(own[k] + pull * moving[k]);
        for (long key = 0; key < x.keys; key++) {
            const long at = key * x.lanes + lane;
            V s = load(x.s + at), g = load(x.p + at), weight, weight_s, weight_t, mass_s, mass_t;
            Rule::slope(s, row, weight, weight_s, weight_t, mass_s, mass_t);
            store(x.s + at, where_seen(s, weight));
            store(x.p + at, where_seen(s, g * weight_s + pull * mass_s));
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const RowRule *unsoft_mechanism() {
    static const RowRule table = {{Rule::parameters}, begin, scan, solve, weights, active, slopes};
    return &table;
}
