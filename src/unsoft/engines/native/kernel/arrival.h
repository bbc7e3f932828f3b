// The factor M of a set of points (A = Z + eps, M A M^T = 1), and the gradient of the weights y_i M_ii that points have when
// they arrive. One system at a time on each thread; the matrix itself exists for as long as it is factorised only.
#pragma once
#include "factor.h"
#include "gaussian.h"

// m: (systems, points, ld). Returns the smallest number of rows done; see inverse_factor.
static int64_t arrival_factors(const Gaussian &g, real eps, real *m, long ld) {
    std::atomic<int64_t> done{g.points};
    const long n = long(g.points);
    share(int(g.threads), g.systems, [&](auto next) {
        Buffer<real> a(n * n), z(TILE);
        for (int64_t s; (s = next()) < g.systems;) {
            Laid points(g, s);
            for (long row = 0; row < g.blocks(); row++)
                for (long column = 0; column <= row; column++) {
                    points.tile(g, row, column, z);
                    const long high = std::min<long>(SIDE, n - row * SIDE), wide = std::min<long>(SIDE, n - column * SIDE);
                    for (long r = 0; r < high; r++) std::copy_n(z + r * SIDE, wide, a + (row * SIDE + r) * n + column * SIDE);
                }
            for (long p = 0; p < n; p++) a[p * n + p] = 1 + eps;
            int64_t rows = inverse_factor(n, a, m + s * n * ld, ld);
            for (int64_t least = done; rows < least && !done.compare_exchange_weak(least, rows);) {}
        }
    });
    return done;
}

// The gradient of sum_i slope_i y_i M_ii with respect to the points. With T_i = slope_i M_ii sum of y_r M_r over r <= i, the
// gradient of the matrix is -M^T T, of which a tile needs the rows from its own on only.
static void arrival_gradient(const Gaussian &g, const real *m, long ld, const real *y, const real *slope, real *gradient) {
    const int width = g.padded_width();
    const long n = long(g.points), padded = g.padded();
    share(int(g.threads), g.systems, [&](auto next) {
        Buffer<real> table(padded * ld), factor(padded * ld), rows(padded * width), sums(padded * width), totals(padded), z(TILE), w(TILE), ones(SIDE);
        std::fill_n(ones.data, SIDE, real(1));
        for (int64_t s; (s = next()) < g.systems;) {
            Laid points(g, s);
            std::copy_n(m + s * n * ld, n * ld, factor.data);
            std::fill_n(factor + n * ld, (padded - n) * ld, real(0));
            std::fill_n(table.data, padded * ld, real(0));
            std::fill_n(rows.data, padded * width, real(0));
            std::fill_n(sums.data, padded * width, real(0));
            std::fill_n(totals.data, padded, real(0));
            for (long p = 0; p < n; p++) std::copy_n(g.x + (s * n + p) * g.width, g.width, rows + p * width);
            Buffer<real> running(ld);
            std::fill_n(running.data, ld, real(0));
            for (long i = 0; i < n; i++) {
                const real factor_i = y[s * n + i], slope_i = slope[s * n + i] * factor[i * ld + i];
                for (long c = 0; c < padded; c += VL) {
                    V sum = load(running + c) + load(factor + i * ld + c) * factor_i;
                    store(running + c, sum);
                    store(table + i * ld + c, sum * slope_i);
                }
            }
            for (long row = 0; row < g.blocks(); row++)
                for (long column = 0; column <= row; column++) {
                    std::fill_n(w.data, TILE, real(0));
                    const int depth = int(padded - row * SIDE);
                    const real *m_row = factor + row * SIDE * ld, *t_row = table + row * SIDE * ld;
                    accumulate<true>(SIDE, SIDE, depth, m_row + row * SIDE, ld, t_row + column * SIDE, ld, w, SIDE);
                    accumulate<true>(SIDE, SIDE, depth, t_row + row * SIDE, ld, m_row + column * SIDE, ld, w, SIDE);
                    points.tile(g, row, column, z);
                    for (int e = 0; e < TILE; e += VL) store(w + e, load(w + e) * load(z + e));
                    tile_pull(w, row, column, width, rows, ones, sums, totals);
                }
            for (long p = 0; p < n; p++)
                for (int k = 0; k < g.width; k++)
                    gradient[(s * n + p) * g.width + k] = 2 * (totals[p] * rows[p * width + k] - sums[p * width + k]);
        }
    });
}
