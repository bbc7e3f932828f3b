// What the formula-independent core and the compiled formula tell each other.
//
// The core multiplies matrices; the formula turns a tile of logits into weights. They are compiled apart, so that a new
// formula costs a second of compile time and not the whole kernel, and they meet once per tile, through function pointers.
#pragma once
#include "simd.h"

// A tile holds keys along rows and queries along lanes ("transposed"), so that the row statistics of attention (peak,
// total) are vectors and need no horizontal reduction. With few queries the roles are swapped ("rows"): one query a row,
// keys along lanes.
struct Tile {
    real *s;           // logits in, weights out (forward: unnormalised; backward: normalised, after dropout)
    real *p;           // backward only: d loss / d weight in, d loss / d logit out
    int keys;          // number of keys in the tile
    int queries;       // transposed: a multiple of VL, padded; rows: the number of query rows
    int stride;        // distance between rows of s, p, visible, bias
    int64_t first_key; // number of the tile's first key
    const real *key_position;      // per key: the symbol j, padded to VL; or null: its number
    const real *query_fields;      // field f of a query: query_fields[f * query_field_step + query]
    long query_field_step;
    const real *key_fields;        // field f of a key: key_fields[f * key_field_step + key], and in rows + query * key_field_row
    long key_field_step, key_field_row;
    bool plain;        // every key is visible to every query, no bias, no dropout: skip all checks
    real *peak, *mass; // per query: running maximum and running sum
    bool half;         // forward, transposed: the weights of a plain tile are rounded to bfloat16 afterwards
    real *top, *others;  // per query, measured where `half` unless the peak is exact: the largest logit m so far, and about the sum of exp(2 (s - m)) over all other keys
    real *rescale;     // forward: factor that the core applies to what it has accumulated
    const real *count, *position;  // per query: the symbols n and i
    const real *limit;             // per query: keys from this one on (counted in the tile) are hidden by causality
    const real *seen;              // finish only, per query: how many keys it has seen
    const uint8_t *visible;        // or null; same layout as s
    const real *bias;              // or null; same layout as s
    const uint32_t *drop_key;      // per query, or null without dropout
    uint32_t drop_below;           // a weight is dropped if its random word is below this
    real keep_scale;
    const real *inverse, *slope;   // backward, per query: 1 / norm, and d loss / d total
    real *bias_gradient;           // or null; same layout as s
    double *parameter_gradient;    // or null; one per parameter
    real *query_field_gradient;    // or null; as query_fields
    real *key_field_gradient;      // or null; VL partial sums for each key: [f * key_field_gradient_step + key * VL]
    long key_field_gradient_step;
    const real *parameters;
};

struct Mechanism {
    int32_t parameters, query_fields, key_fields;
    int32_t has_peak, has_mass, exact_peak;  // exact_peak: the largest weight of a row with a peak is a power of two
    double mass_degree;
    // Both return whether any entry of `rescale` differs from 1.
    bool (*forward)(const Tile &);
    bool (*forward_rows)(const Tile &);
    void (*backward)(const Tile &);
    // After the last tile: total and 1 / norm of `queries` rows (padded to VL) from peak and mass. A row that has seen no key
    // gets the peak -inf, by which `prepare` knows it: its norm may be undefined, and its output and gradients are 0.
    void (*finish)(const Tile &, real *total, real *inverse);
    // Before the first backward tile: inverse and slope of `queries` rows from peak, total and delta = grad_out . out.
    void (*prepare)(const Tile &, const real *total, const real *delta, real *inverse, real *slope);
};

constexpr real NOTHING_SEEN = -std::numeric_limits<real>::max();  // the peak of a row before its first visible key
