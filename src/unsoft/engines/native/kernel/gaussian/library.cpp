// The linear algebra of magnitude: Gaussian matrices (matrix.h), their factors (factor.h), and the
// weights that points have when they arrive, all at once (arrival.h) or one after the other (window.h); pivoted Cholesky
// (pivoted.h). Every function returns 0, or 2 if memory ran out.
#include "gaussian/arrival.h"
#include "gaussian/pivoted.h"
#include "gaussian/window.h"

#define UNSOFT_EXPORT(declaration, call)                                    \
    extern "C" __attribute__((visibility("default"))) int declaration {    \
        try {                                                               \
            call;                                                           \
            return 0;                                                       \
        } catch (const std::bad_alloc &) {                                  \
            return 2;                                                       \
        }                                                                   \
    }

UNSOFT_EXPORT(unsoft_gaussian_build(const Gaussian *g, const real *x, real *y), gaussian_build(*g, x, y))
UNSOFT_EXPORT(unsoft_gaussian_product(const Gaussian *g, const real *x, real *y), gaussian_product(*g, x, y))
UNSOFT_EXPORT(unsoft_gaussian_gradient(const Gaussian *g, int64_t rank, const real *u, const real *v, real *gradient),
              gaussian_gradient(*g, rank, u, v, gradient))
UNSOFT_EXPORT(unsoft_gaussian_between(int64_t threads, int64_t systems, int64_t rows, int64_t columns, int64_t width, const real *x,
                                      const real *y, real *z),
              gaussian_between(threads, systems, rows, columns, width, x, y, z))
UNSOFT_EXPORT(unsoft_inverse_factors(int64_t threads, int64_t systems, int64_t n, const real *a, real *m, int64_t ld, int64_t *done),
              *done = inverse_factors(threads, systems, n, a, m, ld))
UNSOFT_EXPORT(unsoft_arrival_factors(const Gaussian *g, double eps, const real *b, real *factor, real *y, real *weights, int64_t *done),
              *done = arrival_factors(*g, real(eps), b, factor, y, weights))
UNSOFT_EXPORT(unsoft_arrival_gradient(const Gaussian *g, real *factor, const real *y, const real *slope, real *gradient),
              arrival_gradient(*g, factor, y, slope, gradient))
UNSOFT_EXPORT(unsoft_pivoted(const Gaussian *g, int64_t rank, double tolerance, double least, real *factor, int64_t *pivots, real *left),
              pivoted_cholesky(*g, rank, real(tolerance), real(least), factor, pivots, left))
UNSOFT_EXPORT(unsoft_congruences(int64_t threads, int64_t systems, int64_t n, const real *m, int64_t ld, const real *t, real *result),
              congruences(threads, systems, n, m, ld, t, result))
UNSOFT_EXPORT(unsoft_window_add(int64_t threads, const Window *w, int64_t length, int64_t rows, double eps, const real *x, const bool *present, const Gate *gate,
                                real *weights, int64_t *done),
              *done = window_add(threads, *w, length, rows, real(eps), x, present, gate, weights))
