// Pivoted Cholesky of the Gaussian matrix: Z ~ F^T F, one row of F after the other, without forming Z.
#pragma once
#include "matrix.h"

// factor (systems, rank, points), pivots (systems, rank; -1 where nothing was left to explain), left (systems, points): what
// remains of the diagonal of Z. A system stops when the mean of that is at most `tolerance`.
static void pivoted_cholesky(const Gaussian &g, int64_t rank, real tolerance, real least, real *factor, int64_t *pivots, real *left) {
    const long n = long(g.points), padded = g.padded();
    const int width = int(g.width);
    share(int(g.threads), g.systems, [&](auto next) {
        Buffer<real> rows(rank * padded), diagonal(padded);
        for (int64_t s; (s = next()) < g.systems;) {
            Laid points(g, s);
            std::copy_n(points.present.data, padded, diagonal.data);
            real count = 0;
            for (long p = 0; p < n; p++) count += diagonal[p];
            std::fill_n(pivots + s * rank, rank, int64_t(-1));
            std::fill_n(factor + s * rank * n, rank * n, real(0));
            for (long step = 0; step < rank; step++) {
                double sum = 0;
                long pivot = 0;
                for (long p = 0; p < n; p++) {
                    sum += diagonal[p];
                    if (diagonal[p] > diagonal[pivot]) pivot = p;
                }
                const real value = diagonal[pivot];
                if (sum <= double(tolerance) * count || !(value > least)) break;
                const real scale = 1 / std::sqrt(value);
                real *row = rows + step * padded;
                const real *point = points.rows + pivot * width;
                for (long block = 0; block < padded; block += SIDE) {
                    const real *columns = points.columns + block * width;
                    for (int c = 0; c < SIDE; c += VL) {
                        V distance = {};
                        for (int k = 0; k < width; k++) {
                            V difference = load(columns + k * SIDE + c) - point[k];
                            distance += difference * difference;
                        }
                        V entry = vexp(-distance) * load(points.present + block + c);
                        for (long k = 0; k < step; k++) entry -= load(rows + k * padded + block + c) * rows[k * padded + pivot];
                        entry = entry * scale;
                        store(row + block + c, entry);
                        store(diagonal + block + c, vrelu(load(diagonal + block + c) - entry * entry));
                    }
                }
                diagonal[pivot] = 0;
                pivots[s * rank + step] = pivot;
                std::copy_n(row, n, factor + (s * rank + step) * n);
            }
            std::copy_n(diagonal.data, n, left + s * n);
        }
    });
}
