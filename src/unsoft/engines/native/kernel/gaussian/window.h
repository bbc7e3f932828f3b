// The arrival weights of points that come one after the other: the factor M of their matrix grows by a row for each.
//
//     row of the matrix   a_j = exp(-|x - x_j|^2) - near Q near_j        near: similarities to the centres (there may be none)
//     c = M a        pivot = 1 + eps - near Q near - c c        new row of M = (-c M, 1) / sqrt(pivot)
//     y = (1 - what was predicted at x - c y) / sqrt(pivot)        weight = y / sqrt(pivot)
//
// A point that is masked, or that is not finite, is not there: its row is that of the identity, and its weight is 0.
#pragma once
#include <cmath>

#include "matmul.h"
#include "threads.h"

struct Window {
    int64_t systems, width, centres, capacity, ld;  // ld: a multiple of 16, at least the capacity; lanes run over points
    real *x;     // (systems, width, ld)
    real *seen;  // (systems, ld): 1 or 0
    real *near;  // (systems, centres, ld)
    real *m;     // (systems, capacity, ld), 0 right of the diagonal
    real *y;     // (systems, ld)
    // What is remembered (see centres.py), null if centres is 0; `places` is a multiple of 16, at least the number of centres.
    int64_t places;
    const real *centre;     // (systems, width, places)
    const real *alpha;      // (systems, centres)
    const real *explained;  // (systems, centres, places)
    const real *level;      // (systems,)
    const real *middle;     // (systems, width)
};

// exp(-|x - y_j|^2) for n points y (width, ld), and 0 from there to a whole register.
static void similarities(long n, long width, const real *x, const real *y, long ld, real *result) {
    constexpr int NV = 4;
    auto columns = [&](auto count, long j) {
        constexpr int N = decltype(count)::value;
        V sum[N] = {};
        for (long k = 0; k < width; k++)
#pragma GCC unroll 8
            for (int v = 0; v < N; v++) {
                V difference = load(y + k * ld + j + v * VL) - x[k];
                sum[v] += difference * difference;
            }
        for (int v = 0; v < N; v++) store(result + j + v * VL, vexp(-sum[v]));
    };
    long j = 0;
    for (; j + NV * VL <= n; j += NV * VL) columns(std::integral_constant<int, NV>(), j);
    for (; j < n; j += VL) columns(std::integral_constant<int, 1>(), j);
    std::fill(result + n, result + j, real(0));
}

static real dot(long n, const real *a, const real *b) {
    V sum[2] = {};
    long k = 0;
    for (; k + 2 * VL <= n; k += 2 * VL)
        for (int v = 0; v < 2; v++) sum[v] += load(a + k + v * VL) * load(b + k + v * VL);
    real tail = 0;
    for (; k < n; k++) tail += a[k] * b[k];
    return horizontal_sum(sum[0] + sum[1]) + tail;
}

// c_r = M_r a for R rows from r on, and sum += c_r M_r while those rows are in cache. `length` is a multiple of VL.
template <int R> UNSOFT_INLINE void through_rows(long length, const real *m, long ld, const real *a, real *c, real *sum) {
    V dots[R] = {};
    for (long k = 0; k < length; k += VL) {
        V x = load(a + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) dots[r] += load(m + r * ld + k) * x;
    }
    for (int r = 0; r < R; r++) c[r] = horizontal_sum(dots[r]);
    for (long k = 0; k < length; k += VL) {
        V x = load(sum + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) x += load(m + r * ld + k) * c[r];
        store(sum + k, x);
    }
}

// One point of one system, at place n of the window. Returns false if the matrix is not positive definite.
static bool window_point(const Window &w, int64_t s, long n, real eps, const real *x, bool present, real *room, real *weight) {
    const long width = long(w.width), centres = long(w.centres), ld = long(w.ld), places = long(w.places);
    const int upto = int((n + VL - 1) / VL * VL);
    real *points = w.x + s * width * ld, *seen = w.seen + s * ld, *m = w.m + s * w.capacity * ld, *y = w.y + s * ld;
    real *near = w.near + s * centres * ld;
    real *a = room, *c = a + ld, *sum = c + ld, *similar = sum + ld, *weighed = similar + places;
    for (long k = 0; present && k < width; k++) present = std::isfinite(x[k]);
    for (long k = 0; k < width; k++) points[k * ld + n] = present ? x[k] : real(0);
    for (long k = 0; k < centres; k++) near[k * ld + n] = 0;
    seen[n] = present;
    std::fill_n(sum, upto, real(0));
    real pivot = 1 + eps, surprise = present;
    if (present) {
        similarities(n, width, x, points, ld, a);
        for (long j = 0; j < n; j++) a[j] *= seen[j];
        if (centres) {
            similarities(centres, width, x, w.centre + s * width * places, places, similar);
            std::fill_n(weighed, places, real(0));
            accumulate<false>(1, int(places), int(centres), similar, 0, w.explained + s * centres * places, places, weighed, 0);
            pivot -= dot(centres, weighed, similar);
            surprise -= dot(centres, similar, w.alpha + s * centres);
            real distance = 0;
            for (long k = 0; k < width; k++) distance += (x[k] - w.middle[s * width + k]) * (x[k] - w.middle[s * width + k]);
            surprise -= w.level[s] * std::exp(-distance);
            for (long k = 0; k < centres; k++) near[k * ld + n] = similar[k], weighed[k] = -weighed[k];
            accumulate<false>(1, upto, int(centres), weighed, 0, near, ld, a, 0);
            std::fill(a + n, a + upto, real(0));
        }
        long r = 0;
        for (; r + 4 <= n; r += 4) through_rows<4>((r + 4 + VL - 1) / VL * VL, m + r * ld, ld, a, c + r, sum);
        for (; r < n; r++) through_rows<1>((r + VL) / VL * VL, m + r * ld, ld, a, c + r, sum);
        pivot -= dot(n, c, c);
        surprise -= dot(n, c, y);
    }
    if (!(pivot > 0)) return false;
    const real scale = 1 / std::sqrt(pivot);
    for (long k = 0; k < n; k++) m[n * ld + k] = -sum[k] * scale;
    m[n * ld + n] = scale;
    y[n] = surprise * scale;
    *weight = y[n] * scale;
    return true;
}

// Instead of weights, gates sigmoid(beta w + gamma) of keys that are still to be scaled, and values times those.
struct Gate {
    int64_t heads, value_width;
    const real *root, *beta, *gamma;  // (heads,)
    const real *value;                // (systems, rows, value_width)
    real *gated;                      // the same
};

// Adds `rows` points (systems, rows, width) to a window that holds `length`; present: (systems, rows) or null; gate: or null. Writes
// weights, or gates, (systems, rows), and returns how many rows could be done in all systems.
static int64_t window_add(int64_t threads, const Window &w, int64_t length, int64_t rows, real eps, const real *x, const bool *present, const Gate *gate,
                          real *weights) {
    std::atomic<int64_t> done{rows};
    const int64_t end = length + rows;
    const int64_t work = w.systems * rows * (end * (end + w.width + w.centres) + w.centres * (w.centres + w.width));
    const bool small = work < (1 << 17);  // handing it to other threads would cost more than it saves
    share(small ? 1 : int(threads), w.systems, [&](auto next) {
        Buffer<real> room(3 * w.ld + 2 * w.places), scaled(w.width);
        for (int64_t s; (s = next()) < w.systems;)
            for (int64_t r = 0; r < rows; r++) {
                const int64_t item = s * rows + r, head = gate ? s % gate->heads : 0;
                const real *point = x + item * w.width;
                if (gate) {
                    for (long k = 0; k < w.width; k++) scaled[k] = point[k] * gate->root[head];
                    point = scaled;
                }
                if (!window_point(w, s, long(length + r), eps, point, !present || present[item], room, weights + item)) {
                    for (int64_t least = done; r < least && !done.compare_exchange_weak(least, r);) {}
                    break;
                }
                if (!gate) continue;
                weights[item] = 1 / (1 + std::exp(-(gate->beta[head] * weights[item] + gate->gamma[head])));
                for (int64_t k = item * gate->value_width; k < (item + 1) * gate->value_width; k++)
                    gate->gated[k] = gate->value[k] * weights[item];
            }
    });
    return done;
}
