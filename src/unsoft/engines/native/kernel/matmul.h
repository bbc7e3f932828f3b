// Small dense products out of registers: C (+)= A B, where A is read one number at a time and B one register at a time.
//
// Neither operand is packed: A is walked along its rows (or columns, TRANSPOSED), B along its rows. Only the queries are
// laid out anew (see pack_lanes), once for all the keys they meet. Numbers are of type T: real, or pairs of bfloat16 (bfloat16.h).
#pragma once
#include "bfloat16.h"

// Operands of T are never deduced from arguments, which may be buffers: T is real unless said.
template <class T> struct Numbers {
    typedef const T *pointer;
};
template <class T> using Operand = typename Numbers<T>::pointer;

// C[R][NV * VL] (+)= sum_k A(r, k) B[k][NV * VL]; A(r, k) is A[r * lda + k], or A[k * lda + r] if TRANSPOSED. What pairs give is
// multiplied by `scale` if it is not added to C: queries of real are scaled before, which those of bfloat16 cannot be without rounding.
template <int R, int NV, bool TRANSPOSED, bool ADD, class T = real>
static inline __attribute__((always_inline)) void block(int depth, Operand<T> __restrict a, long lda, Operand<T> __restrict b, long ldb,
                                                        real *__restrict c, long ldc, [[maybe_unused]] real scale = 1) {
    V sum[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) sum[r][v] = ADD ? load(c + r * ldc + v * VL) : V{};
#pragma GCC unroll 2
    for (int k = 0; k < depth; k++) {
        decltype(load(b)) row[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) row[v] = load(b + k * ldb + v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const auto x = splat(TRANSPOSED ? a[k * lda + r] : a[r * lda + k]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) sum[r][v] = multiply_add(sum[r][v], x, row[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
            if constexpr (!ADD && std::is_same<T, Pair>::value) sum[r][v] *= scale;
            store(c + r * ldc + v * VL, sum[r][v]);
        }
}

// All rows of C for one group of NV registers: blocks of R rows, the remainder halved until it fits.
template <int R, int NV, bool TRANSPOSED, bool ADD, class T = real>
static void rows(int m, int depth, Operand<T> a, long lda, Operand<T> b, long ldb, real *c, long ldc, real scale = 1) {
    int r = 0;
    for (; r + R <= m; r += R) block<R, NV, TRANSPOSED, ADD, T>(depth, a + (TRANSPOSED ? r : r * lda), lda, b, ldb, c + r * ldc, ldc, scale);
    if constexpr (R > 1)
        if (r < m) rows<R / 2, NV, TRANSPOSED, ADD, T>(m - r, depth, a + (TRANSPOSED ? r : r * lda), lda, b, ldb, c + r * ldc, ldc, scale);
}

// Logit-shaped products: C[m][queries] = A B with B and C as wide as a panel of queries (1 to 3 registers).
constexpr int PANEL = 3;
template <class T = real>
static void panel_product(int m, int depth, Operand<T> a, long lda, Operand<T> b, long ldb, real *c, long ldc, int registers, real scale = 1) {
    constexpr int R = REGISTERS == 32 ? 8 : 4;
    if (registers == 3) rows<R, 3, false, false, T>(m, depth, a, lda, b, ldb, c, ldc, scale);
    else if (registers == 2) rows<R, 2, false, false, T>(m, depth, a, lda, b, ldb, c, ldc, scale);
    else rows<R, 1, false, false, T>(m, depth, a, lda, b, ldb, c, ldc, scale);
}

// Value-shaped products: C[m][width] += A B with `width` a multiple of VL (a head's dimension, padded).
template <bool TRANSPOSED, class T = real>
static void accumulate(int m, int width, int depth, Operand<T> a, long lda, Operand<T> b, long ldb, real *c, long ldc) {
    constexpr int NV = REGISTERS == 32 ? 4 : 2, R = 6;
    int x = 0;
    for (; x + NV * VL <= width; x += NV * VL) rows<R, NV, TRANSPOSED, true, T>(m, depth, a, lda, b + x, ldb, c + x, ldc);
    for (; x + VL <= width; x += VL) rows<R, 1, TRANSPOSED, true, T>(m, depth, a, lda, b + x, ldb, c + x, ldc);
}

// Few queries: dot products along the head dimension (width a multiple of VL), C(query, key) = q . k at
// c[query * query_step + key * key_step]. Sums in lanes are shorter, so this is also the more accurate way.
template <int R>
static inline void dots(int keys, int width, const real *q, long ldq, const real *k, long ldk, real *c, long query_step, long key_step) {
    for (int key = 0; key < keys; key++) {
        V sum[R] = {};
        for (int x = 0; x < width; x += VL) {
            V y = load(k + key * ldk + x);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) sum[r] += load(q + r * ldq + x) * y;
        }
        for (int r = 0; r < R; r++) c[r * query_step + key * key_step] = horizontal_sum(sum[r]);
    }
}
static void few_products(int queries, int keys, int width, const real *q, long ldq, const real *k, long ldk, real *c, long query_step,
                         long key_step) {
    int r = 0;
    for (; r + 2 <= queries; r += 2) dots<2>(keys, width, q + r * ldq, ldq, k, ldk, c + r * query_step, query_step, key_step);
    if (r < queries) dots<1>(keys, width, q + r * ldq, ldq, k, ldk, c + r * query_step, query_step, key_step);
}

// The two products of few queries with rows of INT8 (quantised caches), `row` bytes apart. Numbers are converted in registers and the scale of
// a row is a factor of its logit or weight: writing converted rows to memory first would take three times as long.
template <int R> static void int8_dots(int keys, int width, const real *q, long ldq, const char *k, int64_t row, real *c, long query_step) {
    for (int key = 0; key < keys; key++) {
        const Int8Row r8(k + key * row);
        V sum[R] = {};
        for (int x = 0; x < width; x += VL) {
            const V y = r8.steps(x);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sum[r] += load(q + r * ldq + x) * y;
        }
        for (int r = 0; r < R; r++) c[r * query_step + key] = horizontal_sum(sum[r]) * r8.scale;
    }
}
template <int R> static void int8_accumulate(int keys, int width, const real *weights, long ldw, const char *v, int64_t row, real *c, long ldc) {
    for (int x = 0; x < width; x += 4 * VL) {
        const int registers = std::min(4, (width - x) / VL);
        V sum[R][4] = {};
        for (int key = 0; key < keys; key++) {
            const Int8Row r8(v + key * row);
            V y[4];
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) y[n] = n < registers ? r8.steps(x + n * VL) : V{};
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int n = 0; n < 4; n++) sum[r][n] += weights[r * ldw + key] * r8.scale * y[n];
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < registers; n++) store(c + r * ldc + x + n * VL, load(c + r * ldc + x + n * VL) + sum[r][n]);
    }
}
// Calls `run` with each of the queries 0 .. count - 1 and a compile-time number of them: two at a time.
template <class Run> static void by_two(int count, Run run) {
    int r = 0;
    for (; r + 2 <= count; r += 2) run(r, std::integral_constant<int, 2>{});
    if (r < count) run(r, std::integral_constant<int, 1>{});
}

// Queries from rows to lanes: to[x][lane] = scale * from[lane][x], lanes past `count` zero.
static void pack_lanes(const real *from, long ld, int count, int lanes, int width, real scale, real *to) {
    for (int lane = 0; lane < lanes; lane++)
        for (int x = 0; x < width; x++) to[x * lanes + lane] = lane < count ? from[lane * ld + x] * scale : real(0);
}

// The same queries left as rows.
static void pack_rows(const real *from, long ld, int count, int width, real scale, real *to) {
    for (int r = 0; r < count; r++)
        for (int x = 0; x < width; x++) to[r * width + x] = from[r * ld + x] * scale;
}
