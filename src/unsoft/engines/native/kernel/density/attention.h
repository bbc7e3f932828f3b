// Attention with every weight and its mass divided by rho_ij^p: forward and backward, one tile of densities for all heads of a group.
//
// The rows of a key head are worked on in order, since the densities of a row are those of the row before it and one key more; the
// backward pass takes them in reverse. Units that are left over when threads do not divide the key heads are cut into parts by rows.
// Each part counts the keys before its first row by itself, so no part waits for another. In a sliding window keys leave as well, and what
// is known of a key after the last row that sees it is its density in that row, from which the backward pass begins.
#pragma once
#include "backward.h"
#include "density/geometry.h"

// Filled by unsoft/engines/native/density.py: 64-bit fields only, in this order.
struct Density {
    const real *x;         // points (batch, kv_heads, keys, width), contiguous, the width a multiple of VL
    const real *present;   // (batch, kv_heads, keys): 1 or 0; or null
    int64_t width;
    int64_t additive;      // a float mask is added to the logit; otherwise it multiplies weight and mass
    const real *power;     // (heads,): p
    const double *before;  // (batch, kv_heads, keys): densities among the keys before the first row, or null: they are counted
    double *rho;           // (batch, kv_heads, keys): densities in the last row that sees a key; out of the forward pass, into the backward pass
    real *dx;              // backward: as x
    double *dpower;        // (heads,), zero at the start
    int64_t windowed;      // row i sees the keys i + lower .. i + upper, as far as there are such; the spans of the call say the same
    int64_t lower, upper;
};

// A key head, or a part of its rows.
struct DensityItem {
    int64_t unit, begin, end;
    bool last;  // it ends with the last row
};

struct DensityCall {
    const Call &c;
    const Density &d;
    const int64_t group = c.heads / c.kv_heads, units = c.batch * c.kv_heads;
    const bool windowed = d.windowed, moving = c.causal || windowed;  // moving: each row sees one key more than the last, or another one

    // The keys that the row before row i sees; all of them if rows see all.
    Span before(int64_t i) const {
        const int64_t last = moving ? std::clamp<int64_t>(first_new(i), 0, c.keys) : c.keys;
        return {windowed ? std::clamp<int64_t>(i - 1 + d.lower, 0, last) : 0, last};
    }
    // The key that row i sees and the row before does not: negative if rows begin before the keys.
    int64_t first_new(int64_t i) const { return i + (windowed ? d.upper : c.causal_offset); }
    // The key that the row before sees and row i does not.
    int64_t first_left(int64_t i) const { return i + d.lower - 1; }
    int64_t whole() const { return units - units % c.threads; }
    int64_t parts() const {
        const int64_t over = units % c.threads, tiles = (c.queries + QUERY_TILE - 1) / QUERY_TILE;
        return over ? std::clamp<int64_t>(c.threads / std::gcd(over, c.threads), 1, tiles) : 1;
    }
    std::vector<DensityItem> items() const {
        std::vector<DensityItem> all;
        const int64_t tiles = (c.queries + QUERY_TILE - 1) / QUERY_TILE, cut = parts();
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t count = unit < whole() ? 1 : cut;
            int64_t begin = 0;
            for (int64_t part = 1; part <= count; part++) {  // causal rows get longer without a window: parts of about equal area
                const double share = double(part) / count;
                const int64_t tile = part == count ? tiles : std::max<int64_t>(int64_t(tiles * (moving && !windowed ? std::sqrt(share) : share)), 1);
                const int64_t end = std::max(begin, std::min(tile * QUERY_TILE, c.queries));
                all.push_back({unit, begin, end, part == count});
                begin = end;
            }
        }
        return all;
    }
    void start(Geometry &g, int64_t unit) const {
        g.set_points(d.x + unit * c.keys * d.width, d.present ? d.present + unit * c.keys : nullptr);
    }
    // Panels of rows i0 .. i0 + count - 1.
    void set_panels(Geometry &g, int64_t i0, int count) const {
        for (int p = 0; moving && p * LANES < count; p++) {
            const int n = std::min(LANES, count - p * LANES);
            g.set_panel(p, first_new(i0 + p * LANES), n);
            if (windowed) g.set_leaving(p, first_left(i0 + p * LANES), n);
        }
    }
    // Similarities of a tile to the keys of the panel of rows i .. i + n - 1, and its densities in them.
    template <bool BACK> void count_rows(Geometry &g, int p, int64_t i, int n, int64_t j0, int count, double *carry) const {
        const int lanes = padded(n);
        if (windowed) {
            g.compare_in_window(p, first_new(i), first_left(i), lanes, j0, count);
            g.count_rows<BACK, true>(p, first_new(i), n, lanes, j0, count, carry);
        } else {
            g.compare(p, first_new(i), lanes, j0, count);
            g.count_rows<BACK, false>(p, first_new(i), n, lanes, j0, count, carry);
        }
    }
    // The densities in the row before row i. Keys that left earlier keep what they have.
    void count_first(Geometry &g, int64_t i, double *carry) const {
        const Span span = before(i);
        std::fill(carry + span.first, carry + c.keys, 0.0);
        if (windowed) g.count_first<true>(span.first, span.last, carry);
        else g.count_first<false>(span.first, span.last, carry);
    }
    // The keys that rows begin .. end - 1 see and later ones do not.
    Span finished(const DensityItem &item) const {
        if (!windowed) return {0, item.last ? c.keys : 0};
        auto first_seen = [&](int64_t i) { return std::clamp<int64_t>(i + d.lower, 0, c.keys); };
        return {item.begin ? first_seen(item.begin) : 0, item.last ? c.keys : first_seen(item.end)};
    }
};

// Of rows that see all keys: the logarithm of each key's density, in every lane.
static void spread_logs(Geometry &g, const double *carry, int64_t j0, int count, int lanes) {
    for (int key = 0; key < count; key++) {
        const real y = std::max(real(carry[j0 + key]), real(1)), logarithm = std::log(y);
        for (int lane = 0; lane < lanes; lane += VL) store(g.rho + key * lanes + lane, splat(y)), store(g.logs + key * lanes + lane, splat(logarithm));
    }
}

// Brings the factor into a tile: s - p log rho where a float mask is added to logits, otherwise such a mask in `bias`.
static inline void add_logs(const Density &d, const Geometry &g, int64_t h, Tile &t, real *bias) {
    const V p = splat(-d.power[h]);
    const int numbers = t.keys * t.stride;
    if (d.additive) {
        for (int at = 0; at < numbers; at += VL) store(t.s + at, load(t.s + at) + load(g.logs + at) * p);
        return;
    }
    for (int at = 0; at < numbers; at += VL) store(bias + at, (t.bias ? load(t.bias + at) : V{}) + load(g.logs + at) * p);
    t.bias = bias;
}

typedef std::vector<std::unique_ptr<ForwardScratch>> ForwardHeads;

// Up to QUERY_TILE rows from i0 on, of all heads of one group.
static bool density_rows(const DensityCall &dc, Geometry &g, ForwardHeads &heads, real *bias, int64_t unit, int64_t i0, int count, double *carry) {
    const Call &c = dc.c;
    const int64_t b = unit / c.kv_heads, hk = unit % c.kv_heads;
    const bool last = i0 + count == c.queries;
    bool finite = true;
    for (int64_t member = 0; member < dc.group; member++) {
        ForwardScratch &w = *heads[member];
        const int64_t h = hk * dc.group + member;
        for (int index = 0; index < count; index++) w.rows.set(c, index, b, h, i0 + index);
        w.rows.pad(count, padded(count));
        long ld;
        const real *q = c.q.rows(b, h, i0, count, int(c.width), w.width, w.query_rows, ld);
        finite &= all_finite(q, ld, count, w.width) & all_finite(w.rows.fields, QUERY_TILE, w.rows.query_field_count, count);
        for (int first = 0; first < count; first += LANES) {
            const int n = std::min(LANES, count - first);
            pack_lanes(q + first * ld, ld, n, padded(n), int(c.width), real(c.scale), w.packed + first * w.width);
        }
        std::fill_n((real *)w.sums, long(padded(count)) * w.value_width, real(0));
    }
    dc.set_panels(g, i0, count);
    const Extent whole = extent_of(c, b, i0, i0 + count - 1);
    const int64_t begin = whole.first_min, end = whole.last_max;
    ForwardScratch &shared = *heads[0];
    for (int64_t j0 = begin; j0 < end; j0 += KEY_TILE) {
        const int keys = int(std::min<int64_t>(KEY_TILE, end - j0));
        long ldk, ldv;
        const real *k = c.k.rows(b, hk, j0, keys, int(c.width), shared.width, shared.keys, ldk);
        const real *v = c.v.rows(b, hk, j0, keys, int(c.value_width), shared.value_width, shared.values, ldv);
        if (last || dc.windowed) finite &= all_finite(k, ldk, keys, shared.width);
        for (int first = 0; first < count; first += LANES) {
            const int n = std::min(LANES, count - first), lanes = padded(n), p = first / LANES;
            const Extent e = extent_of(c, b, i0 + first, i0 + first + n - 1);
            const int64_t j = std::max(j0, e.first_min);
            const int skipped = int(j - j0), seen_keys = int(std::min(j0 + keys, e.last_max) - j);
            if (seen_keys <= 0) continue;
            if (dc.moving) dc.count_rows<false>(g, p, i0 + first, n, j, seen_keys, carry);
            else spread_logs(g, carry, j, seen_keys, lanes);
            for (int64_t member = 0; member < dc.group; member++) {
                ForwardScratch &w = *heads[member];
                const int64_t h = hk * dc.group + member;
                Tile t = {};
                fill_tile(c, w.rows, t, first, h);
                t.keys = seen_keys, t.s = w.logits, t.queries = t.stride = lanes;
                set_keys(c, w.rows, t, b, j);
                finite &= set_key_fields(c, w.rows, t, b, h, j, t.keys);
                for (int index = first; index < first + n; index++) w.rows.limit[index] = limit(c, b, i0 + index, j, t.keys);
                const Seen seen = bring_masks(c, t, b, j, n, true, e.first_max > j, w.visible, w.bias, t.limit, w.rows.seen + first, nullptr, 0,
                                              [&](int index) { return std::make_pair(h, i0 + first + index); });
                if (seen == NONE) continue;
                panel_product(t.keys, int(c.width), k + skipped * ldk, ldk, w.packed + first * w.width, lanes, w.logits, lanes, lanes / VL);
                add_logs(dc.d, g, h, t, bias);
                t.plain = seen == ALL && e.last_min >= j + t.keys && !t.bias && !t.drop_key;
                real *sums = w.sums + long(first) * w.value_width;
                if (c.mechanism->forward(t)) rescale_sums(sums, n, w.value_width, t.rescale);
                accumulate<true>(n, w.value_width, t.keys, w.logits, lanes, v + skipped * ldv, ldv, sums, w.value_width);
            }
        }
    }
    for (int64_t member = 0; member < dc.group; member++) finite &= write_outputs(c, *heads[member], {b, hk * dc.group + member, i0, 1, count});
    return finite;
}

static bool density_forward(const Call &c, const Density &d) {
    const DensityCall dc{c, d};
    const std::vector<DensityItem> items = dc.items();
    const bool tiny = c.batch * c.heads * c.queries * c.keys * (c.width + c.value_width) < 1 << 17;  // as in forward.h
    std::atomic<bool> finite{true};
    share(tiny ? 1 : int(c.threads), int64_t(items.size()), [&](auto next) {
        ForwardHeads heads;
        for (int64_t member = 0; member < dc.group; member++)
            heads.push_back(std::make_unique<ForwardScratch>(c, int(std::min<int64_t>(QUERY_TILE, c.queries)), false));
        Geometry g(c.keys, int(d.width), false, dc.windowed);
        Buffer<double> carry(c.keys);
        Buffer<real> bias(d.additive ? 0 : KEY_TILE * LANES);
        for (int64_t number; (number = next()) < int64_t(items.size());) {
            const DensityItem &item = items[number];
            dc.start(g, item.unit);
            if (d.before && item.begin == 0) std::copy_n(d.before + item.unit * c.keys, c.keys, (double *)carry);
            else {
                for (int64_t j = 0; j < dc.before(item.begin).first; j++) carry[j] = g.self(j);
                dc.count_first(g, item.begin, carry);
            }
            bool good = true;
            for (int64_t i0 = item.begin; i0 < item.end; i0 += QUERY_TILE)
                good &= density_rows(dc, g, heads, bias, item.unit, i0, int(std::min<int64_t>(QUERY_TILE, item.end - i0)), carry);
            const Span done = dc.finished(item);
            std::copy((double *)carry + done.first, (double *)carry + done.last, d.rho + item.unit * c.keys + done.first);
            if (!good) finite = false;
        }
    });
    return finite;
}

typedef std::vector<std::unique_ptr<BackwardScratch>> BackwardHeads;

// What one item adds up for its keys: dk, dv, the gradients of fields, dx and the totals that belong to it.
struct DensitySums {
    const size_t dk, dv, fields, dx, totals;
    explicit DensitySums(const DensityCall &dc)
        : dk(size_t(dc.c.keys) * padded(dc.c.width)), dv(size_t(dc.c.keys) * padded(dc.c.value_width)),
          fields(dc.c.key_field_gradient ? size_t(dc.c.keys) * dc.group * dc.c.mechanism->key_fields : 0), dx(size_t(dc.c.keys) * dc.d.width),
          totals(size_t(dc.c.keys)) {}
    size_t size() const { return dk + dv + fields + dx + totals; }
};

static bool density_rows_backward(const DensityCall &dc, Geometry &g, BackwardHeads &heads, int64_t unit, int64_t i0, int count, double *carry,
                                  double *later, const DensitySums &parts, real *sums, double *dparameters, double *dpower) {
    const Call &c = dc.c;
    const int64_t b = unit / c.kv_heads, hk = unit % c.kv_heads;
    real *dk = sums, *dv = dk + parts.dk, *fields = dv + parts.dv, *dx = fields + parts.fields, *totals = dx + parts.dx;
    const int64_t field_count = parts.fields ? c.mechanism->key_fields : 0;
    std::vector<Tile> all(dc.group);
    std::vector<std::pair<const real *, long>> queries(dc.group), gradients(dc.group);
    for (int64_t member = 0; member < dc.group; member++) {
        BackwardScratch &w = *heads[member];
        Rows &rows = w.rows;
        const int64_t h = hk * dc.group + member;
        long ldq, ldg, ldo;
        const real *q = c.q.rows(b, h, i0, count, int(c.width), w.width, w.query_rows, ldq);
        const real *grad = c.grad_out.rows(b, h, i0, count, int(c.value_width), w.value_width, w.grad_rows, ldg);
        const real *o = c.saved_out.rows(b, h, i0, count, int(c.value_width), w.value_width, w.out_rows, ldo);
        queries[member] = {q, ldq}, gradients[member] = {grad, ldg};
        for (int index = 0; index < count; index++) {
            rows.set(c, index, b, h, i0 + index);
            const int64_t at = (b * c.heads + h) * c.queries + i0 + index;
            rows.peak[index] = c.peak[at], rows.total[index] = c.total[at];
            V delta = {};
            for (int x = 0; x < w.value_width; x += VL) delta += load(grad + index * ldg + x) * load(o + index * ldo + x);
            rows.delta[index] = horizontal_sum(delta);
        }
        rows.pad(count, padded(count));
        Tile &t = all[member] = {};
        fill_tile(c, rows, t, 0, h);
        t.queries = padded(count), t.parameter_gradient = c.parameter_gradient ? dparameters + member * c.mechanism->parameters : nullptr;
        if (c.query_field_gradient) {
            std::fill_n((real *)rows.field_gradient, rows.query_field_count * QUERY_TILE, real(0));
            t.query_field_gradient = rows.field_gradient;
        }
        c.mechanism->prepare(t, rows.total, rows.delta, rows.inverse, rows.slope);
        for (int first = 0; first < count; first += LANES) {
            const int n = std::min(LANES, count - first);
            pack_lanes(q + first * ldq, ldq, n, padded(n), int(c.width), real(c.scale), w.packed_queries + first * w.width);
            pack_lanes(grad + first * ldg, ldg, n, padded(n), int(c.value_width), 1, w.packed_grads + first * w.value_width);
        }
        std::fill_n((real *)w.dq, long(count) * w.width, real(0));
    }
    dc.set_panels(g, i0, count);
    const Extent whole = extent_of(c, b, i0, i0 + count - 1);
    const int64_t begin = whole.first_min, end = whole.last_max;
    BackwardScratch &shared = *heads[0];
    for (int64_t j0 = begin + (end - begin - 1) / KEY_TILE * KEY_TILE; end > begin && j0 >= begin; j0 -= KEY_TILE) {
        const int keys = int(std::min<int64_t>(KEY_TILE, end - j0));
        long ldk, ldv;
        const real *k = c.k.rows(b, hk, j0, keys, int(c.width), shared.width, shared.keys, ldk);
        const real *v = c.v.rows(b, hk, j0, keys, int(c.value_width), shared.value_width, shared.values, ldv);
        for (int64_t member = 0; field_count && member < dc.group; member++) {
            Rows &rows = heads[member]->rows;
            std::fill_n((real *)rows.key_gradient, rows.key_field_count * KEY_TILE * VL, real(0));
        }
        for (int first = (count - 1) / LANES * LANES; first >= 0; first -= LANES) {
            const int n = std::min(LANES, count - first), lanes = padded(n), p = first / LANES;
            const Extent e = extent_of(c, b, i0 + first, i0 + first + n - 1);
            const int64_t j = std::max(j0, e.first_min);
            const int skipped = int(j - j0), seen_keys = int(std::min(j0 + keys, e.last_max) - j), numbers = seen_keys * lanes;
            if (seen_keys <= 0) continue;
            const int64_t new_key = dc.first_new(i0 + first), left = dc.first_left(i0 + first);
            if (dc.moving) dc.count_rows<true>(g, p, i0 + first, n, j, seen_keys, carry);
            else spread_logs(g, carry, j, seen_keys, lanes);
            std::fill_n((real *)g.slopes, numbers, real(0));
            for (int64_t member = 0; member < dc.group; member++) {
                BackwardScratch &w = *heads[member];
                Rows &rows = w.rows;
                const int64_t h = hk * dc.group + member;
                const auto [q, ldq] = queries[member];
                const auto [grad, ldg] = gradients[member];
                Tile t = all[member];
                fill_tile(c, rows, t, first, h);
                t.keys = seen_keys, t.s = w.logits, t.p = w.slopes, t.queries = t.stride = lanes;
                set_keys(c, rows, t, b, j);
                set_key_fields(c, rows, t, b, h, j, t.keys);
                if (c.query_field_gradient) t.query_field_gradient = rows.field_gradient + first;
                if (field_count) t.key_field_gradient = rows.key_gradient + skipped * VL, t.key_field_gradient_step = KEY_TILE * VL;
                t.inverse = rows.inverse + first, t.slope = rows.slope + first;
                t.bias_gradient = dc.d.additive ? nullptr : w.bias_gradient.data;
                for (int index = first; index < first + n; index++) rows.limit[index] = limit(c, b, i0 + index, j, t.keys);
                const Seen seen = bring_masks(c, t, b, j, n, true, e.first_max > j, w.visible, w.bias, t.limit, rows.seen + first, nullptr, 0,
                                              [&](int index) { return std::make_pair(h, i0 + first + index); });
                if (seen == NONE) continue;
                panel_product(t.keys, int(c.width), k + skipped * ldk, ldk, w.packed_queries + first * w.width, lanes, w.logits, lanes, lanes / VL);
                panel_product(t.keys, int(c.value_width), v + skipped * ldv, ldv, w.packed_grads + first * w.value_width, lanes, w.slopes, lanes, lanes / VL);
                add_logs(dc.d, g, h, t, w.bias);
                t.plain = seen == ALL && e.last_min >= j + t.keys && !t.bias && !t.drop_key && n == lanes;
                c.mechanism->backward(t);
                // d loss / d log rho = -p times that of the mask, which is that of the logit where the mask is added to it.
                const real *masks = dc.d.additive ? w.slopes : w.bias_gradient;
                const V power = splat(dc.d.power[h]);
                V sum = {};
                for (int at = 0; at < numbers; at += VL) {
                    const V y = load(masks + at);
                    sum += y * load(g.logs + at);
                    store(g.slopes + at, load(g.slopes + at) - y * power);
                }
                dpower[member] -= horizontal_sum(sum);
                accumulate<false>(t.keys, w.value_width, n, w.logits, lanes, grad + first * ldg, ldg, dv + j * w.value_width, w.value_width);
                accumulate<false>(t.keys, w.width, n, w.slopes, lanes, q + first * ldq, ldq, dk + j * w.width, w.width);
                accumulate<true>(n, w.width, t.keys, w.slopes, lanes, k + skipped * ldk, ldk, w.dq + first * w.width, w.width);
            }
            if (dc.moving) {
                for (int at = 0; at < numbers; at += VL) store(g.slopes + at, load(g.slopes + at) / load(g.rho + at));
                if (dc.windowed) g.pull<true>(p, new_key, left, n, lanes, j, seen_keys, true, later, dx, totals);
                else g.pull<false>(p, new_key, left, n, lanes, j, seen_keys, true, later, dx, totals);
            } else {
                for (int key = 0; key < seen_keys; key++) {
                    V sum = {};
                    for (int lane = 0; lane < lanes; lane += VL) sum += load(g.slopes + key * lanes + lane);
                    later[j + key] += horizontal_sum(sum) / g.rho[key * lanes];
                }
            }
        }
        for (int64_t member = 0; field_count && member < dc.group; member++)
            add_key_fields(c, heads[member]->rows, j0, keys, fields + member * field_count * c.keys);
    }
    bool finite = true;
    for (int64_t member = 0; member < dc.group; member++) {
        BackwardScratch &w = *heads[member];
        const int64_t h = hk * dc.group + member;
        if (c.query_field_gradient) finite &= write_query_fields(c, w.rows, b, h, i0, count);
        for (int index = 0; index < count; index++) finite &= c.dq.write(b, h, i0 + index, int(c.width), w.dq + long(index) * w.width, real(c.scale));
    }
    return finite;
}

static bool write_density_sums(const DensityCall &dc, int64_t unit, const DensitySums &parts, const real *sums) {
    const Call &c = dc.c;
    const real *dv = sums + parts.dk, *fields = dv + parts.dv, *dx = fields + parts.fields, *totals = dx + parts.dx;
    const int64_t width = dc.d.width;
    for (int64_t j = 0; j < c.keys; j++)
        for (int64_t at = j * width; at < (j + 1) * width; at++)
            dc.d.dx[unit * c.keys * width + at] = 2 * (dx[at] - totals[j] * dc.d.x[unit * c.keys * width + at]);
    return write_keys(c, unit, sums, dv, fields) & all_finite(dc.d.dx + unit * c.keys * width, width, int(c.keys), int(width));
}

static bool density_backward(const Call &c, const Density &d) {
    const DensityCall dc{c, d};
    const std::vector<DensityItem> items = dc.items();
    const int64_t whole = dc.whole(), cut = dc.parts(), over = dc.units - whole, count = int64_t(items.size());
    const DensitySums parts(dc);
    const int64_t parameters = c.mechanism->parameters;
    Buffer<real> shared_sums(cut > 1 ? parts.size() * over * cut : 0);
    std::vector<double> dparameters(count * dc.group * parameters, 0.0), dpower(count * dc.group, 0.0);
    std::atomic<bool> finite{true};
    share(int(c.threads), count, [&](auto next) {
        BackwardHeads heads;
        for (int64_t member = 0; member < dc.group; member++) heads.push_back(std::make_unique<BackwardScratch>(c));
        Geometry g(c.keys, int(d.width), true, dc.windowed);
        Buffer<double> carry(c.keys), later(c.keys);
        Buffer<real> own_sums(parts.size());
        for (int64_t number; (number = next()) < count;) {
            const DensityItem &item = items[number];
            real *sums = cut > 1 && number >= whole ? shared_sums + parts.size() * (number - whole) : own_sums;
            std::fill_n(sums, parts.size(), real(0));
            std::fill_n((double *)later, c.keys, 0.0);
            dc.start(g, item.unit);
            std::copy_n(d.rho + item.unit * c.keys, c.keys, (double *)carry);
            if (!item.last && dc.moving) dc.count_first(g, item.end, carry);
            bool good = true;
            const int64_t tiles = (item.end - item.begin + QUERY_TILE - 1) / QUERY_TILE;
            for (int64_t tile = tiles - 1; tile >= 0; tile--) {
                const int64_t i0 = item.begin + tile * QUERY_TILE;
                good &= density_rows_backward(dc, g, heads, item.unit, i0, int(std::min<int64_t>(QUERY_TILE, item.end - i0)), carry, later, parts, sums,
                                              dparameters.data() + number * dc.group * parameters, dpower.data() + number * dc.group);
            }
            real *dx = sums + parts.dk + parts.dv + parts.fields;
            const Span earlier = dc.before(item.begin);
            g.pull_first(earlier.first, earlier.last, later, dx, dx + parts.dx);
            if (sums == own_sums.data) good &= write_density_sums(dc, item.unit, parts, sums);
            if (!good) finite = false;
        }
    });
    for (int64_t left = 0; cut > 1 && left < over; left++) {
        real *sums = shared_sums + parts.size() * left * cut;
        for (int64_t part = 1; part < cut; part++)
            for (size_t at = 0; at < parts.size(); at++) sums[at] += sums[part * parts.size() + at];
        if (!write_density_sums(dc, whole + left, parts, sums)) finite = false;
    }
    for (int64_t number = 0; number < count; number++) {
        const int64_t head = items[number].unit % c.kv_heads * dc.group;
        for (int64_t at = 0; at < dc.group; at++) d.dpower[head + at] += dpower[number * dc.group + at];
        for (int64_t at = 0; c.parameter_gradient && at < dc.group * parameters; at++)
            c.parameter_gradient[head * parameters + at] += dparameters[number * dc.group * parameters + at];
    }
    return finite;
}
