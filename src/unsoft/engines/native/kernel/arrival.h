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

// Strips of 64 columns of a lower triangular matrix, each from its diagonal tile on and in one piece of memory.
struct Strips {
    const long padded;
    Buffer<real> data;
    explicit Strips(long padded) : padded(padded), data(padded * (padded + SIDE) / 2) {}
    real *at(long strip, long row) const {  // row: of the whole matrix
        return data + (strip * padded - SIDE * (strip * (strip - 1) / 2)) * SIDE + (row - strip * SIDE) * SIDE;
    }
};

// w (64, 64) = A^T B for A and B (depth, 64), a piece at a time that stays in the nearest cache.
static void tile_of_strips(long depth, const real *a, const real *b, real *w) {
    constexpr int NV = REGISTERS == 32 ? 4 : 2, WIDE = NV * VL < SIDE ? NV * VL : SIDE;
    static_assert(SIDE % WIDE == 0);
    std::fill_n(w, TILE, real(0));
    for (long k = 0; k < depth; k += SIDE)  // depth is a multiple of 64
        for (int x = 0; x < SIDE; x += WIDE) {
            const real *left = a + k * SIDE, *right = b + k * SIDE + x;
            rows<6, WIDE / VL, true, true>(60, SIDE, left, SIDE, right, SIDE, w + x, SIDE);
            block<4, WIDE / VL, true, true>(SIDE, left + 60, SIDE, right, SIDE, w + 60 * SIDE + x, SIDE);
        }
}

// The gradient of sum_i slope_i y_i M_ii with respect to the points. With d_i = slope_i M_ii that of the matrix is
//
//     -sum of d_i y_j (m_i m_j^T + m_j m_i^T) / 2 over j <= i  =  -M^T V / 2        V_i = d_i sum of y_j m_j over j <= i
//                                                                                      + y_i sum of d_j m_j over j >= i
//
// and a tile of it needs the rows of M and V from its own on only.
static void arrival_gradient(const Gaussian &g, const real *m, long ld, const real *y, const real *slope, real *gradient) {
    const int width = g.padded_width();
    const long n = long(g.points), padded = g.padded();
    share(int(g.threads), g.systems, [&](auto next) {
        Strips factor(padded), table(padded);
        Buffer<real> rows(padded * width), sums(padded * width), totals(padded), z(TILE), w(TILE), ones(SIDE);
        std::fill_n(ones.data, SIDE, real(1));
        for (int64_t s; (s = next()) < g.systems;) {
            Laid points(g, s);
            std::fill_n(rows.data, padded * width, real(0));
            std::fill_n(sums.data, padded * width, real(0));
            std::fill_n(totals.data, padded, real(0));
            for (long p = 0; p < n; p++) std::copy_n(g.x + (s * n + p) * g.width, g.width, rows + p * width);
            const real *matrix = m + s * n * ld, *ys = y + s * n, *slopes = slope + s * n;
            for (long strip = 0; strip < g.blocks(); strip++) {
                const long first = strip * SIDE;
                for (long i = first; i < n; i++) std::copy_n(matrix + i * ld + first, SIDE, factor.at(strip, i));
                std::fill(factor.at(strip, n), factor.at(strip, padded), real(0));
                std::fill(table.at(strip, n), table.at(strip, padded), real(0));
                for (int c = 0; c < SIDE; c += VL) {
                    V later = {}, earlier = {};
                    for (long i = n - 1; i >= first; i--) {
                        later += load(factor.at(strip, i) + c) * (slopes[i] * matrix[i * ld + i]);
                        store(table.at(strip, i) + c, later * ys[i]);
                    }
                    for (long i = first; i < n; i++) {
                        real *to = table.at(strip, i) + c;
                        earlier += load(factor.at(strip, i) + c) * ys[i];
                        store(to, load(to) + earlier * (slopes[i] * matrix[i * ld + i]));
                    }
                }
            }
            for (long row = 0; row < g.blocks(); row++)
                for (long column = 0; column <= row; column++) {
                    tile_of_strips(padded - row * SIDE, factor.at(row, row * SIDE), table.at(column, row * SIDE), w);
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
