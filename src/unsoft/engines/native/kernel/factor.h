// The inverse M = L^-1 of the Cholesky factor of symmetric positive definite matrices A = L L^T, grown block row by block row:
//
//     B = A_new,old M^T        S = A_new,new - B B^T = C C^T        M_new = [-C^-1 B M, C^-1]
//
// A row of M depends on the rows of A up to it and on nothing else, to the last bit. That is what makes weights of prefixes
// causal, and what decoding does one row at a time.
#pragma once
#include <algorithm>

#include "matmul.h"
#include "threads.h"

constexpr int GROWTH = 24;       // rows that are added at a time
constexpr int STRIP = 4 * 16;    // columns that are multiplied at a time; M is triangular, so half of the strips are empty

// C^-1 of a small S = C C^T, both GROWTH numbers apart. Returns the number of rows done, n unless S is not positive definite.
static int small_factor(int n, real *s, real *inverse) {
    for (int j = 0; j < n; j++) {
        for (int k = 0; k < j; k++)
            for (int i = j; i < n; i++) s[i * GROWTH + j] -= s[i * GROWTH + k] * s[j * GROWTH + k];
        real pivot = s[j * GROWTH + j];
        if (!(pivot > 0)) return j;
        pivot = std::sqrt(pivot);
        for (int i = j; i < n; i++) s[i * GROWTH + j] /= pivot;
    }
    for (int i = 0; i < n; i++) {
        real *row = inverse + i * GROWTH;
        std::fill_n(row, GROWTH, real(0));
        for (int k = 0; k < i; k++)
            for (int j = 0; j <= k; j++) row[j] -= s[i * GROWTH + k] * inverse[k * GROWTH + j];
        for (int j = 0; j < i; j++) row[j] /= s[i * GROWTH + i];
        row[i] = 1 / s[i * GROWTH + i];
    }
    return n;
}

// m: (n, ld) with room for whole strips in a row; a: (n, n), its lower half is read. Returns the number of rows done, n unless A is
// not positive definite; what follows is NaN.
static int64_t inverse_factor(int64_t n, const real *a, real *m, long ld) {
    Buffer<real> transposed(ld * ld), b(GROWTH * ld), product(GROWTH * ld);
    real s[GROWTH * GROWTH], inverse[GROWTH * GROWTH];
    std::fill_n(m, n * ld, real(0));
    std::fill_n(transposed.data, ld * ld, real(0));
    for (int64_t first = 0; first < n; first += GROWTH) {
        const int rows = int(std::min<int64_t>(GROWTH, n - first));
        const long filled = (first + STRIP - 1) / STRIP * STRIP;
        for (int r = 0; r < rows; r++) {
            std::fill_n(b + r * ld, filled, real(0));
            std::fill_n(product + r * ld, filled, real(0));
        }
        for (long c = 0; c < filled; c += STRIP)  // B = A M^T: column c of M^T ends at row c
            accumulate<false>(rows, STRIP, int(std::min<int64_t>(c + STRIP, first)), a + first * n, n, transposed + c, ld, b + c, ld);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j <= i; j++) {
                V sum = {};
                for (long k = 0; k < filled; k += VL) sum += load(b + i * ld + k) * load(b + j * ld + k);
                s[i * GROWTH + j] = a[(first + i) * n + first + j] - horizontal_sum(sum);
            }
        const int done = small_factor(rows, s, inverse);
        if (done < rows) {
            std::fill_n(m + first * ld, (n - first) * ld, std::numeric_limits<real>::quiet_NaN());
            return first + done;
        }
        for (long c = 0; c < filled; c += STRIP)  // B M: column c of M begins at row c
            accumulate<false>(rows, STRIP, int(first - c), b + c, ld, m + c * ld + c, ld, product + c, ld);
        for (int i = 0; i < rows; i++)
            for (int k = 0; k <= i; k++)
                for (long c = 0; c < filled; c += VL)
                    store(m + (first + i) * ld + c, load(m + (first + i) * ld + c) - load(product + k * ld + c) * inverse[i * GROWTH + k]);
        for (int i = 0; i < rows; i++) std::copy_n(inverse + i * GROWTH, i + 1, m + (first + i) * ld + first);
        for (long c = 0; c < first + rows; c++)
            for (int i = 0; i < rows; i++) transposed[c * ld + first + i] = m[(first + i) * ld + c];
    }
    return n;
}

// A batch of them; returns the smallest number of rows done.
static int64_t inverse_factors(int64_t threads, int64_t systems, int64_t n, const real *a, real *m, long ld) {
    std::atomic<int64_t> done{n};
    share(int(threads), systems, [&](auto next) {
        for (int64_t s; (s = next()) < systems;) {
            int64_t rows = inverse_factor(n, a + s * n * n, m + s * n * ld, ld);
            for (int64_t least = done; rows < least && !done.compare_exchange_weak(least, rows);) {}
        }
    });
    return done;
}

// The symmetric part of -M^T T M for lower triangular M and T (systems, n, n; M with rows ld apart), as full matrices.
static void congruences(int64_t threads, int64_t systems, int64_t n, const real *m, long ld, const real *t, real *result) {
    const long strips = (n + STRIP - 1) / STRIP, padded = strips * STRIP;
    share(int(threads), systems, [&](auto next) {
        Buffer<real> factor(padded * padded), product(padded * padded), tile(STRIP * STRIP);
        for (int64_t s; (s = next()) < systems;) {
            std::fill_n(factor.data, padded * padded, real(0));
            std::fill_n(product.data, padded * padded, real(0));
            for (long r = 0; r < n; r++) std::copy_n(m + (s * n + r) * ld, r + 1, factor + r * padded);
            for (long row = 0; row < n; row += STRIP)  // T M: column c of M begins at row c, row r of T ends at column r
                for (long column = 0; column <= row; column += STRIP)
                    accumulate<false>(int(std::min<long>(STRIP, n - row)), STRIP, int(std::min<long>(row + STRIP, n) - column),
                                      t + (s * n + row) * n + column, n, factor + column * padded + column, padded,
                                      product + row * padded + column, padded);
            for (long row = 0; row < n; row += STRIP)
                for (long column = 0; column <= row; column += STRIP) {
                    std::fill_n(tile.data, STRIP * STRIP, real(0));
                    const int depth = int(n - row);
                    accumulate<true>(STRIP, STRIP, depth, factor + row * padded + row, padded, product + row * padded + column, padded, tile, STRIP);
                    accumulate<true>(STRIP, STRIP, depth, product + row * padded + row, padded, factor + row * padded + column, padded, tile, STRIP);
                    for (long i = row; i < std::min<long>(row + STRIP, n); i++)
                        for (long j = column; j < std::min<long>(column + STRIP, i + 1); j++)
                            result[(s * n + i) * n + j] = result[(s * n + j) * n + i] = -tile[(i - row) * STRIP + j - column] / 2;
                }
        }
    });
}
