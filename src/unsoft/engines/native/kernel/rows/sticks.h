// Stick-breaking: from the last key to the first, each takes the share sigmoid(s) of what later ones have left.
//
//   a_j = sigmoid(s_j) r_j        r_(j-1) = r_j (1 - sigmoid(s_j))        r = 1 before the last key
//
// Once nothing is left in any row (the product underflows) earlier keys are not even multiplied.
#pragma once
#include "panel.h"

namespace {

// The share that a key takes and the one that it leaves; 0 and 1 of a hidden one. Neither cancels.
UNSOFT_INLINE void share_of(V s, V &taken, V &left) {
    V e = vexp(-vabs(s)), larger_part = real(1) / (real(1) + e), smaller_part = e * larger_part;
    I positive = s > V{}, seen = s > splat(HIDDEN);
    taken = vselect(seen, vselect(positive, larger_part, smaller_part), V{});
    left = vselect(seen, vselect(positive, smaller_part, larger_part), splat(1));
}

void begin(const Panel &x) {
    for (int lane = 0; lane < x.lanes; lane++) x.peak[lane] = 0, x.threshold[lane] = 1;
}

// Forward weights are final as soon as a tile has come.
bool scan(const Panel &x, long from, long to) {
    real most = 0;
    for (int lane = 0; lane < x.lanes; lane += VL) {
        V rest = load(x.threshold + lane);
        for (long key = to - 1; key >= from; key--) {
            real *at = x.s + key * x.lanes + lane;
            V taken, left;
            share_of(load(at), taken, left);
            if (!x.p) store(at, taken * rest);
            rest *= left;
        }
        store(x.threshold + lane, rest);
        most = std::fmax(most, horizontal_max(rest));
    }
    return most > 0;
}

void nothing(const Panel &) {}

void active(const Panel &x, uint8_t *result) {
    for (long key = 0; key < x.keys; key++) result[key] = 0;
    for (int lane = 0; lane < x.lanes; lane += VL) {
        V rest = splat(1);
        for (long key = x.keys - 1; key >= 0; key--) {
            V taken, left;
            share_of(load(x.s + key * x.lanes + lane), taken, left);
            V weight = taken * rest;
            word any = 0;
            I some = weight > V{};
            for (int k = 0; k < VL; k++) any |= some[k];
            result[key] |= any != 0;
            rest *= left;
        }
    }
}

// d loss / ds_j = g_j a_j (1 - sigmoid_j) - sigmoid_j * (sum of g a over the keys before j).
void slopes(const Panel &x) {
    for (int lane = 0; lane < x.lanes; lane += VL) {
        V total = {}, rest = splat(1), taken, left;
        for (long key = x.keys - 1; key >= 0; key--) {
            const long at = key * x.lanes + lane;
            share_of(load(x.s + at), taken, left);
            total += taken * rest * load(x.p + at);
            rest *= left;
        }
        rest = splat(1);
        for (long key = x.keys - 1; key >= 0; key--) {
            const long at = key * x.lanes + lane;
            share_of(load(x.s + at), taken, left);
            V weight = taken * rest, own = weight * load(x.p + at);
            total -= own;
            store(x.s + at, weight), store(x.p + at, own * left - taken * total);
            rest *= left;
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const RowRule *unsoft_mechanism() {
    static const RowRule table = {{}, begin, scan, nothing, nothing, active, slopes};
    return &table;
}
