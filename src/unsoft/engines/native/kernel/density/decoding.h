// A step of decoding: one new key is compared with all earlier ones, whose densities it raises; then attention to all of them. In a window
// the key that leaves it is compared as well, and lowers them. Densities are of double precision. What a key takes away differs from what it
// added by the rounding of one similarity, up to 1e-7 (|x|^2 + |y|^2) of it where the other was computed by geometry.h. That is never carried
// on for longer than the window, since every key begins with a sum of its own.
#pragma once
#include "density/geometry.h"
#include "forward.h"
#include "step.h"

// Filled by unsoft/engines/native/density.py: 64-bit fields only, in this order.
struct DensityStep {
    Append geometry;      // of points that are not the keys themselves; no rows: they are
    Source points;        // the buffer (batch, kv_heads, room, width) that the new point is in as well, by then
    int64_t width;
    const real *scale;    // (kv_heads,): t / d
    const real *power;    // (heads,): p
    const double *before; // (batch, kv_heads, length), contiguous
    double *after;        // (batch, kv_heads, length + 1), contiguous
    real *bias;           // (batch, heads, room): a float mask that multiplies weight and mass
    int64_t room;
    int64_t first;        // the first key that the token sees; those before keep their densities
    int64_t leaving;      // the key that the last token saw and this one does not, or -1
};

// Similarities of `count` points x to one point.
static void similarities(const real *x, long ld, int count, int width, const real *point, V scale, real *to) {
    for (int key = 0; key < count; key++) {
        V sum = {};
        for (int at = 0; at < width; at += VL) {
            const V difference = load(x + key * ld + at) - load(point + at);
            sum += difference * difference;
        }
        to[key] = horizontal_sum(sum);
    }
    std::fill_n(to + count, VL, real(0));
    for (int key = 0; key < count; key += VL) store(to + key, vexp(load(to + key) * scale));
}

// The densities of one key head after the step, and the masks of its heads.
static void count_new(const Call &c, const DensityStep &s, int64_t unit, real *scratch, real *point) {
    const int64_t b = unit / c.kv_heads, hk = unit % c.kv_heads, length = c.keys - 1, group = c.heads / c.kv_heads;
    const int width = padded(s.width);
    const double *before = s.before + unit * length;
    double *after = s.after + unit * c.keys;
    long ld;
    real *left = point + width;
    std::copy_n(s.points.rows(b, hk, length, 1, int(s.width), width, scratch, ld), width, point);
    if (s.leaving >= 0) std::copy_n(s.points.rows(b, hk, s.leaving, 1, int(s.width), width, scratch, ld), width, left);
    const V scale = splat(-s.scale[hk]);
    double arrived = 1;  // it counts itself
    std::copy_n(before, s.first, after);
    for (int64_t j0 = s.first; j0 <= length; j0 += KEY_TILE_ROWS) {
        const int count = int(std::min<int64_t>(KEY_TILE_ROWS, length - j0));
        const real *x = s.points.rows(b, hk, j0, count, int(s.width), width, scratch, ld);
        real rho[KEY_TILE_ROWS + VL], lost[KEY_TILE_ROWS + VL] = {}, logs[KEY_TILE_ROWS + VL];
        similarities(x, ld, count, width, point, scale, rho);
        if (s.leaving >= 0) similarities(x, ld, count, width, left, scale, lost);
        for (int key = 0; key < count; key++) {
            arrived += rho[key];
            after[j0 + key] = before[j0 + key] + rho[key] - lost[key];
            rho[key] = real(after[j0 + key]);
        }
        const bool last = j0 + count == length;
        if (last) after[length] = arrived, rho[count] = real(arrived);
        const int known = count + last;
        for (int key = 0; key < known; key += VL) store(logs + key, log_above_1(larger(load(rho + key), splat(1))));
        for (int64_t member = 0; member < group; member++) {
            const int64_t h = hk * group + member;
            real *bias = s.bias + (b * c.heads + h) * s.room + j0;
            for (int key = 0; key < known; key++) bias[key] = -s.power[h] * logs[key];
        }
        if (last) break;
    }
}

static bool density_step(Step &step, const Token &token, const DensityStep &s) {
    step.move_to(token);
    append(step.keys), append(step.values);
    if (s.geometry.rows) append(s.geometry);
    const Call &c = step.call;
    const int64_t units = c.batch * c.kv_heads;
    const bool tiny = units * (c.keys - s.first) * s.width < 1 << 17;  // as in forward.h
    share(tiny ? 1 : int(c.threads), units, [&](auto next) {
        Buffer<real> scratch(size_t(KEY_TILE_ROWS) * padded(s.width)), points(2 * padded(s.width));
        for (int64_t unit; (unit = next()) < units;) count_new(c, s, unit, scratch, points);
    });
    Call seen = c;  // the keys before the window are as if they were not there
    seen.k.data = (char *)c.k.at(0, 0, s.first), seen.v.data = (char *)c.v.at(0, 0, s.first);
    seen.bias.data += s.first * c.bias.column * int64_t(sizeof(real));
    seen.keys -= s.first, seen.causal_offset -= s.first;
    return forward(seen);
}
