// The delta rule in chunks, forward and backward; see engines/linear/delta.py for the recurrence.
//
// Inside a chunk, with G the running sum of g, and rows i >= j:
//   M_ij = k_i . exp(G_i - G_j) k_j        P_ij = q_i . exp(G_i - G_j) k_j        Kd = exp(G) k, Qd = exp(G) q, Ke = exp(G_last - G) k
//   X = (1 + tril(b M, -1))^-1 b (V - Kd S)          out = Qd S + P X          S <- exp(G_last) S + Ke^T X
// A head is one work item: its state stays in the cache. Backward starts from the states before every chunk.
#include <algorithm>
#include <vector>
#include "matmul.h"
#include "threads.h"

// Contiguous (batch, heads, tokens, ...); gates: 0 (none), 1, or width numbers per token.
struct Delta {
    int64_t threads, batch, heads, tokens, width, values, gates, chunk;
    const real *q, *k, *v, *b, *g, *before;             // g and before may be null
    real *out, *after, *states;                         // states (batch, heads, chunks, width, values) or null
    const real *grad_out, *grad_after;                  // from here on: backward only; grad_after may be null
    real *dq, *dk, *dv, *db, *dg, *dbefore;             // dg null without gates
};

struct Matrix {  // rows of a width that is padded to VL
    int rows, ld;
    Buffer<real> data;
    Matrix(int rows, int64_t width) : rows(rows), ld(int((width + VL - 1) / VL * VL)), data(size_t(rows) * ld) { clear(); }
    real *row(int r) const { return data + long(r) * ld; }
    real &at(int r, int c) const { return data[long(r) * ld + c]; }
    void clear() { std::fill_n((real *)data, size_t(rows) * ld, real(0)); }
    void read(const real *from, int count, int64_t width) {
        for (int r = 0; r < rows; r++) {
            if (r < count) std::copy_n(from + r * width, width, row(r));
            else std::fill_n(row(r), ld, real(0));
        }
    }
    void write(real *to, int count, int64_t width) const {
        for (int r = 0; r < count; r++) std::copy_n(row(r), width, to + r * width);
    }
    void transposed(const Matrix &x) {
        for (int r = 0; r < x.rows; r++)
            for (int c = 0; c < rows; c++) at(c, r) = x.at(r, c);
    }
};

// c += a b, or a^T b.
static void add_product(const Matrix &a, const Matrix &b, const Matrix &c, int depth) {
    accumulate<false>(c.rows, c.ld, depth, a.data, a.ld, b.data, b.ld, c.data, c.ld);
}
static void add_transposed_product(const Matrix &a, const Matrix &b, const Matrix &c, int depth) {
    accumulate<true>(c.rows, c.ld, depth, a.data, a.ld, b.data, b.ld, c.data, c.ld);
}
static void add_scaled(real *to, const real *from, int width, real factor) {
    for (int x = 0; x < width; x += VL) store(to + x, load(to + x) + load(from + x) * factor);
}
static real dot(const real *a, const real *b, int width) {
    V sum = {};
    for (int x = 0; x < width; x += VL) sum += load(a + x) * load(b + x);
    return horizontal_sum(sum);
}
static void negate(const Matrix &x) {
    for (long c = 0; c < long(x.rows) * x.ld; c += VL) store(x.data + c, -load(x.data + c));
}
static void exponentials(const real *from, real *to, int width) {
    for (int x = 0; x < width; x += VL) store(to + x, vexp(load(from + x)));
}

struct Chunk {
    const Delta &d;
    const int size, width, values;
    const bool channels;
    Matrix q, k, v, g, kept, fall, grown, qd, kd, ke, negative, other, m, p, decay, x, wrong, state;
    Buffer<real> b;
    explicit Chunk(const Delta &d)
        : d(d), size(int(d.chunk)), width(int(d.width)), values(int(d.values)), channels(d.gates > 1), q(size, width), k(size, width),
          v(size, values), g(size, width), kept(size, width), fall(size, width), grown(size, width), qd(size, width), kd(size, width),
          ke(size, width), negative(size, width), other(width, size), m(size, size), p(size, size), decay(size, size), x(size, values), wrong(size, values),
          state(width, values), b(size) {}

    int64_t token(int64_t head, int64_t first) const { return head * d.tokens + first; }

    // Everything up to X, for the tokens from `first` on; `state` is that before them.
    int solve(int64_t head, int64_t first) {
        const int count = int(std::min<int64_t>(size, d.tokens - first));
        const int64_t at = token(head, first);
        q.read(d.q + at * width, count, width), k.read(d.k + at * width, count, width), v.read(d.v + at * values, count, values);
        std::fill_n((real *)b, size, real(0));
        std::copy_n(d.b + at, count, (real *)b);
        read_gates(at, count);
        for (int r = 0; r < size; r++)
            for (int c = 0; c < q.ld; c += VL) {
                V up = load(kept.row(r) + c);
                store(qd.row(r) + c, load(q.row(r) + c) * up), store(kd.row(r) + c, load(k.row(r) + c) * up);
                store(ke.row(r) + c, load(k.row(r) + c) * load(fall.row(r) + c));
            }
        m.clear(), p.clear();
        if (channels) {
            for (int r = 0; r < size; r++)
                for (int c = 0; c < width; c++) other.at(c, r) = k.at(r, c) * grown.at(r, c);
            add_product(kd, other, m, width), add_product(qd, other, p, width);
        } else {
            other.transposed(k);
            add_product(k, other, m, width), add_product(q, other, p, width);
        }
        for (int i = 0; i < size; i++)
            for (int j = 0; j < size; j++) {
                const real keep = channels || d.gates == 0 ? real(1) : decay.at(i, j);
                m.at(i, j) = j < i ? m.at(i, j) * keep : 0;
                p.at(i, j) = j <= i ? p.at(i, j) * keep : 0;
            }
        std::copy_n((real *)v.data, size_t(size) * v.ld, (real *)wrong.data);
        std::copy_n((real *)kd.data, size_t(size) * kd.ld, (real *)negative.data);
        negate(negative);
        add_product(negative, state, wrong, width);  // V - Kd S
        for (int i = 0; i < size; i++) {
            for (int c = 0; c < x.ld; c += VL) store(x.row(i) + c, load(wrong.row(i) + c) * b[i]);
            for (int j = 0; j < i; j++) add_scaled(x.row(i), x.row(j), x.ld, -b[i] * m.at(i, j));
        }
        return count;
    }

    void read_gates(int64_t at, int count) {
        for (int r = 0; r < size; r++) {
            if (d.gates == 0 || r >= count) {
                if (r) std::copy_n(g.row(r - 1), g.ld, g.row(r));
                else std::fill_n(g.row(r), g.ld, real(0));
                continue;
            }
            for (int c = 0; c < width; c++) {
                const real step = d.g[(at + r) * d.gates + (channels ? c : 0)];
                g.at(r, c) = (r ? g.at(r - 1, c) : real(0)) + step;
            }
        }
        for (int r = 0; r < size; r++) {
            exponentials(g.row(r), kept.row(r), g.ld);
            for (int c = 0; c < g.ld; c += VL) {
                store(fall.row(r) + c, vexp(load(g.row(size - 1) + c) - load(g.row(r) + c)));
                if (channels) store(grown.row(r) + c, vexp(-load(g.row(r) + c)));
            }
        }
        if (d.gates == 1)
            for (int i = 0; i < size; i++)
                for (int j = 0; j <= i; j++) decay.at(i, j) = std::exp(g.at(i, 0) - g.at(j, 0));
    }

    void advance() {  // S <- exp(G_last) S + Ke^T X
        fade(state);
        add_transposed_product(ke, x, state, size);
    }
    void fade(const Matrix &s) const {
        if (d.gates)
            for (int r = 0; r < width; r++)
                for (int c = 0; c < s.ld; c += VL) store(s.row(r) + c, load(s.row(r) + c) * kept.at(size - 1, r));
    }
};

static void run_forward(const Delta &d, Chunk &w, int64_t head) {
    Matrix out(w.size, w.values);
    const int64_t block = d.width * d.values, chunks = (d.tokens + w.size - 1) / w.size;
    if (d.before) w.state.read(d.before + head * block, w.width, d.values);
    else w.state.clear();
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        if (d.states) w.state.write(d.states + (head * chunks + chunk) * block, w.width, d.values);
        const int count = w.solve(head, chunk * w.size);
        out.clear();
        add_product(w.qd, w.state, out, w.width), add_product(w.p, w.x, out, w.size);
        out.write(d.out + w.token(head, chunk * w.size) * d.values, count, d.values);
        w.advance();
    }
    w.state.write(d.after + head * block, w.width, d.values);
}

struct Adjoint {
    Matrix dstate, dout, dx, dr, dp, n, dqd, dkd, dke, dkg, dk, dq, dg, xt, st, dst, kg;
    explicit Adjoint(const Chunk &w)
        : dstate(w.width, w.values), dout(w.size, w.values), dx(w.size, w.values), dr(w.size, w.values),
          dp(w.size, w.size), n(w.size, w.size), dqd(w.size, w.width), dkd(w.size, w.width), dke(w.size, w.width), dkg(w.size, w.width),
          dk(w.size, w.width), dq(w.size, w.width), dg(w.size, w.width), xt(w.values, w.size), st(w.values, w.width),
          dst(w.values, w.width), kg(w.size, w.width) {}
};

static void chunk_backward(const Delta &d, Chunk &w, Adjoint &a, int64_t head, int64_t chunk) {
    const int size = w.size;
    const int count = w.solve(head, chunk * size);
    const int64_t at = w.token(head, chunk * size);
    a.dout.read(d.grad_out + at * d.values, count, d.values);
    a.xt.transposed(w.x), a.st.transposed(w.state), a.dst.transposed(a.dstate);
    a.dx.clear(), a.dp.clear(), a.n.clear();
    add_transposed_product(w.p, a.dout, a.dx, size), add_product(w.ke, a.dstate, a.dx, w.width);
    add_product(a.dout, a.xt, a.dp, w.values);
    for (int i = size - 1; i >= 0; i--) {  // (1 + A)^T dR = dX
        std::copy_n(a.dx.row(i), a.dx.ld, a.dr.row(i));
        for (int j = i + 1; j < size; j++) add_scaled(a.dr.row(i), a.dr.row(j), a.dr.ld, -w.b[j] * w.m.at(j, i));
    }
    add_product(a.dr, a.xt, a.n, w.values);
    std::vector<real> turned(size, real(0)), given(size, real(0));  // of G, where the gate is one number
    for (int i = 0; i < size; i++) {
        real db = dot(a.dr.row(i), w.wrong.row(i), a.dr.ld);
        for (int j = 0; j < size; j++) {
            if (j < i) db -= a.n.at(i, j) * w.m.at(i, j);
            a.n.at(i, j) = j < i ? -w.b[i] * a.n.at(i, j) : 0;  // dM
            if (j > i) a.dp.at(i, j) = 0;
            const real moved = a.n.at(i, j) * w.m.at(i, j) + a.dp.at(i, j) * w.p.at(i, j);
            turned[i] += moved, given[j] += moved;
            if (d.gates == 1) {
                const real keep = j <= i ? w.decay.at(i, j) : 0;
                a.n.at(i, j) *= keep, a.dp.at(i, j) *= keep;
            }
        }
        if (i < count) d.db[at + i] = db;
        for (int c = 0; c < a.dr.ld; c += VL) store(a.dr.row(i) + c, load(a.dr.row(i) + c) * w.b[i]);  // from here on b dR
    }
    a.dr.write(d.dv + at * d.values, count, d.values);
    a.dqd.clear(), a.dkd.clear(), a.dke.clear(), a.dkg.clear();
    add_product(a.dout, a.st, a.dqd, w.values), add_product(w.x, a.dst, a.dke, w.values), add_product(a.dr, a.st, a.dkd, w.values);
    negate(a.dkd);
    a.dk.clear(), a.dq.clear(), a.dg.clear();
    if (w.channels) {
        for (int r = 0; r < size; r++)
            for (int c = 0; c < a.kg.ld; c += VL) store(a.kg.row(r) + c, load(w.k.row(r) + c) * load(w.grown.row(r) + c));
        add_product(a.n, a.kg, a.dkd, size), add_product(a.dp, a.kg, a.dqd, size);
        add_transposed_product(a.n, w.kd, a.dkg, size), add_transposed_product(a.dp, w.qd, a.dkg, size);
    } else {
        add_product(a.n, w.k, a.dk, size), add_transposed_product(a.n, w.k, a.dk, size), add_transposed_product(a.dp, w.q, a.dk, size);
        add_product(a.dp, w.k, a.dq, size);
    }
    for (int r = 0; r < size; r++)
        for (int c = 0; c < a.dk.ld; c += VL) {
            const V dkd = load(a.dkd.row(r) + c), dqd = load(a.dqd.row(r) + c), dke = load(a.dke.row(r) + c), up = load(w.kept.row(r) + c);
            V dk = load(a.dk.row(r) + c) + dkd * up + dke * load(w.fall.row(r) + c);
            V end = dke * load(w.ke.row(r) + c), dg = dkd * load(w.kd.row(r) + c) + dqd * load(w.qd.row(r) + c) - end;
            if (w.channels) {
                const V dkg = load(a.dkg.row(r) + c);
                dk += dkg * load(w.grown.row(r) + c), dg -= dkg * load(a.kg.row(r) + c);
            }
            store(a.dk.row(r) + c, dk), store(a.dq.row(r) + c, load(a.dq.row(r) + c) + dqd * up);
            store(a.dg.row(r) + c, load(a.dg.row(r) + c) + dg);
            real *last = a.dg.row(size - 1) + c;
            store(last, load(last) + end);
        }
    a.dk.write(d.dk + at * d.width, count, d.width), a.dq.write(d.dq + at * d.width, count, d.width);
    if (d.gates) {
        for (int c = 0; c < w.width; c++)
            a.dg.at(size - 1, c) += dot(w.state.row(c), a.dstate.row(c), a.dstate.ld) * w.kept.at(size - 1, c);
        std::vector<real> sum(w.width, real(0));
        real single = 0;
        for (int r = size - 1; r >= 0; r--) {  // a token's g is part of all later sums
            for (int c = 0; c < w.width; c++) sum[c] += a.dg.at(r, c), single += w.channels ? 0 : a.dg.at(r, c);
            single += turned[r] - given[r];
            if (r >= count) continue;
            if (w.channels) std::copy_n(sum.data(), w.width, d.dg + (at + r) * d.gates);
            else d.dg[at + r] = single;
        }
    }
    w.fade(a.dstate);
    add_transposed_product(w.qd, a.dout, a.dstate, size);
    negate(a.dr);
    add_transposed_product(w.kd, a.dr, a.dstate, size);
}

static void run_backward(const Delta &d, Chunk &w, Adjoint &a, int64_t head) {
    const int64_t block = d.width * d.values, chunks = (d.tokens + w.size - 1) / w.size;
    if (d.grad_after) a.dstate.read(d.grad_after + head * block, w.width, d.values);
    else a.dstate.clear();
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        w.state.read(d.states + (head * chunks + chunk) * block, w.width, d.values);
        chunk_backward(d, w, a, head, chunk);
    }
    if (d.dbefore) a.dstate.write(d.dbefore + head * block, w.width, d.values);
}

template <class Run> static int over_heads(const Delta &d, Run run) {
    try {
        share(int(d.threads), d.batch * d.heads, [&](auto next) {
            Chunk w(d);
            for (int64_t head; (head = next()) < d.batch * d.heads;) run(w, head);
        });
    } catch (const std::bad_alloc &) {
        return 2;
    }
    return 0;
}

extern "C" {
// 0, or 2 if memory ran out.
__attribute__((visibility("default"))) int unsoft_delta_forward(const Delta *d) {
    return over_heads(*d, [&](Chunk &w, int64_t head) { run_forward(*d, w, head); });
}
__attribute__((visibility("default"))) int unsoft_delta_backward(const Delta *d) {
    return over_heads(*d, [&](Chunk &w, int64_t head) {
        Adjoint a(w);
        run_backward(*d, w, a, head);
    });
}
}
