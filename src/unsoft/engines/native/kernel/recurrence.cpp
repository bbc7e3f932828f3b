// Linear attention token by token: the state S_f = sum_j d^(t-j) h(k_j)_f [v_j, 1] of every head is updated by a key and read by
// the queries of its group. One pass over the state for each token, no gradient: this is what decoding does.
#include "simd.h"
#include "threads.h"
#include <algorithm>

enum Map : int64_t { IDENTITY, RELU, ELU1, COSINE };

struct Recurrence {
    int64_t threads, batch, heads, key_heads, state_heads, tokens, width, values, features;
    int64_t map;          // from a query or key to its features
    int64_t normalise;    // divide by the sum of the weights?
    int64_t logarithmic;  // features are logarithms, and a state row ends with the largest one so far
    int64_t first, limit; // position of the first token, and the one at which the cosine turns back
    const real *q, *k, *v, *decay;  // contiguous (B, heads, tokens, width); decay (state heads) or null
    const real *before;             // the state (B, state heads, features, values + 1 or 2), or null for an empty one
    real *after, *out;
    double query_scale, key_scale, turn, vanishing;
};

static bool all_finite(const real *x, int64_t n) {
    real sum = 0;  // x - x is 0, or NaN for what is not finite
    for (int64_t t = 0; t < n; t++) sum += x[t] - x[t];
    return sum == 0;
}

// `row`: of a query, where a factor of all features cancels.
static void features_of(const Recurrence &r, const real *x, real scale, int64_t position, bool row, real *f) {
    const int64_t n = r.width;
    if (r.map == RELU) {
        for (int64_t c = 0; c < n; c++) f[c] = x[c] > 0 ? x[c] : 0;
    } else if (r.map == ELU1) {
        real below = row ? std::min(*std::max_element(x, x + n), real(0)) : 0;  // exp of all that is negative could vanish
        for (int64_t c = 0; c < n; c++) f[c] = x[c] > 0 ? x[c] + 1 : std::exp(x[c] - below);
    } else if (r.map == COSINE) {
        const int64_t folded = r.limit - std::abs(position % (2 * r.limit) - r.limit);
        const double angle = double(folded) * r.turn;
        const real cosine = real(std::cos(angle)), sine = real(std::sin(angle));
        for (int64_t c = 0; c < n; c++) {
            const real positive = x[c] > 0 ? x[c] : 0;
            f[c] = positive * cosine;
            f[n + c] = positive * sine;
        }
    } else {
        for (int64_t c = 0; c < n; c++) f[c] = x[c] * scale;
    }
}

// y += a row, and row = keep * row + add * value: the inner loop of everything here.
UNSOFT_INLINE void update(const real *__restrict old, real *__restrict row, const real *__restrict value, int64_t n, real keep, real add) {
#pragma omp simd
    for (int64_t c = 0; c < n; c++) row[c] = keep * old[c] + add * value[c];
}
UNSOFT_INLINE void accumulate(const real *__restrict row, real *__restrict y, int64_t n, real factor) {
#pragma omp simd
    for (int64_t c = 0; c < n; c++) y[c] += factor * row[c];
}

struct Head {
    const Recurrence &r;
    const int64_t columns, stride;
    Buffer<real> key, query, value, y;
    explicit Head(const Recurrence &r)
        : r(r), columns(r.values + 1), stride(columns + (r.logarithmic ? 1 : 0)), key(r.features), query(r.features),
          value(columns), y(columns) {}

    void run(int64_t b, int64_t h) {
        const int64_t group = r.heads / r.state_heads, source = h * r.key_heads / r.state_heads;
        const int64_t size = r.features * stride;
        real *state = r.after + (b * r.state_heads + h) * size;
        const real *old = r.before ? r.before + (b * r.state_heads + h) * size : state;
        if (!r.before) {
            std::fill(state, state + size, real(0));
            if (r.logarithmic)
                for (int64_t f = 0; f < r.features; f++) state[f * stride + columns] = -std::numeric_limits<real>::infinity();
        }
        const real keep = r.decay ? r.decay[h] : real(1);
        for (int64_t t = 0; t < r.tokens; t++, old = state) {
            const int64_t token = (b * r.key_heads + source) * r.tokens + t;
            features_of(r, r.k + token * r.width, real(r.key_scale), r.first + t, false, key);
            std::copy(r.v + token * r.values, r.v + (token + 1) * r.values, value.data);
            value[r.values] = 1;
            for (int64_t g = 0; g < group; g++) {
                const int64_t at = (b * r.heads + h * group + g) * r.tokens + t;
                features_of(r, r.q + at * r.width, real(r.query_scale), r.first + t, true, query);
                if (!r.logarithmic && r.normalise) bring_to_one();
                std::fill(y.data, y.data + columns, real(0));
                if (g == 0 && !r.logarithmic) {  // update and read in one pass
                    for (int64_t f = 0; f < r.features; f++) {
                        update(old + f * stride, state + f * stride, value, columns, keep, key[f]);
                        accumulate(state + f * stride, y, columns, query[f]);
                    }
                } else {
                    if (g == 0) update_logarithmic(old, state);
                    if (r.logarithmic) exponentials(state);
                    for (int64_t f = 0; f < r.features; f++) accumulate(state + f * stride, y, columns, query[f]);
                }
                finish(r.out + at * r.values);
            }
        }
    }

    void bring_to_one() {  // the largest feature of a query; it cancels
        real largest = 0;
        for (int64_t f = 0; f < r.features; f++) largest = std::max(largest, std::abs(query[f]));
        if (largest < r.vanishing) return;
        for (int64_t f = 0; f < r.features; f++) query[f] /= largest;
    }

    void update_logarithmic(const real *old, real *state) {
        for (int64_t f = 0; f < r.features; f++, old += stride, state += stride) {
            const real largest = old[columns] > key[f] ? old[columns] : key[f];  // NaN in the state stays in its sums
            update(old, state, value, columns, std::exp(old[columns] - largest), std::exp(key[f] - largest));
            state[columns] = largest;
        }
    }

    void exponentials(const real *state) {  // of the query, beside what the state has taken out
        real largest = -std::numeric_limits<real>::infinity();
        for (int64_t f = 0; f < r.features; f++) {
            query[f] += state[f * stride + columns];
            largest = std::max(largest, query[f]);
        }
        for (int64_t f = 0; f < r.features; f++) query[f] = std::exp(query[f] - largest);
    }

    void finish(real *out) {
        const real total = y[r.values];
        if (!r.normalise) {
            std::copy(y.data, y.data + r.values, out);
        } else if (std::abs(total) < r.vanishing) {
            std::fill(out, out + r.values, real(0));
        } else {
            for (int64_t c = 0; c < r.values; c++) out[c] = y[c] / total;
        }
    }
};

// 0; 1 if something is not finite, and nothing was done; 2 if memory ran out.
extern "C" __attribute__((visibility("default"))) int unsoft_recurrence(const Recurrence *call) {
    const Recurrence &r = *call;
    const int64_t rows = r.batch * r.tokens;
    if (!all_finite(r.q, rows * r.heads * r.width) || !all_finite(r.k, rows * r.key_heads * r.width) ||
        !all_finite(r.v, rows * r.key_heads * r.values))
        return 1;
    const int64_t items = r.batch * r.state_heads, work = items * r.tokens * r.features * r.values;
    try {
        share(work < (1 << 20) ? 1 : int(r.threads), items, [&](auto &next) {
            Head head(r);
            for (int64_t item = next(); item < items; item = next()) head.run(item / r.state_heads, item % r.state_heads);
        });
    } catch (const std::bad_alloc &) {
        return 2;
    }
    return 0;
}
