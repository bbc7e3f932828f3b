// The factor M of a set of points (A = Z + eps, M A M^T = 1), the weights y_i M_ii that points have when they arrive (y = M b), and
// their gradient. One system at a time on each thread; M and Z are kept for the gradient, the lower half of each.
#pragma once
#include "factor.h"
#include "matrix.h"

// Strips of 64 columns of a lower triangular matrix, each from its diagonal tile on and in one piece of memory.
struct Strips {
    const long padded;
    real *data;
    static size_t size(long padded) { return size_t(padded) * (padded + SIDE) / 2; }
    real *at(long strip, long row) const {  // row: of the whole matrix
        return data + (strip * padded - SIDE * (strip * (strip - 1) / 2)) * SIDE + (row - strip * SIDE) * SIDE;
    }
    real diagonal(long i) const { return at(i / SIDE, i)[i % SIDE]; }
};

// factor: (systems, strips); b, y and weights: (systems, points). Z goes to the matrix of g. Returns the smallest number of rows done; see
// inverse_factor.
static int64_t arrival_factors(const Gaussian &g, real eps, const real *b, real *factor, real *y, real *weights) {
    std::atomic<int64_t> done{g.points};
    const long n = long(g.points), padded = g.padded(), ld = padded + 16;  // never a power of two apart, which caches do not like
    prefer_large_pages(factor, g.systems * Strips::size(padded) * sizeof(real));
    prefer_large_pages(g.matrix, g.systems * g.tiles() * TILE * sizeof(real));
    share(int(g.threads), g.systems, [&](auto next) {
        Buffer<real> a(n * n), m(n * ld), right(padded);
        const Workspace space(n, ld);
        for (int64_t s; (s = next()) < g.systems;) {
            Laid points(g, s);
            for (long row = 0; row < g.blocks(); row++)
                for (long column = 0; column <= row; column++) {
                    real *z = g.tile(s, row, column);
                    points.tile(g, row, column, z);
                    const long high = std::min<long>(SIDE, n - row * SIDE), wide = std::min<long>(SIDE, n - column * SIDE);
                    for (long r = 0; r < high; r++) std::copy_n(z + r * SIDE, wide, a + (row * SIDE + r) * n + column * SIDE);
                }
            for (long p = 0; p < n; p++) a[p * n + p] = 1 + eps;
            int64_t rows = inverse_factor(n, a, m, ld, space);
            for (int64_t least = done; rows < least && !done.compare_exchange_weak(least, rows);) {}
            pad_vector(b + s * n, n, padded, right);
            Strips strips{padded, factor + s * Strips::size(padded)};
            for (long strip = 0; strip < g.blocks(); strip++) {
                for (long i = strip * SIDE; i < n; i++) std::copy_n(m + i * ld + strip * SIDE, SIDE, strips.at(strip, i));
                std::fill(strips.at(strip, n), strips.at(strip, padded), real(0));
            }
            for (long i = 0; i < n; i++) {
                V sum = {};
                for (long k = 0; k <= i; k += VL) sum += load(m + i * ld + k) * load(right + k);
                y[s * n + i] = horizontal_sum(sum);
                weights[s * n + i] = y[s * n + i] * m[i * ld + i];
            }
        }
    });
    return done;
}

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
static void arrival_gradient(const Gaussian &g, real *m, const real *y, const real *slope, real *gradient) {
    const int width = g.padded_width();
    const long n = long(g.points), padded = g.padded();
    share(int(g.threads), g.systems, [&](auto next) {
        Buffer<real> space(Strips::size(padded)), rows(padded * width), sums(padded * width), totals(padded), w(TILE), ones(SIDE), d(n);
        const Strips table{padded, space};
        std::fill_n(ones.data, SIDE, real(1));
        for (int64_t s; (s = next()) < g.systems;) {
            const Strips factor{padded, m + s * Strips::size(padded)};
            std::fill_n(rows.data, padded * width, real(0));
            std::fill_n(sums.data, padded * width, real(0));
            std::fill_n(totals.data, padded, real(0));
            for (long p = 0; p < n; p++) std::copy_n(g.x + (s * n + p) * g.width, g.width, rows + p * width);
            const real *ys = y + s * n;
            for (long i = 0; i < n; i++) d[i] = slope[s * n + i] * factor.diagonal(i);
            for (long strip = 0; strip < g.blocks(); strip++) {
                const long first = strip * SIDE;
                std::fill(table.at(strip, n), table.at(strip, padded), real(0));
                for (int c = 0; c < SIDE; c += VL) {
                    V later = {}, earlier = {};
                    for (long i = n - 1; i >= first; i--) {
                        later += load(factor.at(strip, i) + c) * d[i];
                        store(table.at(strip, i) + c, later * ys[i]);
                    }
                    for (long i = first; i < n; i++) {
                        real *to = table.at(strip, i) + c;
                        earlier += load(factor.at(strip, i) + c) * ys[i];
                        store(to, load(to) + earlier * d[i]);
                    }
                }
            }
            for (long row = 0; row < g.blocks(); row++)
                for (long column = 0; column <= row; column++) {
                    tile_of_strips(padded - row * SIDE, factor.at(row, row * SIDE), table.at(column, row * SIDE), w);
                    const real *z = g.tile(s, row, column);
                    for (int e = 0; e < TILE; e += VL) store(w + e, load(w + e) * load(z + e));
                    tile_pull(w, row, column, width, rows, ones, sums, totals);
                }
            for (long p = 0; p < n; p++)
                for (int k = 0; k < g.width; k++)
                    gradient[(s * n + p) * g.width + k] = 2 * (totals[p] * rows[p * width + k] - sums[p * width + k]);
        }
    });
}
