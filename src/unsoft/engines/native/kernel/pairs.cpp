// What a step of a pair of attention maps (gpam) does before and after the maps themselves: few numbers, and too many calls of torch.
#include "simd.h"
#include <algorithm>

struct Pairs {
    int64_t batch, heads, tokens, width, values, mapped_first;
    const real *q, *map;          // (B, H, T, D) and (H, D, D)
    real *both;                   // (B, H, 2, T, D): the query, and relu(q) W or, if mapped first, relu(q W)
    const real *maps, *plus, *minus;  // (B, H, 2, T, Dv), and two numbers for each head
    real *out;                    // (B, H, T, Dv): plus first - minus second
};

extern "C" __attribute__((visibility("default"))) int unsoft_pair_queries(const Pairs *call) {
    const Pairs &p = *call;
    const int64_t block = p.tokens * p.width;
    for (int64_t item = 0; item < p.batch * p.heads; item++) {
        const real *q = p.q + item * block, *map = p.map + item % p.heads * p.width * p.width;
        real *first = p.both + 2 * item * block, *second = first + block;
        std::copy(q, q + block, first);
        std::fill(second, second + block, real(0));
        for (int64_t t = 0; t < p.tokens; t++, q += p.width, second += p.width) {
            real *__restrict y = second;
            for (int64_t c = 0; c < p.width; c++) {
                const real x = p.mapped_first || q[c] > 0 || q[c] != q[c] ? q[c] : 0;
                const real *__restrict row = map + c * p.width;
#pragma omp simd
                for (int64_t d = 0; d < p.width; d++) y[d] += x * row[d];
            }
            if (p.mapped_first)
                for (int64_t d = 0; d < p.width; d++) y[d] = y[d] > 0 || y[d] != y[d] ? y[d] : 0;
        }
    }
    return 0;
}

extern "C" __attribute__((visibility("default"))) int unsoft_pair_difference(const Pairs *call) {
    const Pairs &p = *call;
    const int64_t block = p.tokens * p.values;
    for (int64_t item = 0; item < p.batch * p.heads; item++) {
        const real *__restrict first = p.maps + 2 * item * block, *__restrict second = first + block;
        const real plus = p.plus[item % p.heads], minus = p.minus[item % p.heads];
        real *__restrict out = p.out + item * block;
#pragma omp simd
        for (int64_t c = 0; c < block; c++) out[c] = plus * first[c] - minus * second[c];
    }
    return 0;
}
