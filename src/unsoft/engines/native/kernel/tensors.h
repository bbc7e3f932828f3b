// Tensors of any strides and of the four floating types, read and written as rows of `real`.
#pragma once
#include "simd.h"

enum Type : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

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
        return data + (b * batch + h * head + r * row) * (type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2);
    }
    bool direct(int width) const {  // rows can be used where they lie
        return type == (SINGLE ? FLOAT32 : FLOAT64) && (column == 1 || width == 1) && width % VL == 0;
    }
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
            else if (type == BFLOAT16) read_as((const uint16_t *)from, column, width, to, [](uint16_t x) { return real(from_bfloat16(x)); });
            else read_as((const uint16_t *)from, column, width, to, [](uint16_t x) { return real(from_float16(x)); });
            for (int x = width; x < padded; x++) to[x] = 0;
        }
        return scratch;
    }
};

struct Target : Tensor {  // a tensor that is written; its columns are contiguous
    int64_t type;

    char *at(int64_t b, int64_t h, int64_t r) const {
        return data + (b * batch + h * head + r * row) * (type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2);
    }
    // Writes scale * from; returns whether every number is finite.
    bool write(int64_t b, int64_t h, int64_t r, int width, const real *from, real scale) const {
        char *to = at(b, h, r);
        const real largest = std::numeric_limits<real>::max();
        int strange = 0;
        for (int x = 0; x < width; x++) strange |= !(std::fabs(from[x] * scale) <= largest);
        if (type == FLOAT32) for (int x = 0; x < width; x++) ((float *)to)[x] = float(from[x] * scale);
        else if (type == FLOAT64) for (int x = 0; x < width; x++) ((double *)to)[x] = from[x] * scale;
        else if (type == BFLOAT16) for (int x = 0; x < width; x++) ((uint16_t *)to)[x] = to_bfloat16(float(from[x] * scale));
        else for (int x = 0; x < width; x++) ((uint16_t *)to)[x] = to_float16(float(from[x] * scale));
        return !strange;
    }
};
