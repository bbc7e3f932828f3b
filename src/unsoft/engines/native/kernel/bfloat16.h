// Pairs of bfloat16: what vdpbf16ps (AVX512-BF16) multiplies, two neighbours of the summed dimension in one 32-bit word.
//
// Inputs in bfloat16 fit a pair exactly. Weights and their gradients are rounded to it, as in the GPU engine, and the remainders of some
// weights are kept (add_remainders in forward.h); all sums are float32.
// The instruction takes denormal numbers as 0. Without it nothing here is used (PAIRED is false), but all of it is compiled.
#pragma once
#include "tensors.h"

struct Pair {
    uint32_t bits;  // the first number in the lower half
};
typedef uint32_t Pairs __attribute__((vector_size(UNSOFT_BYTES)));
typedef uint32_t UnalignedPairs __attribute__((vector_size(UNSOFT_BYTES), aligned(4), may_alias));

UNSOFT_INLINE Pairs load(const Pair *p) { return (Pairs) * (const UnalignedPairs *)p; }
UNSOFT_INLINE void store(Pair *p, Pairs x) { *(UnalignedPairs *)p = (UnalignedPairs)x; }
UNSOFT_INLINE Pairs splat(Pair x) { return x.bits + Pairs{}; }
UNSOFT_INLINE V multiply_add(V sum, V x, V y) { return sum + x * y; }

#if defined(__AVX512BF16__)
constexpr bool PAIRED = SINGLE;
UNSOFT_INLINE V multiply_add(V sum, Pairs x, Pairs y) { return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y); }
UNSOFT_INLINE Pairs pair_up(V low, V high) {
    typedef uint16_t Words __attribute__((vector_size(64)));
    const Words interleaved = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (Pairs)_mm512_permutexvar_epi16((__m512i)interleaved, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
UNSOFT_INLINE void store_rounded(Pair *to, V x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
constexpr bool PAIRED = false;
UNSOFT_INLINE V multiply_add(V sum, Pairs, Pairs) { return sum; }
UNSOFT_INLINE Pairs pair_up(V, V) { return Pairs{}; }
UNSOFT_INLINE void store_rounded(Pair *, V) {}
#endif

// Rows r and r + 1 side by side: to[r / 2][x] = (from[r][x], from[r + 1][x]), with 0 beyond the last row. `width` is a multiple of VL.
static void pair_rows(const real *from, long ld, int count, int width, Pair *to) {
    for (int r = 0; r < count; r += 2, from += 2 * ld, to += width)
        for (int x = 0; x < width; x += VL) store(to + x, pair_up(load(from + x), r + 1 < count ? load(from + ld + x) : V{}));
}

// What the pairs of pair_rows have lost, as pairs again.
static void pair_remainders(const real *from, long ld, int count, int width, const Pair *pairs, Pair *to) {
    for (int r = 0; r < count; r += 2, from += 2 * ld, pairs += width, to += width)
        for (int x = 0; x < width; x += VL) {
            const Pairs rounded = load(pairs + x);
            store(to + x, pair_up(load(from + x) - (V)(rounded << 16), r + 1 < count ? load(from + ld + x) - (V)(rounded & 0xffff0000u) : V{}));
        }
}

// pair_rows for rows of bfloat16, which need not be widened for that.
static void pair_rows(const uint16_t *from, long ld, int count, int width, Pair *to) {
    for (int r = 0; r < count; r += 2, from += 2 * ld, to += width)
        for (int x = 0; x < width; x += VL) {
            const U low = __builtin_convertvector(*(const Halves *)(from + x), U);
            const U high = r + 1 < count ? __builtin_convertvector(*(const Halves *)(from + ld + x), U) : U{};
            store(to + x, (Pairs)(low | high << 16));
        }
}

// Neighbours within a row: to[r][x / 2] = (from[r][x], from[r][x + 1]). `width` is a multiple of VL.
static void pair_columns(const real *from, long ld, int count, int width, Pair *to) {
    for (int r = 0; r < count; r++, from += ld, to += width / 2)
        for (int x = 0; x < width; x += VL) store_rounded(to + x / 2, load(from + x));
}

// Queries from rows to lanes, as pack_lanes: to[x / 2][lane] = (from[lane][x], from[lane][x + 1]), lanes past `count` zero. They came as
// bfloat16, so dropping the lower half of each number loses nothing.
static void pair_lanes(const real *from, long ld, int count, int lanes, int width, Pair *to) {
    for (int lane = 0; lane < lanes; lane++)
        for (int x = 0; x < width; x += 2) {
            const bool filled = lane < count;
            const uint32_t low = filled ? float_to_bits(float(from[lane * ld + x])) >> 16 : 0;
            const uint32_t high = filled ? float_to_bits(float(from[lane * ld + x + 1])) & 0xffff0000u : 0;
            to[long(x / 2) * lanes + lane].bits = low | high;
        }
}
