// A step of decoding: one new key is compared with all earlier ones, whose densities it raises; then attention to all of them.
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
    const real *before;   // (batch, kv_heads, length), contiguous
    real *after;          // (batch, kv_heads, length + 1), contiguous
    real *bias;           // (batch, heads, room): a float mask that multiplies weight and mass
    int64_t room;
};

// The densities of one key head after the step, and the masks of its heads.
static void count_new(const Call &c, const DensityStep &s, int64_t unit, real *scratch, real *point) {
    const int64_t b = unit / c.kv_heads, hk = unit % c.kv_heads, length = c.keys - 1, group = c.heads / c.kv_heads;
    const int width = padded(s.width);
    const real *before = s.before + unit * length;
    real *after = s.after + unit * c.keys;
    long ld;
    const real *given = s.points.rows(b, hk, length, 1, int(s.width), width, scratch, ld);
    std::copy_n(given, width, point);
    const V scale = splat(-s.scale[hk]);
    real arrived = 1;  // it counts itself
    for (int64_t j0 = 0; j0 <= length; j0 += KEY_TILE_ROWS) {
        const int count = int(std::min<int64_t>(KEY_TILE_ROWS, length - j0));
        const real *x = s.points.rows(b, hk, j0, count, int(s.width), width, scratch, ld);
        real distances[KEY_TILE_ROWS + VL] = {}, rho[KEY_TILE_ROWS + VL], logs[KEY_TILE_ROWS + VL];
        for (int key = 0; key < count; key++) {
            V sum = {};
            for (int at = 0; at < width; at += VL) {
                const V difference = load(x + key * ld + at) - load(point + at);
                sum += difference * difference;
            }
            distances[key] = horizontal_sum(sum);
        }
        for (int key = 0; key < count; key += VL) store(rho + key, vexp(load(distances + key) * scale));
        for (int key = 0; key < count; key++) arrived += rho[key], rho[key] += before[j0 + key];
        const bool last = j0 + count == length;
        if (last) rho[count] = arrived;
        const int known = count + last;
        std::copy_n(rho, std::min<int64_t>(known, c.keys - j0), after + j0);
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
    const bool tiny = units * c.keys * s.width < 1 << 17;  // as in forward.h
    share(tiny ? 1 : int(c.threads), units, [&](auto next) {
        Buffer<real> scratch(size_t(KEY_TILE_ROWS) * padded(s.width)), point(padded(s.width));
        for (int64_t unit; (unit = next()) < units;) count_new(c, s, unit, scratch, point);
    });
    return forward(c);
}
