// Statistics of the weights of a block, which are kept until the block has met all its keys: shares of a row's mass, and with them
// entropies and sums over columns, are only known then. A block has at most QUERY_TILE rows, so this memory is linear in the keys, and
// reading it once more costs a fraction of computing the weights again.
#pragma once
#include <mutex>
#include "call.h"

// Where results go. Filled by unsoft/engines/native/binding.py, in this order; all (batch, heads, queries) and contiguous, except the last.
struct Statistics {
    real *entropy, *sparsity, *row_sum, *negative_share;
    int64_t *top_key;
    real *top_weight, *first_share;
    double *received;  // (batch, heads, keys), zero at the start; in double, since blocks add to it in the order in which they end
};

// The logarithm to base 2 of positive normal numbers, and a number of the size of 1000 of 0 and of denormal ones.
UNSOFT_INLINE V log2_of_share(V x) {
    constexpr int mantissa = SINGLE ? 23 : 52;
    const I one = (I)splat(1), bits = (I)x;
    V exponent = __builtin_convertvector((bits - one) >> mantissa, V);
    if constexpr (SINGLE) {
        // log2(1 + t) by a polynomial without constant term, 2e-6 off at most, and not at all at powers of 2.
        const V t = (V)((bits & ((word(1) << mantissa) - 1)) | one) - real(1);
        V p = splat(real(-0.0264574134));
        p = p * t + real(0.123451381);
        p = p * t - real(0.279538022);
        p = p * t + real(0.458270748);
        p = p * t - real(0.718281906);
        p = p * t + real(1.44255314);
        return p * t + exponent;
    } else {
        // 2 atanh(y) of y = (f - 1) / (f + 1) with f between sqrt(1/2) and sqrt(2): 0.0295^11 is below the last bit.
        V f = (V)((bits & ((word(1) << mantissa) - 1)) | one);
        const I above = f > splat(real(1.4142135623730951));
        f = vselect(above, f * real(0.5), f);
        exponent = vselect(above, exponent + real(1), exponent);
        const V y = (f - real(1)) / (f + real(1)), square = y * y;
        V p = splat(real(1) / 21);
        for (int odd = 19; odd > 0; odd -= 2) p = p * square + real(1) / odd;
        return y * p * real(2.8853900817779268) + exponent;
    }
}

// The weights of one block as the formula gave them, relative to the peaks of their rows at that time: [tile][panel][key][lane].
class Weights {
    static constexpr real SLACK = 8 * std::numeric_limits<real>::epsilon();  // rescaling may have made clones this different
    Block block = {};
    int64_t j_begin = 0, j_end = 0;
    int count = 0, lanes = 0, tile_keys = 1, tiles = 0;
    Buffer<real> data, peaks, columns;  // peaks: of each row after each tile
    Buffer<int> limits;                 // keys of each tile that each panel has met
    real last_peak[QUERY_TILE], inverse_size[QUERY_TILE];
    real size[QUERY_TILE], top[QUERY_TILE], top_tile[QUERY_TILE];  // sum and largest of |w|, relative to the running peak; where that is
    real share[QUERY_TILE], signed_share[QUERY_TILE], energy[QUERY_TILE], log_sum[QUERY_TILE];  // sums over a row

public:
    Weights(const Call &c, int rows)
        : data(size_t(padded(rows)) * c.keys), peaks(size_t(padded(rows)) * (c.keys / KEY_TILE + 1)), columns(c.keys),
          limits(size_t(PANELS) * (c.keys / KEY_TILE + 1)) {}

    void begin(const Block &rows, int64_t first_key, int64_t end, int keys_per_tile) {
        block = rows, count = block.count(), lanes = padded(count);
        j_begin = first_key, j_end = std::max(first_key, end), tile_keys = keys_per_tile, tiles = int((j_end - j_begin + tile_keys - 1) / tile_keys);
        std::fill_n((int *)limits, PANELS * tiles, 0);
        for (real *x : {size, top, top_tile, share, signed_share, energy, log_sum}) std::fill_n(x, lanes, real(0));
    }
    // Weights of the panel of queries from `first` on in tile `number`.
    real *tile(int number, int first) const { return data + int64_t(number) * tile_keys * lanes + long(first) * height(number); }

    // Takes note of a tile that the formula has filled in. Few queries are rows, which are copied to lanes.
    void add(const Tile &t, int number, int first, int rows, bool few, bool rescaled) {
        const int width = padded(rows);
        real *w = tile(number, first);
        for (int key = 0; few && key < t.keys; key++)
            for (int lane = 0; lane < width; lane++) w[key * width + lane] = lane < rows ? t.s[long(lane) * t.stride + key] : real(0);
        limits[number * PANELS + first / LANES] = t.keys;
        std::copy_n(t.peak, rows, peaks + long(number) * lanes + first);
        std::copy_n(t.peak, rows, last_peak + first);
        for (int lane = 0; rescaled && lane < rows; lane++) size[first + lane] *= t.rescale[lane], top[first + lane] *= t.rescale[lane];
        if (width == 3 * VL) sum_sizes<3>(w, t.keys, first, number);
        else if (width == 2 * VL) sum_sizes<2>(w, t.keys, first, number);
        else sum_sizes<1>(w, t.keys, first, number);
    }

    // After the last tile, when 1 / norm of each row is known.
    void measure(const Call &c, const Rows &rows, const Statistics &to, std::mutex &adding) {
        for (int lane = 0; lane < lanes; lane++) {  // with the sign of the norm; 0 in rows without mass
            const bool live = lane < count && rows.inverse[lane] != 0 && size[lane] >= std::numeric_limits<real>::min();
            inverse_size[lane] = live ? std::copysign(1 / size[lane], rows.inverse[lane]) : real(0);
        }
        for (int member = 0; member < block.members; member++) {
            sum_shares(member * block.span, (member + 1) * block.span);
            double *sum = to.received + (block.b * c.heads + block.h0 + member) * c.keys + j_begin;
            const std::lock_guard<std::mutex> lock(adding);
            for (int64_t key = 0; key < j_end - j_begin; key++) sum[key] += columns[key];
        }
        for (int lane = 0; lane < count; lane++)
            write(rows, to, lane, (block.b * c.heads + block.head(lane)) * c.queries + block.row(lane));
    }

private:
    int height(int number) const { return int(std::min<int64_t>(tile_keys, j_end - j_begin - int64_t(number) * tile_keys)); }
    int width(int first) const { return padded(std::min(LANES, count - first)); }

    template <int NV> void sum_sizes(const real *w, int keys, int first, int number) {
        V sum[NV] = {}, largest[NV] = {};
        for (int key = 0; key < keys; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                const V x = vabs(load(w + (key * NV + v) * VL));
                sum[v] += x, largest[v] = larger(largest[v], x);
            }
        for (int v = 0; v < NV; v++) {
            const int lane = first + v * VL;
            store(size + lane, load(size + lane) + sum[v]);
            const V before = load(top + lane);
            const I higher = largest[v] > before * (1 + SLACK);
            store(top + lane, vselect(higher, largest[v], before));
            store(top_tile + lane, vselect(higher, splat(real(number)), load(top_tile + lane)));
        }
    }

    // Adds to the sums over rows begin .. end - 1, and fills in the sums over their columns.
    void sum_shares(int begin, int end) {
        real column[KEY_TILE_ROWS * VL];
        for (int number = 0; number < tiles; number++) {
            std::fill_n(column, height(number) * VL, real(0));
            for (int first = 0; first < count; first += LANES) {
                const int registers = width(first) / VL, limit = limits[number * PANELS + first / LANES];
                if (!limit || first + LANES <= begin || first >= end) continue;
                V factor[PANEL];  // from a weight of this tile to the share of its row's mass
                for (int v = 0; v < registers; v++) {
                    const int lane = first + v * VL;
                    const V index = iota() + real(lane), inverse = load(inverse_size + lane);
                    const I own = (index >= splat(real(begin))) & (index < splat(real(end))) & (inverse != V{});
                    factor[v] = vselect(own, inverse * vexp(load(peaks + long(number) * lanes + lane) - load(last_peak + lane)), V{});
                }
                const real *w = tile(number, first);
                if (registers == 3) sum_panel<3>(w, limit, first, factor, column);
                else if (registers == 2) sum_panel<2>(w, limit, first, factor, column);
                else sum_panel<1>(w, limit, first, factor, column);
            }
            for (int key = 0; key < height(number); key++) columns[int64_t(number) * tile_keys + key] = horizontal_sum(load(column + key * VL));
        }
    }
    template <int NV> void sum_panel(const real *w, int keys, int first, const V *factor, real *column) {
        V shares[NV] = {}, signed_shares[NV] = {}, squares[NV] = {}, logs[NV] = {};
        I sizes[NV];  // keeps the size of a number, and nothing of rows without a factor, which may be padding
        for (int v = 0; v < NV; v++) sizes[v] = (factor[v] != V{}) & ~(I)splat(real(-0.0));
        for (int key = 0; key < keys; key++) {
            V sum = load(column + key * VL);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                __builtin_prefetch(w + ((key + 12) * NV + v) * VL);  // a block's weights do not fit the second cache
                const V x = load(w + (key * NV + v) * VL) * factor[v], p = (V)((I)x & sizes[v]);
                sum += p;
                shares[v] += p, signed_shares[v] += x;
                squares[v] += p * p;
                logs[v] += p * log2_of_share(p);
            }
            store(column + key * VL, sum);
        }
        for (int v = 0; v < NV; v++) {
            const int lane = first + v * VL;
            store(share + lane, load(share + lane) + shares[v]), store(signed_share + lane, load(signed_share + lane) + signed_shares[v]);
            store(energy + lane, load(energy + lane) + squares[v]), store(log_sum + lane, load(log_sum + lane) + logs[v]);
        }
    }

    // A row without mass is flat, and prefers no key (unsoft/measure/row_measures.py).
    void write(const Rows &rows, const Statistics &to, int lane, int64_t at) const {
        const real n = rows.seen[lane], p = share[lane];
        to.top_key[at] = -1;
        to.row_sum[at] = to.negative_share[at] = to.top_weight[at] = to.first_share[at] = 0;
        to.entropy[at] = std::log(std::max(n, real(1))), to.sparsity[at] = 1;
        if (inverse_size[lane] == 0) return;
        to.entropy[at] = std::max(std::log(p) - log_sum[lane] / p * real(0.69314718055994531), real(0));
        to.sparsity[at] = p / std::sqrt(n * energy[lane]);
        to.row_sum[at] = signed_share[lane] * size[lane] * std::fabs(rows.inverse[lane]);
        to.negative_share[at] = (p - signed_share[lane]) / (2 * p);
        const int number = int(top_tile[lane]), first = lane / LANES * LANES, step = width(first);
        const real *w = tile(number, first) + lane - first;
        int best = 0;
        for (int key = 1; key < limits[number * PANELS + lane / LANES]; key++)
            if (std::fabs(w[key * step]) > std::fabs(w[best * step])) best = key;
        to.top_key[at] = j_begin + int64_t(number) * tile_keys + best;
        to.top_weight[at] = w[best * step] * std::exp(peaks[long(number) * lanes + lane] - last_peak[lane]) * rows.inverse[lane];
        if (j_begin == 0 && limits[lane / LANES] > 0)
            to.first_share[at] = std::fabs(tile(0, first)[lane - first] * inverse_size[lane]) * std::exp(peaks[lane] - last_peak[lane]);
    }
};
