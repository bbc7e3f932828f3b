// What the core of row-coupled attention and a compiled rule tell each other.
//
// A weight of such a rule depends on the whole row (on a threshold that makes the row sum to 1, on what nearer keys have left).
// So the core brings the logits of all keys for a few queries, a panel, and the rule turns whole rows into weights.
#pragma once
#include "../interface.h"

constexpr real HIDDEN = -std::numeric_limits<real>::max();  // the logit of a key that a query does not see

// Keys along rows, queries along lanes: row statistics are vectors. Padding lanes hold HIDDEN everywhere.
struct Panel {
    real *s;        // logits in, weights out
    real *p;        // backward only: d loss / d weight in, d loss / d logit out
    long keys;      // rows of s and p
    int lanes;      // a multiple of VL, at most PANEL * VL
    real *peak;     // per query: the largest logit, HIDDEN if it sees nothing
    real *threshold;               // per query: what `solve` has found
    const real *count, *position;  // per query: the symbols n and i
    const real *parameters;
    double *parameter_gradient;    // or null; one per parameter
};

// Of the part that it shares with formulas, a rule has parameters only.
struct RowRule : Mechanism {
    void (*begin)(const Panel &);  // before the first tile
    // Tiles of keys come from the last to the first; this one holds the rows `from` to `to` of s. Returns whether keys
    // before it can have any weight or slope.
    bool (*scan)(const Panel &, long from, long to);
    void (*solve)(const Panel &);    // forward, after the last tile
    void (*weights)(const Panel &);  // forward: s becomes weights
    // Backward: which keys have a weight or a slope in any row; the others are left out of what follows.
    void (*active)(const Panel &, uint8_t *);
    void (*slopes)(const Panel &);   // backward: s becomes weights, p slopes
};
