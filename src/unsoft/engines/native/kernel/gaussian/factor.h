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
constexpr int REGS = REGISTERS == 32 ? 4 : 2, PANEL_WIDTH = REGS * VL;  // what a product of six rows keeps in registers

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

// Panels of columns, each in one piece of memory: of M from their first row on (lower), or of M^T up to their last (upper).
struct Panels {
    const long count, height;
    Buffer<real> lower, upper;
    explicit Panels(long n)
        : count((n + PANEL_WIDTH - 1) / PANEL_WIDTH), height(count * PANEL_WIDTH),
          lower(size()), upper(size()) {}
    size_t size() const { return size_t(count) * (count + 1) / 2 * PANEL_WIDTH * PANEL_WIDTH; }
    real *below(long panel) const { return lower + (panel * height - PANEL_WIDTH * (panel * (panel - 1) / 2)) * PANEL_WIDTH; }
    real *above(long panel) const { return upper + panel * (panel + 1) / 2 * PANEL_WIDTH * PANEL_WIDTH; }
};

// What inverse_factor works in, for matrices of one size one after the other: fresh memory costs as much as the arithmetic.
struct Workspace {
    Panels panels;
    Buffer<real> b, product;
    Workspace(long n, long ld) : panels(n), b(GROWTH * ld), product(GROWTH * ld) {}
};

// S = A - B B^T for new rows: A (rows, n) at their own columns, B (rows, filled).
static void remainder(int rows, long filled, const real *a, long n, const real *b, long ld, real *s) {
    real dots_of[6 * GROWTH];
    for (int i = 0; i < rows; i += 6) {
        const int high = std::min(6, rows - i), wide = i + high;
        if (high == 6) dots<6>(wide, int(filled), b + i * ld, ld, b, ld, dots_of, GROWTH, 1);
        else few_products(high, wide, int(filled), b + i * ld, ld, b, ld, dots_of, GROWTH, 1);
        for (int r = 0; r < high; r++)
            for (int j = 0; j <= i + r; j++) s[(i + r) * GROWTH + j] = a[(i + r) * n + j] - dots_of[r * GROWTH + j];
    }
}

// m: (n, ld) with room for whole panels in a row; a: (n, n), its lower half is read. Returns the number of rows done, n unless A is
// not positive definite; what follows is NaN.
static int64_t inverse_factor(int64_t n, const real *a, real *m, long ld, const Workspace &space) {
    const Panels &panels = space.panels;
    real *const b = space.b, *const product = space.product;
    real s[GROWTH * GROWTH], inverse[GROWTH * GROWTH];
    std::fill_n(panels.upper.data, panels.size(), real(0));  // columns that are still to come are read as 0
    for (int64_t first = 0; first < n; first += GROWTH) {
        const int count = int(std::min<int64_t>(GROWTH, n - first));
        const long full = (first + PANEL_WIDTH - 1) / PANEL_WIDTH, filled = full * PANEL_WIDTH;
        for (long p = 0; p < full; p++) {  // B = A M^T: column c of M^T ends at row c
            const long c = p * PANEL_WIDTH;
            rows<6, REGS, false, false>(count, int(std::min<int64_t>(c + PANEL_WIDTH, first)), a + first * n, n, panels.above(p), PANEL_WIDTH,
                                        b + c, ld);
        }
        remainder(count, filled, a + first * n + first, n, b, ld, s);
        const int done = small_factor(count, s, inverse);
        if (done < count) {
            std::fill_n(m + first * ld, (n - first) * ld, std::numeric_limits<real>::quiet_NaN());
            return first + done;
        }
        for (int e = 0; e < GROWTH * GROWTH; e++) s[e] = -inverse[e];
        for (long p = 0; p < full; p++) {  // B M: column c of M begins at row c
            const long c = p * PANEL_WIDTH;
            rows<6, REGS, false, false>(count, int(first - c), b + c, ld, panels.below(p), PANEL_WIDTH, product + c, ld);
            for (int r = 0; r < count; r += 6) {
                const int high = std::min(6, count - r);
                rows<6, REGS, false, false>(high, r + high, s + r * GROWTH, GROWTH, product + c, ld, m + (first + r) * ld + c, ld);
            }
        }
        for (int i = 0; i < count; i++) {
            std::copy_n(inverse + i * GROWTH, i + 1, m + (first + i) * ld + first);
            std::fill_n(m + (first + i) * ld + first + i + 1, ld - first - i - 1, real(0));
            for (long p = 0; p * PANEL_WIDTH <= first + i; p++)
                std::copy_n(m + (first + i) * ld + p * PANEL_WIDTH, PANEL_WIDTH, panels.below(p) + (first + i - p * PANEL_WIDTH) * PANEL_WIDTH);
        }
        for (long c = first, next; c < first + count; c = next) {  // columns of M^T, those of one panel at a time
            const long p = c / PANEL_WIDTH;
            next = std::min<long>((p + 1) * PANEL_WIDTH, first + count);
            for (long k = 0; k < next; k++)  // right of the diagonal M is 0
                for (long i = c; i < next; i++) panels.above(p)[k * PANEL_WIDTH + i - p * PANEL_WIDTH] = m[i * ld + k];
        }
    }
    return n;
}

// A batch of them; returns the smallest number of rows done.
static int64_t inverse_factors(int64_t threads, int64_t systems, int64_t n, const real *a, real *m, long ld) {
    std::atomic<int64_t> done{n};
    share(int(threads), systems, [&](auto next) {
        const Workspace space(n, ld);
        for (int64_t s; (s = next()) < systems;) {
            int64_t rows = inverse_factor(n, a + s * n * n, m + s * n * ld, ld, space);
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
