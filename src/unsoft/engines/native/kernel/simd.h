// One SIMD register as a C++ type, and the elementary functions of formulas on it.
//
// GCC/clang vector extensions, no intrinsics where the compiler does as well: the same text becomes AVX-512, AVX2, SSE2
// or NEON. `real` is float or double, chosen at compile time. Every function whose name starts with v lets NaN through.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifndef UNSOFT_REAL
#define UNSOFT_REAL float
#endif
typedef UNSOFT_REAL real;

#if defined(__AVX512F__)
#define UNSOFT_BYTES 64
#elif defined(__AVX2__)
#define UNSOFT_BYTES 32
#else
#define UNSOFT_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
#define UNSOFT_INLINE static inline __attribute__((always_inline))

constexpr int VL = UNSOFT_BYTES / sizeof(real);
constexpr bool SINGLE = sizeof(real) == 4;
typedef real V __attribute__((vector_size(UNSOFT_BYTES)));
typedef real Unaligned __attribute__((vector_size(UNSOFT_BYTES), aligned(sizeof(real)), may_alias));
typedef decltype(V{} < V{}) I;  // signed integers of the width of real, also the type of a comparison
typedef std::conditional<SINGLE, int32_t, int64_t>::type word;
typedef std::conditional<SINGLE, uint32_t, uint64_t>::type uword;
typedef uword U __attribute__((vector_size(UNSOFT_BYTES)));

UNSOFT_INLINE V splat(real x) { return x - V{}; }
UNSOFT_INLINE V load(const real *p) { return (V) * (const Unaligned *)p; }
UNSOFT_INLINE void store(real *p, V x) { *(Unaligned *)p = (Unaligned)x; }
UNSOFT_INLINE V vselect(I c, V a, V b) { return c ? a : b; }
// One instruction each; NaN in b comes through, NaN in a does not. GCC makes two of `a > b ? a : b` on 512 bits. Here
// and below instructions have the compiler's own names, since reading immintrin.h takes half of a formula's compilation.
#if defined(__AVX512F__)
typedef float Floats __attribute__((vector_size(64)));
#endif
#if defined(__AVX512F__) && !defined(__clang__)
typedef double Doubles __attribute__((vector_size(64)));
UNSOFT_INLINE V larger(V a, V b) {
    if constexpr (SINGLE) return (V)__builtin_ia32_maxps512_mask((Floats)a, (Floats)b, Floats{}, (unsigned short)-1, 4);
    else return (V)__builtin_ia32_maxpd512_mask((Doubles)a, (Doubles)b, Doubles{}, (unsigned char)-1, 4);
}
UNSOFT_INLINE V smaller(V a, V b) {
    if constexpr (SINGLE) return (V)__builtin_ia32_minps512_mask((Floats)a, (Floats)b, Floats{}, (unsigned short)-1, 4);
    else return (V)__builtin_ia32_minpd512_mask((Doubles)a, (Doubles)b, Doubles{}, (unsigned char)-1, 4);
}
#else
UNSOFT_INLINE V larger(V a, V b) { return a > b ? a : b; }
UNSOFT_INLINE V smaller(V a, V b) { return a < b ? a : b; }
#endif
UNSOFT_INLINE V iota() {
    V x;
    for (int t = 0; t < VL; t++) x[t] = t;
    return x;
}
// Halves are added until one number is left; a fixed order, the same on every machine of this width.
template <int N> struct Fold {
    typedef real Half __attribute__((vector_size(N / 2 * sizeof(real))));
    template <class Vector> UNSOFT_INLINE real sum(Vector x) {
        Half part[2];
        memcpy(part, &x, sizeof x);
        return Fold<N / 2>::sum(part[0] + part[1]);
    }
};
template <> struct Fold<2> {
    template <class Vector> UNSOFT_INLINE real sum(Vector x) { return x[0] + x[1]; }
};
UNSOFT_INLINE real horizontal_sum(V x) { return Fold<VL>::sum(x); }
UNSOFT_INLINE real horizontal_max(V x) {  // NaN is kept
    real best = x[0];
    for (int t = 1; t < VL; t++) best = best > x[t] ? best : x[t];
    return best;
}

UNSOFT_INLINE V vabs(V x) { return (V)((I)x & ~(I)splat(real(-0.0))); }
UNSOFT_INLINE V vmax(V a, V b) { return vselect(a == a, larger(a, b), a); }
UNSOFT_INLINE V vmin(V a, V b) { return vselect(a == a, smaller(a, b), a); }
UNSOFT_INLINE V vrelu(V x) { return larger(V{}, x); }
UNSOFT_INLINE V vsign(V x) {  // 0 and NaN stay what they are
    V one = (V)(((I)x & (I)splat(real(-0.0))) | (I)splat(1));
    return vselect(vabs(x) > V{}, one, x);
}
UNSOFT_INLINE V vsqrt(V x) {
    V y;
    for (int t = 0; t < VL; t++) y[t] = std::sqrt(x[t]);
    return y;
}

// exp(x) = 2^n exp(r), |r| <= ln(2)/2, and a polynomial for exp(r), whose relative error is below 3e-9; underflows to 0 and overflows to inf like the library's.
UNSOFT_INLINE V vexp_float(V x) {
    const real low = real(-87.33654);  // below, 2^n is denormal: 0 instead
#if defined(__AVX512F__)
    const V clamped = smaller(splat(real(95)), x);  // past 88.7 the scaling below gives inf by itself
#else
    const V high = splat(real(88.37626));  // 2^127 is the largest power that is a float
    const V clamped = smaller(high, larger(splat(low), x));
#endif
    const V magic = splat(real(12582912));  // adding 1.5 * 2^23 rounds to an integer, kept in the low bits
    const V shifted = clamped * real(1.44269504) + magic;
    const V n = shifted - magic;
    V r = clamped - n * real(0.693359375);
    r = r + n * real(2.12194440e-4);
    V p = splat(real(0.00138436444));
    p = p * r + real(0.00837416295);
    p = p * r + real(0.0416680016);
    p = p * r + real(0.166664317);
    p = p * r + real(0.49999994);
    p = p * r + real(1);
    p = p * r + real(1);
#if defined(__AVX512F__)
    // _mm512_maskz_scalef_ps: lanes below `low` (NaN is not) become 0, whatever p and n are there.
    const unsigned short kept = __builtin_ia32_cmpps512_mask((Floats)x, (Floats)splat(low), 5, (unsigned short)-1, 4);
    return (V)__builtin_ia32_scalefps512_mask((Floats)p, (Floats)n, Floats{}, kept, 4);
#else
    V y = (V)((I)p + ((I)shifted << 23));
    y = vselect(x > high, splat(std::numeric_limits<real>::infinity()), y);
    return vselect(x < splat(low), V{}, y);
#endif
}
UNSOFT_INLINE V vexp_double(V x) {
    const V low = splat(real(-708.396)), high = splat(real(709.782));
    V clamped = smaller(high, larger(low, x));
    const V magic = splat(real(6755399441055744.0));
    V shifted = clamped * real(1.4426950408889634074) + magic;
    V n = shifted - magic;
    V r = clamped - n * real(6.93145751953125e-1);
    r = r - n * real(1.42860682030941723212e-6);
    V rr = r * r;  // Cephes' rational approximation
    V p = r * ((real(1.26177193074810590878e-4) * rr + real(3.02994407707441961300e-2)) * rr + real(9.99999999999999999910e-1));
    V q = ((real(3.00198505138664455042e-6) * rr + real(2.52448340349684104192e-3)) * rr + real(2.27265548208155028766e-1)) * rr +
          real(2.00000000000000000005e0);
    V y = real(1) + real(2) * p / (q - p);
    I whole = ((I)shifted << 52) >> 52, half = whole >> 1;  // 2^n as two factors, so that neither overflows
    y = (V)((I)y + (half << 52)) * (V)((I)splat(1) + ((whole - half) << 52));
    y = vselect(x < low, V{}, y);
    return vselect(x > high, splat(std::numeric_limits<real>::infinity()), y);
}
UNSOFT_INLINE V vexp(V x) {
    if constexpr (SINGLE) return vexp_float(x);
    else return vexp_double(x);
}
// exp(r) - 1 for |r| <= ln(2)/2, the polynomial (the fraction) of vexp.
UNSOFT_INLINE V expm1_near_zero(V r) {
    if constexpr (SINGLE) {
        V p = splat(real(1.9875691500e-4));
        p = p * r + real(1.3981999507e-3);
        p = p * r + real(8.3334519073e-3);
        p = p * r + real(4.1665795894e-2);
        p = p * r + real(1.6666665459e-1);
        p = p * r + real(5.0000001201e-1);
        return p * (r * r) + r;
    } else {
        V rr = r * r;
        V a = r * ((real(1.26177193074810590878e-4) * rr + real(3.02994407707441961300e-2)) * rr + real(9.99999999999999999910e-1));
        V b = ((real(3.00198505138664455042e-6) * rr + real(2.52448340349684104192e-3)) * rr + real(2.27265548208155028766e-1)) * rr +
              real(2.00000000000000000005e0);
        return real(2) * a / (b - a);
    }
}
// exp(x) - 1 without cancellation near 0: with exp(x) = 2^n (1 + p), it is 2^n p + (2^n - 1).
UNSOFT_INLINE V vexpm1(V x) {
    // Below, the result is -1 to the last bit; above, the last line gives inf.
    const V low = splat(SINGLE ? real(-17.5) : real(-38)), high = splat(SINGLE ? real(88.8) : real(709.79));
    V clamped = smaller(high, larger(low, x));
    const V magic = splat(SINGLE ? real(12582912) : real(6755399441055744.0));
    V shifted = clamped * real(1.4426950408889634074) + magic;
    V n = shifted - magic;
    V r = SINGLE ? clamped - n * real(0.693359375) : clamped - n * real(6.93145751953125e-1);
    r = SINGLE ? r + n * real(2.12194440e-4) : r - n * real(1.42860682030941723212e-6);
    constexpr int mantissa = SINGLE ? 23 : 52;
    V half = (V)((I)splat(real(0.5)) + ((I)shifted << mantissa));  // 2^(n-1), which cannot overflow
    return (half * expm1_near_zero(r) + (half - real(0.5))) * real(2);
}
// exp(x - m) - exp(y - m) without cancellation where they are close. Mostly the exponentials are wanted beside it, and are computed once.
UNSOFT_INLINE V vexpdiff(V x, V y, V m) {
    const V difference = x - y, above = vexp(x - m), below = vexp(y - m);
    V close;
    if constexpr (SINGLE) {  // (above + below) tanh(difference / 2): an odd function needs half as many terms
        const V square = difference * difference;
        close = (above + below) * (((square * real(4.09707e-3) - real(4.166409e-2)) * square + real(0.5)) * difference);
    } else {
        close = below * expm1_near_zero(difference);
    }
    return vselect(vabs(difference) < splat(real(0.34657359)), close, above - below);
}
// The same two for weights that are rounded to bfloat16 afterwards, by 2^-9: relative errors of 5e-6 and 2e-5. exp(0) is 1 exactly, so that the
// largest weight of a row stays a power of two. One product reduces the range: |n| < 128 where 2^n is not 0, so r is off by less than 128 * 3e-8.
#if defined(__AVX512F__)
UNSOFT_INLINE V vexp_short(V x) {
    if constexpr (!SINGLE) return vexp(x);
    const V clamped = smaller(splat(real(95)), x), magic = splat(real(12582912));
    const V n = clamped * real(1.44269504) + magic - magic, r = clamped - n * real(0.693147182);
    const V p = (((r * real(0.04151352) + real(0.16787711)) * r + real(0.50003026)) * r + real(0.99996671)) * r + real(1);
    const unsigned short kept = __builtin_ia32_cmpps512_mask((Floats)x, (Floats)splat(real(-87.33654)), 5, (unsigned short)-1, 4);
    return (V)__builtin_ia32_scalefps512_mask((Floats)p, (Floats)n, Floats{}, kept, 4);
}
#else
UNSOFT_INLINE V vexp_short(V x) { return vexp(x); }
#endif
UNSOFT_INLINE V vexpdiff_short(V x, V y, V m) {
    if constexpr (!SINGLE) return vexpdiff(x, y, m);
    const V difference = x - y, above = vexp_short(x - m), below = vexp_short(y - m);
    const V close = (above + below) * ((real(0.49999255) - difference * difference * real(0.04117061)) * difference);
    return vselect(vabs(difference) < splat(real(0.34657359)), close, above - below);
}
UNSOFT_INLINE V vsigmoid(V x) { return real(1) / (real(1) + vexp(-x)); }
UNSOFT_INLINE V vtanh(V x) {
    V far = real(1) - real(2) / (real(1) + vexp(x + x));
    V y = x * x, p;  // near 0 the difference above cancels
    if constexpr (SINGLE) {
        p = splat(real(-5.70498872745e-3));
        p = p * y + real(2.06390887954e-2);
        p = p * y - real(5.37397155531e-2);
        p = p * y + real(1.33314422036e-1);
        p = p * y - real(3.33332819422e-1);
    } else {
        p = ((real(-9.64399179425052238628e-1) * y - real(9.92877231001918586564e1)) * y - real(1.61468768441708447952e3)) /
            (((y + real(1.12811678491632931402e2)) * y + real(2.23548839060100448583e3)) * y + real(4.84406305325125486048e3));
    }
    return vselect(y < splat(real(0.390625)), x + x * y * p, far);
}
// Rare in formulas, and then mostly once a row: the library's scalar functions are good enough.
#define UNSOFT_LANEWISE(name, function)                     \
    UNSOFT_INLINE V name(V x) {                             \
        V y;                                                \
        for (int t = 0; t < VL; t++) y[t] = function(x[t]); \
        return y;                                           \
    }
UNSOFT_LANEWISE(vlog, std::log)
UNSOFT_LANEWISE(verf, std::erf)
UNSOFT_INLINE V vpow(V x, V e) {
    V y;
    for (int t = 0; t < VL; t++) y[t] = std::pow(x[t], e[t]);
    return y;
}
