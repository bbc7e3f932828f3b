// Tensors of any strides and of the four floating types, read and written as rows of `real`.
#pragma once
#include <algorithm>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#include "simd.h"

// INT8: rows of a quantised cache, each a float32 scale and then its numbers divided by that. Strides count bytes.
enum Type : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8 };
static inline int64_t bytes_of(int64_t type) { return type == INT8 ? 1 : type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2; }

struct Tensor {  // (batch, head, row, column), strides in elements
    char *data;
    int64_t batch, head, row, column;
};

UNSOFT_INLINE float bits_to_float(uint32_t x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
UNSOFT_INLINE uint32_t float_to_bits(float x) {
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}
UNSOFT_INLINE float from_bfloat16(uint16_t x) { return bits_to_float(uint32_t(x) << 16); }
UNSOFT_INLINE uint16_t to_bfloat16(float x) {  // round to nearest even
    uint32_t u = float_to_bits(x);
    if (x != x) return 0x7fc0;
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
UNSOFT_INLINE float from_float16(uint16_t x) {
    uint32_t magnitude = uint32_t(x & 0x7fff) << 13, sign = uint32_t(x & 0x8000) << 16;
    float y = bits_to_float(magnitude) * bits_to_float(0x77800000);  // 2^112 moves the exponent, subnormals included
    uint32_t special = magnitude >= 0x0f800000 ? magnitude + 0x70000000 : float_to_bits(y);
    return bits_to_float(special | sign);
}
UNSOFT_INLINE uint16_t to_float16(float x) {
    uint32_t u = float_to_bits(x), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u >= 0x7f800000) return uint16_t(sign | (u > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds past the largest half
    if (u < 0x38800000) {  // subnormal half: let the adder round
        float y = bits_to_float(u) + 0.5f;
        return uint16_t(sign | (float_to_bits(y) - 0x3f000000));
    }
    u += 0xc8000fff + (u >> 13 & 1);
    return uint16_t(sign | u >> 13);
}

template <class From, class Convert>
UNSOFT_INLINE void read_as(const From *from, int64_t step, int width, real *to, Convert convert) {
    if (step == 1)
        for (int x = 0; x < width; x++) to[x] = convert(from[x]);
    else
        for (int x = 0; x < width; x++) to[x] = convert(from[x * step]);
}

// Half precision that lies side by side, a register at a time. Return how many of the `width` numbers have been converted.
typedef uint16_t Halves __attribute__((vector_size(2 * VL), aligned(2), may_alias));
UNSOFT_INLINE int read_bfloat16(const uint16_t *from, int width, real *to) {
    int x = 0;
    for (; SINGLE && x + VL <= width; x += VL) store(to + x, (V)(__builtin_convertvector(*(const Halves *)(from + x), U) << 16));
    return x;
}
UNSOFT_INLINE int write_bfloat16(const real *from, real scale, int width, uint16_t *to) {  // as to_bfloat16
    int x = 0;
    for (; SINGLE && x + VL <= width; x += VL) {
        const V y = load(from + x) * scale;
        const U bits = (U)y, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        *(Halves *)(to + x) = __builtin_convertvector(y == y ? rounded : U{} + 0x7fc0, Halves);
    }
    return x;
}
#ifdef __F16C__
UNSOFT_INLINE int write_float16(const real *from, real scale, int width, uint16_t *to) {
    int x = 0;
    for (; SINGLE && x + 8 <= width; x += 8) {
        const __m256 y = _mm256_mul_ps(_mm256_loadu_ps((const float *)(from + x)), _mm256_set1_ps(float(scale)));
        _mm_storeu_si128((__m128i *)(to + x), _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
    }
    return x;
}
UNSOFT_INLINE int read_float16(const uint16_t *from, int width, real *to) {
    int x = 0;
    for (; SINGLE && x + 8 <= width; x += 8)
        _mm256_storeu_ps((float *)(to + x), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + x))));
    return x;
}
#else
UNSOFT_INLINE int write_float16(const real *, real, int, uint16_t *) { return 0; }
UNSOFT_INLINE int read_float16(const uint16_t *, int, real *) { return 0; }
#endif

// A row of INT8. One that was not finite has the scale NaN, and so have all its numbers.
struct Int8Row {
    const int8_t *data;
    real scale;
    explicit Int8Row(const char *row) : data((const int8_t *)(row + sizeof(float))) {
        float x;
        memcpy(&x, row, sizeof x);
        scale = x;
    }
    V steps(int x) const {  // VL numbers from x on, without the scale
#if defined(__AVX512F__)  // GCC converts bytes one by one otherwise
        if constexpr (SINGLE) return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(data + x))));
#elif defined(__AVX2__)
        if constexpr (SINGLE) return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(data + x))));
#endif
        V y;
        for (int lane = 0; lane < VL; lane++) y[lane] = data[x + lane];
        return y;
    }
    void read(int width, real *to) const {
        int x = 0;
        for (; x + VL <= width; x += VL) store(to + x, steps(x) * scale);
        for (; x < width; x++) to[x] = real(data[x]) * scale;
    }
};
// The opposite: the largest number becomes 127 or -127, so that none is cut off. Rows too small to divide by (below 1e-36) become 0.
static inline void write_int8(const real *from, int width, char *to) {
    real largest = 0, sum = 0;
    for (int x = 0; x < width; x++) largest = std::max(largest, std::fabs(from[x])), sum += from[x] * real(0);
    const bool finite = sum == 0, usable = largest > real(1e-36);
    const float scale = finite ? float(usable ? largest / 127 : 0) : std::numeric_limits<float>::quiet_NaN();
    const real inverse = finite && usable ? real(127) / largest : real(0);
    memcpy(to, &scale, sizeof scale);
    for (int x = 0; x < width; x++) ((int8_t *)to)[sizeof scale + x] = finite ? int8_t(std::nearbyint(from[x] * inverse)) : 0;
}

// A sum of x * 0 is 0 exactly if every x is finite. Four sums: one alone would wait for its own additions.
static inline bool all_finite(const real *from, long ld, int count, int width) {
    V sum[4] = {};
    real rest = 0;
    for (int r = 0; r < count; r++) {
        int x = 0;
        for (; x + 4 * VL <= width; x += 4 * VL)
            for (int part = 0; part < 4; part++) sum[part] += load(from + r * ld + x + part * VL) * real(0);
        for (; x + VL <= width; x += VL) sum[0] += load(from + r * ld + x) * real(0);
        for (; x < width; x++) rest += from[r * ld + x] * real(0);
    }
    return horizontal_sum(sum[0] + sum[1] + (sum[2] + sum[3])) + rest == 0;
}

struct Source : Tensor {  // a tensor that is read
    int64_t type;

    const char *at(int64_t b, int64_t h, int64_t r) const {
        return data + (b * batch + h * head + r * row) * bytes_of(type);
    }
    bool direct(int width) const {  // rows can be used where they lie
        return type == (SINGLE ? FLOAT32 : FLOAT64) && (column == 1 || width == 1) && width % VL == 0;
    }
    // Rows of bfloat16 can be read as pairs where they lie.
    bool pairs(int width) const {
        return type == BFLOAT16 && column == 1 && width % 2 == 0 && (int64_t(data) / 2 | batch | head | row) % 2 == 0;
    }
    // Registers of rows of INT8 can be read where they lie.
    bool bytes(int width) const { return type == INT8 && width % VL == 0; }
    // `count` rows from row r on, each padded with zeros to `padded`; no copy where the tensor allows it.
    const real *rows(int64_t b, int64_t h, int64_t r, int count, int width, int padded, real *scratch, long &ld) const {
        if (direct(width)) {
            ld = row;
            return (const real *)at(b, h, r);
        }
        ld = padded;
        for (int k = 0; k < count; k++) {
            const char *from = at(b, h, r + k);
            real *to = scratch + long(k) * padded;
            if (type == FLOAT32) read_as((const float *)from, column, width, to, [](float x) { return real(x); });
            else if (type == FLOAT64) read_as((const double *)from, column, width, to, [](double x) { return real(x); });
            else if (type == INT8) Int8Row(from).read(width, to);
            else {
                const uint16_t *half = (const uint16_t *)from;
                const int done = column != 1 ? 0 : type == BFLOAT16 ? read_bfloat16(half, width, to) : read_float16(half, width, to);
                if (type == BFLOAT16) read_as(half + done * column, column, width - done, to + done, [](uint16_t x) { return real(from_bfloat16(x)); });
                else read_as(half + done * column, column, width - done, to + done, [](uint16_t x) { return real(from_float16(x)); });
            }
            for (int x = width; x < padded; x++) to[x] = 0;
        }
        return scratch;
    }
};

struct Target : Tensor {  // a tensor that is written; its columns are contiguous
    int64_t type;

    char *at(int64_t b, int64_t h, int64_t r) const {
        return data + (b * batch + h * head + r * row) * bytes_of(type);
    }
    // Writes scale * from; returns whether every number is finite.
    bool write(int64_t b, int64_t h, int64_t r, int width, const real *from, real scale) const {
        char *to = at(b, h, r);
        const real largest = std::numeric_limits<real>::max();
        int strange = 0;
        for (int x = 0; x < width; x++) strange |= !(std::fabs(from[x] * scale) <= largest);
        if (type == FLOAT32) for (int x = 0; x < width; x++) ((float *)to)[x] = float(from[x] * scale);
        else if (type == FLOAT64) for (int x = 0; x < width; x++) ((double *)to)[x] = from[x] * scale;
        else {
            uint16_t *half = (uint16_t *)to;
            const int done = type == BFLOAT16 ? write_bfloat16(from, scale, width, half) : write_float16(from, scale, width, half);
            for (int x = done; x < width; x++) half[x] = type == BFLOAT16 ? to_bfloat16(float(from[x] * scale)) : to_float16(float(from[x] * scale));
        }
        return !strange;
    }
};
