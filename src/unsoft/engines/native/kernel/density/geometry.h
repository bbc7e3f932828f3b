// Densities of keys: rho_ij = sum over the keys l that row i sees of G_jl = exp(-|x_j - x_l|^2), for the points x of one key head.
//
// Row i sees one key more than row i - 1. So the densities of all rows need G below its diagonal only: row l of it, the similarities of
// the new key l to the earlier keys j, is added to their densities from row l on, and its sum and 1 (the key itself) is the density that
// key l has when it arrives. Tiles are those of attention: earlier keys along rows, the new keys of a panel of queries along lanes, so
// that sums over rows are sums over lanes. What is carried from panel to panel is one number per key, in double precision: the backward
// pass goes through the panels in reverse and takes away what was added, which in float32 would leave the rounding of large crowds.
//
// Distances are |x|^2 + |y|^2 - 2 x y: one product, half the work of summed differences. |x|^2 comes from the same sequence of
// multiplications and additions as x y, so that the distance of exact clones is 0. That of others has an error of 1e-7 (|x|^2 + |y|^2).
//
// With a sliding window, row i also loses a key that row i - 1 saw: row l of G below the diagonal is added when key l arrives, and column a
// is taken away when key a leaves (WINDOW). Each pair is computed twice, so work is O(rows window) and nothing but the carried numbers
// is kept. Taking away is safe because it takes away exactly what was added:
// - G_al is the same float from both sides: its product adds the same terms in the same order, and |x|^2 + |y|^2 is added up first;
// - arrivals and totals of panels are summed in double precision, whose error is below 1e-16 of the largest crowd in the window.
// So a key that a crowd of 1000 has left has a density of 1 to within 1e-13, where float32 sums would leave 1e-4 of the crowd. Inside a
// panel sums are float32: at most LANES keys of similarity 1 leave there, so an error is below (rho + LANES) 6e-8, with rho >= 1.
#pragma once
#include "call.h"

// A key that is absent, or a lane without one, is this far away from all others: exp gives 0.
constexpr real ABSENT = real(1e30);

template <int BY> UNSOFT_INLINE V from_left(V x) {  // lane t gets x[t - BY], the first ones 0
#ifdef __clang__
    V y = {};
    for (int t = BY; t < VL; t++) y[t] = x[t - BY];
    return y;
#else
    I index;
    for (int t = 0; t < VL; t++) index[t] = VL - BY + t;
    return __builtin_shuffle(V{}, x, index);
#endif
}
template <int BY> UNSOFT_INLINE V from_right(V x) {  // lane t gets x[t + BY], the last ones 0
#ifdef __clang__
    V y = {};
    for (int t = 0; t < VL - BY; t++) y[t] = x[t + BY];
    return y;
#else
    I index;
    for (int t = 0; t < VL; t++) index[t] = BY + t;
    return __builtin_shuffle(x, V{}, index);
#endif
}
UNSOFT_INLINE V sums_up_to(V x) {  // lane t gets x[0] + ... + x[t]
    x += from_left<1>(x);
    if constexpr (VL > 2) x += from_left<2>(x);
    if constexpr (VL > 4) x += from_left<4>(x);
    if constexpr (VL > 8) x += from_left<8>(x);
    return x;
}
UNSOFT_INLINE V sums_from(V x) {  // lane t gets x[t] + ... + x[VL - 1]
    x += from_right<1>(x);
    if constexpr (VL > 2) x += from_right<2>(x);
    if constexpr (VL > 4) x += from_right<4>(x);
    if constexpr (VL > 8) x += from_right<8>(x);
    return x;
}

// The logarithm of numbers from 1 on: exponent, and a polynomial for the rest in [sqrt(1/2), sqrt(2)) (Cephes).
UNSOFT_INLINE V log_above_1(V x) {
    if constexpr (SINGLE) {
        I bits = (I)x;
        I exponent = (bits >> 23) - 127;
        V m = (V)((bits & 0x7fffff) | 0x3f800000);
        const I high = m > splat(real(1.41421356));
        m = vselect(high, m * real(0.5), m);
        exponent -= high;  // true is -1
        V e;
        e = __builtin_convertvector(exponent, V);
        const V f = m - real(1), z = f * f;
        V p = splat(real(7.0376836292e-2));
        p = p * f - real(1.1514610310e-1);
        p = p * f + real(1.1676998740e-1);
        p = p * f - real(1.2420140846e-1);
        p = p * f + real(1.4249322787e-1);
        p = p * f - real(1.6668057665e-1);
        p = p * f + real(2.0000714765e-1);
        p = p * f - real(2.4999993993e-1);
        p = p * f + real(3.3333331174e-1);
        return e * real(0.693359375) + (f + (p * f * z - real(0.5) * z - e * real(2.12194440e-4)));
    } else {
        return vlog(x);
    }
}

// Half a register of numbers in double precision, for sums that have to cancel.
typedef double Wide __attribute__((vector_size(VL / 2 * sizeof(double))));
typedef real Narrow __attribute__((vector_size(VL / 2 * sizeof(real)), aligned(sizeof(real)), may_alias));
UNSOFT_INLINE Wide widened(const real *p) { return __builtin_convertvector(*(const Narrow *)p, Wide); }

// The points of one key head, the keys that are new in up to QUERY_TILE rows (and those that leave), and one tile of similarities.
struct Geometry {
    const int64_t keys;
    const int width;  // a multiple of VL
    const real *x = nullptr;
    Buffer<real> norms, packed, lane_norms, arrived, similar, rho, logs, pulled, slopes;
    Buffer<real> leaving, leaving_norms, lost;  // WINDOW: points and norms of the keys that leave, and similarities to them
    Buffer<double> arrived_exactly;             // WINDOW: in place of `arrived`

    Geometry(int64_t keys, int width, bool backward, bool window)
        : keys(keys), width(width), norms(keys), packed(QUERY_TILE * width), lane_norms(QUERY_TILE), arrived(QUERY_TILE), similar(KEY_TILE * LANES),
          rho(KEY_TILE * LANES), logs(KEY_TILE * LANES), pulled(backward ? QUERY_TILE : 0), slopes(backward ? KEY_TILE * LANES : 0),
          leaving(window ? QUERY_TILE * width : 0), leaving_norms(window ? QUERY_TILE : 0), lost(window ? KEY_TILE * LANES : 0),
          arrived_exactly(window ? QUERY_TILE : 0) {}

    // Points (keys, width); present: 1 or 0 for each, or null.
    void set_points(const real *points, const real *present) {
        x = points;
        for (int64_t j = 0; j < keys; j += VL) {
            const int n = int(std::min<int64_t>(VL, keys - j));
            pack_lanes(x + j * width, width, n, VL, width, 1, packed);
            panel_product(n, width, x + j * width, width, packed, VL, similar, VL, 1);
            for (int k = 0; k < n; k++) norms[j + k] = present && present[j + k] == 0 ? ABSENT : similar[k * VL + k];
        }
    }
    // 1 for a key that counts itself, 0 for one that is absent.
    double self(int64_t j) const { return norms[j] != ABSENT; }

    // Lanes get the keys first .. first + n - 1, of which some may be before the first or after the last key there is.
    void pack_points(int64_t first, int n, real *to, real *lengths) {
        const int lanes = padded(n);
        for (int lane = 0; lane < lanes; lane++) {
            const int64_t l = first + lane;
            const bool there = lane < n && l >= 0 && l < keys;
            for (int k = 0; k < width; k++) to[k * lanes + lane] = there ? 2 * x[l * width + k] : real(0);
            lengths[lane] = there ? norms[l] : ABSENT;
        }
    }
    // Panel p gets the new keys from `first` on, one for each of n rows.
    void set_panel(int p, int64_t first, int n) {
        pack_points(first, n, packed + p * LANES * width, lane_norms + p * LANES);
        for (int lane = p * LANES; lane < p * LANES + padded(n); lane++) {
            arrived[lane] = 0;
            if (arrived_exactly.data) arrived_exactly[lane] = 0;
            if (pulled.data) pulled[lane] = 0;
        }
    }
    // ... and the keys from `first` on that its rows no longer see.
    void set_leaving(int p, int64_t first, int n) { pack_points(first, n, leaving + p * LANES * width, leaving_norms + p * LANES); }

    // Similarities of `count` keys from j0 on to the keys of panel p that come after them. Adds them to what those have on arrival.
    void compare(int p, int64_t first, int lanes, int64_t j0, int count) {
        panel_product(count, width, x + j0 * width, width, packed + p * LANES * width, lanes, similar, lanes, lanes / VL);
        const bool diagonal = j0 + count > first;
        for (int lane = 0; lane < lanes; lane += VL) {
            const V norm = load(lane_norms + p * LANES + lane), number = iota() + real(lane);
            V sum = load(arrived + p * LANES + lane);
            for (int key = 0; key < count; key++) {
                V y = vexp(smaller(load(similar + key * lanes + lane) - norms[j0 + key] - norm, V{}));
                if (diagonal) y = vselect(number > splat(real(j0 + key - first)), y, V{});
                sum += y;
                store(similar + key * lanes + lane, y);
            }
            store(arrived + p * LANES + lane, sum);
        }
    }

    // The same in a window, for the new keys and those that leave: from `first` and from `left` on, one for each row. Only pairs that a row
    // adds or takes away count: key j has come before the row's own key, and is still seen, so that its density stays what it was in
    // the last row that sees it.
    void compare_in_window(int p, int64_t first, int64_t left, int lanes, int64_t j0, int count) {
        panel_product(count, width, x + j0 * width, width, packed + p * LANES * width, lanes, similar, lanes, lanes / VL);
        panel_product(count, width, x + j0 * width, width, leaving + p * LANES * width, lanes, lost, lanes, lanes / VL);
        const bool cut = j0 + count > first || j0 < left + lanes;
        for (int lane = 0; lane < lanes; lane += VL) {
            const V norm = load(lane_norms + p * LANES + lane), other = load(leaving_norms + p * LANES + lane), number = iota() + real(lane);
            for (int key = 0; key < count; key++) {
                const int at = key * lanes + lane;
                V y = vexp(smaller(load(similar + at) - (norm + norms[j0 + key]), V{})), z = vexp(smaller(load(lost + at) - (other + norms[j0 + key]), V{}));
                if (cut) {
                    const I counts = (number > splat(real(j0 + key - first))) & (number < splat(real(j0 + key - left)));
                    y = vselect(counts, y, V{}), z = vselect(counts, z, V{});
                }
                store(similar + at, y), store(lost + at, z);
            }
        }
        for (int lane = 0; lane < lanes; lane += VL / 2) {
            Wide sum = {};
            for (int key = 0; key < count; key++) sum += widened(similar + key * lanes + lane);
            for (int t = 0; t < VL / 2; t++) arrived_exactly[p * LANES + lane + t] += sum[t];
        }
    }
    // What the rows of a panel add to the density of one key, less what they take away.
    double change(int key, int lanes) const {
        Wide sum = {};
        for (int lane = 0; lane < lanes; lane += VL / 2) sum += widened(similar + key * lanes + lane) - widened(lost + key * lanes + lane);
        double total = 0;
        for (int t = 0; t < VL / 2; t++) total += sum[t];
        return total;
    }

    // Calls body(key, lane) for the keys of a tile that are new in a panel.
    template <class Body> static void for_new(int64_t first, int n, int64_t j0, int count, Body body) {
        const int64_t from = std::max(first, j0), to = std::min(first + n, j0 + count);
        for (int64_t j = from; j < to; j++) body(int(j - j0), int(j - first));
    }

    // After `compare`: densities of the tile's keys in every row of the panel, as numbers and logarithms. `carry`: those before its first
    // row, and afterwards in its last; BACK: the other way round.
    template <bool BACK, bool WINDOW> void count_rows(int p, int64_t first, int n, int lanes, int64_t j0, int count, double *carry) {
        if (!BACK)
            for_new(first, n, j0, count, [&](int key, int lane) {
                const int at = p * LANES + lane;
                carry[j0 + key] = self(j0 + key) + (WINDOW ? arrived_exactly[at] : arrived[at]);
            });
        const int registers = lanes / VL;
        for (int key = 0; key < count; key++) {
            V sum[PANEL];
            real total = 0;
            for (int v = 0; v < registers; v++) {
                const int at = key * lanes + v * VL;
                sum[v] = sums_up_to(WINDOW ? load(similar + at) - load(lost + at) : load(similar + at)) + total;
                total = sum[v][VL - 1];
            }
            double &held = carry[j0 + key];
            const double added = WINDOW ? change(key, lanes) : total;
            if (BACK) held -= added;
            const real start = real(held);
            if (!BACK) held += added;
            for (int v = 0; v < registers; v++) {
                const V y = larger(sum[v] + start, splat(1));  // less only if the key is absent, or not there yet
                store(rho + key * lanes + v * VL, y);
                store(logs + key * lanes + v * VL, log_above_1(y));
            }
        }
    }

    // Adds the keys from .. upto - 1 to the densities of each other.
    template <bool WINDOW> void count_first(int64_t from, int64_t upto, double *carry) {
        for (int64_t first = from; first < upto; first += LANES) {
            const int n = int(std::min<int64_t>(LANES, upto - first)), lanes = padded(n);
            set_panel(0, first, n);
            if (WINDOW) set_leaving(0, keys, n);  // none leaves
            for (int64_t j0 = from; j0 < first + n; j0 += KEY_TILE) {
                const int count = int(std::min<int64_t>(KEY_TILE, first + n - j0));
                if (WINDOW) compare_in_window(0, first, from - lanes, lanes, j0, count);
                else compare(0, first, lanes, j0, count);
                for_new(first, n, j0, count, [&](int key, int lane) { carry[j0 + key] = self(j0 + key) + (WINDOW ? arrived_exactly[lane] : arrived[lane]); });
                for (int key = 0; key < count; key++) {
                    V sum = {};
                    for (int lane = 0; !WINDOW && lane < lanes; lane += VL) sum += load(similar + key * lanes + lane);
                    carry[j0 + key] += WINDOW ? change(key, lanes) : horizontal_sum(sum);
                }
            }
        }
    }

    // After `compare`: what a tile adds to dx and totals, from which the gradient of the points is 2 (dx - totals x). `slopes` has the
    // gradients of the densities of its keys in the panel's rows (if `rows`), and `later` their sums over all later rows, to which it adds them.
    // G_jl of a key j and a new key l is in the densities of both from row l on; in a window, until row i, in which j leaves. From then on
    // `later` of l is taken away again: its sum from row i on, times G_jl, when row i of the reverse order comes. The error of
    // that is float32's of the sums over the rows that see l, as is that of the whole gradient.
    template <bool WINDOW>
    void pull(int p, int64_t first, int64_t left, int n, int lanes, int64_t j0, int count, bool rows, double *later, real *dx, real *totals) {
        const int registers = lanes / VL;
        real *own = pulled + p * LANES;
        for (int key = 0; key < count; key++) {
            real sum = real(later[j0 + key]), total = 0;
            for (int v = registers - 1; v >= 0; v--) {
                real *at = slopes + key * lanes + v * VL;
                const V y = rows ? sums_from(load(at)) + total : V{};
                if (rows) total = y[0];
                store(at, y + sum);
            }
            later[j0 + key] += total;
        }
        for_new(first, n, j0, count, [&](int key, int lane) { own[lane] = real(later[j0 + key]); });
        real lane_totals[LANES], lost_totals[LANES];
        for (int lane = 0; lane < lanes; lane += VL) store(lane_totals + lane, V{}), store(lost_totals + lane, V{});
        for (int key = 0; key < count; key++) {
            V sum = {};
            for (int lane = 0; lane < lanes; lane += VL) {
                real *at = slopes + key * lanes + lane;
                if (WINDOW) {
                    real *gone = lost + key * lanes + lane;
                    const V z = -load(gone) * load(at);
                    store(gone, z);
                    store(lost_totals + lane, load(lost_totals + lane) + z);
                    sum += z;
                }
                const V y = load(similar + key * lanes + lane) * (load(at) + load(own + lane));
                store(at, y);
                store(lane_totals + lane, load(lane_totals + lane) + y);
                sum += y;
            }
            totals[j0 + key] += horizontal_sum(sum);
        }
        pull_points(first, n, lanes, j0, count, slopes, lane_totals, dx, totals);
        if (WINDOW) pull_points(left, n, lanes, j0, count, lost, lost_totals, dx, totals);
    }
    // Adds gradients of the similarities of `count` keys from j0 on to n keys from `first` on.
    void pull_points(int64_t first, int n, int lanes, int64_t j0, int count, const real *slopes, const real *lane_totals, real *dx, real *totals) {
        const int from = int(std::clamp<int64_t>(-first, 0, n)), to = int(std::clamp<int64_t>(keys - first, from, n));
        for (int lane = from; lane < to; lane++) totals[first + lane] += lane_totals[lane];
        accumulate<false>(count, width, to - from, slopes + from, lanes, x + (first + from) * width, width, dx + j0 * width, width);
        accumulate<true>(to - from, width, count, slopes + from, lanes, x + j0 * width, width, dx + (first + from) * width, width);
    }

    // The same for the keys from .. upto - 1 among each other, in no row of its own.
    void pull_first(int64_t from, int64_t upto, double *later, real *dx, real *totals) {
        for (int64_t first = from + (upto - from - 1) / LANES * LANES; upto > from && first >= from; first -= LANES) {
            const int n = int(std::min<int64_t>(LANES, upto - first)), lanes = padded(n);
            set_panel(0, first, n);
            for (int64_t j0 = from + (first + n - from - 1) / KEY_TILE * KEY_TILE; j0 >= from; j0 -= KEY_TILE) {
                const int count = int(std::min<int64_t>(KEY_TILE, first + n - j0));
                compare(0, first, lanes, j0, count);
                pull<false>(0, first, 0, n, lanes, j0, count, false, later, dx, totals);
            }
        }
    }
};
