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
    int64_t threads, systems, width, centres, capacity, ld;  // ld: between rows of M, a multiple of VL, at least the capacity
    real *x;     // (systems, capacity, width)
    real *seen;  // (systems, capacity): 1 or 0
    real *near;  // (systems, capacity, centres)
    real *m;     // (systems, capacity, ld), 0 right of the diagonal
    real *y;     // (systems, capacity)
    const real *centre, *alpha, *explained, *level, *middle;  // what is remembered; see centres.py. Null if centres is 0
};

static real squared_distance(long n, const real *a, const real *b) {
    V sum[2] = {};
    long k = 0;
    for (; k + 2 * VL <= n; k += 2 * VL)
        for (int v = 0; v < 2; v++) {
            V difference = load(a + k + v * VL) - load(b + k + v * VL);
            sum[v] += difference * difference;
        }
    real tail = 0;
    for (; k < n; k++) tail += (a[k] - b[k]) * (a[k] - b[k]);
    return horizontal_sum(sum[0] + sum[1]) + tail;
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

static void add_multiple(long n, real factor, const real *x, real *y) {
    long k = 0;
    for (; k + VL <= n; k += VL) store(y + k, load(y + k) + load(x + k) * factor);
    for (; k < n; k++) y[k] += factor * x[k];
}

// exp(-distance), of n numbers; room for whole registers.
static void exponentials(long n, real *x) {
    for (long k = 0; k < n; k += VL) store(x + k, vexp(-load(x + k)));
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
    const long width = long(w.width), centres = long(w.centres), above = (n + VL) / VL * VL;
    real *points = w.x + s * w.capacity * width, *seen = w.seen + s * w.capacity, *m = w.m + s * w.capacity * w.ld;
    real *y = w.y + s * w.capacity, *near = w.near + (s * w.capacity + n) * centres;
    real *a = room, *c = a + w.ld, *sum = c + w.ld, *weighed = sum + w.ld, *similar = weighed + centres + VL;
    for (long k = 0; present && k < width; k++) present = std::isfinite(x[k]);
    for (long k = 0; k < width; k++) points[n * width + k] = present ? x[k] : real(0);
    seen[n] = present;
    std::fill_n(a, above, real(0));
    std::fill_n(sum, above, real(0));
    std::fill_n(near, centres, real(0));
    real pivot = 1 + eps, surprise = present;
    if (present) {
        for (long j = 0; j < n; j++) a[j] = squared_distance(width, x, points + j * width);
        exponentials(n, a);
        for (long j = 0; j < n; j++) a[j] *= seen[j];
        std::fill(a + n, a + above, real(0));
        if (centres) {
            const real *centre = w.centre + s * centres * width, *explained = w.explained + s * centres * centres;
            for (long j = 0; j < centres; j++) similar[j] = squared_distance(width, x, centre + j * width);
            std::fill_n(similar + centres, VL, real(0));
            exponentials(centres, similar);
            std::copy_n(similar, centres, near);
            std::fill_n(weighed, centres, real(0));
            for (long j = 0; j < centres; j++)
                if (near[j] != 0) add_multiple(centres, near[j], explained + j * centres, weighed);
            for (long j = 0; j < n; j++) a[j] -= dot(centres, weighed, w.near + (s * w.capacity + j) * centres);
            pivot -= dot(centres, weighed, near);
            surprise -= dot(centres, near, w.alpha + s * centres);
            surprise -= w.level[s] * std::exp(-squared_distance(width, x, w.middle + s * width));
        }
        long r = 0;
        for (; r + 4 <= n; r += 4) through_rows<4>((r + 4 + VL - 1) / VL * VL, m + r * w.ld, w.ld, a, c + r, sum);
        for (; r < n; r++) through_rows<1>((r + VL) / VL * VL, m + r * w.ld, w.ld, a, c + r, sum);
        pivot -= dot(n, c, c);
        surprise -= dot(n, c, y);
    }
    if (!(pivot > 0)) return false;
    const real scale = 1 / std::sqrt(pivot);
    for (long k = 0; k < n; k++) m[n * w.ld + k] = -sum[k] * scale;
    m[n * w.ld + n] = scale;
    y[n] = surprise * scale;
    *weight = y[n] * scale;
    return true;
}

// Adds `rows` points (systems, rows, width) to a window that holds `length`; present: (systems, rows) or null. Returns how many rows
// could be done in all systems.
static int64_t window_add(const Window &w, int64_t length, int64_t rows, real eps, const real *x, const bool *present, real *weights) {
    std::atomic<int64_t> done{rows};
    const int64_t end = length + rows;
    const int64_t work = w.systems * rows * (end * (end + w.width + w.centres) + w.centres * (w.centres + w.width));
    const bool small = work < (1 << 19);  // handing it to other threads would cost more than it saves
    share(small ? 1 : int(w.threads), w.systems, [&](auto next) {
        Buffer<real> room(3 * w.ld + 2 * (w.centres + VL) + VL);
        for (int64_t s; (s = next()) < w.systems;)
            for (int64_t r = 0; r < rows; r++)
                if (!window_point(w, s, long(length + r), eps, x + (s * rows + r) * w.width, !present || present[s * rows + r], room,
                                  weights + s * rows + r)) {
                    for (int64_t least = done; r < least && !done.compare_exchange_weak(least, r);) {}
                    break;
                }
    });
    return done;
}
