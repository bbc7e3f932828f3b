// The Gaussian matrix Z_jl = exp(-|x_j - x_l|^2) of a set of points: one half of it, in tiles, and products with it.
//
// Tile (I, J <= I) holds Z for 64 points I and 64 points J, row after row; tiles of a row of tiles lie one after the other.
// Tiles on the diagonal are whole. Distances are summed differences, not |x|^2 + |y|^2 - 2 x y: clones are exactly 1, and
// near-clones keep all their digits. Points that are absent (padding, and the filling of the last tile) have rows of zeros.
#pragma once
#include <algorithm>
#include <vector>

#include "matmul.h"
#include "threads.h"

constexpr int SIDE = 64;
constexpr long TILE = SIDE * SIDE;

struct Gaussian {
    int64_t threads, systems, points, width;
    const real *x;        // (systems, points, width), contiguous
    const real *present;  // (systems, points): 1 or 0
    real *matrix;         // (systems, tiles)

    int blocks() const { return int((points + SIDE - 1) / SIDE); }
    long padded() const { return long(blocks()) * SIDE; }
    int padded_width() const { return int((width + VL - 1) / VL * VL); }
    long tiles() const { return long(blocks()) * (blocks() + 1) / 2; }
    real *tile(int64_t system, long row, long column) const { return matrix + (system * tiles() + row * (row + 1) / 2 + column) * TILE; }
};

// A system is one piece of work; if there are fewer systems than threads, each is cut into parts of whole tile rows, about
// equal in tiles. A part adds to sums of its own, which are added up in order: results depend on the number of threads only.
struct Parts {
    int count;
    std::vector<int> first;  // tile row where part p begins; first[count] is the end
    explicit Parts(const Gaussian &g) {
        int blocks = g.blocks();
        count = int(std::min<int64_t>(blocks, g.systems >= g.threads ? 1 : (g.threads + g.systems - 1) / g.systems));
        first.push_back(0);
        for (int row = 0, part = 1; part < count; part++) {
            while (long(row) * (row + 1) / 2 * count < g.tiles() * part) row++;
            first.push_back(std::max(row, first.back()));
        }
        first.push_back(blocks);
    }
};

// Calls work(system, first tile row, end, sums) for every part, with sums of `size` numbers set to 0, and then
// finish(system, sums) once for every system, with the sums of its parts added up.
template <class Work, class Finish> static void by_parts(const Gaussian &g, size_t size, Work work, Finish finish) {
    Parts parts(g);
    if (parts.count == 1) {
        share(int(g.threads), g.systems, [&](auto next) {
            Buffer<real> sums(size);
            for (int64_t s; (s = next()) < g.systems;) {
                std::fill_n(sums.data, size, real(0));
                work(s, 0, g.blocks(), sums.data);
                finish(s, sums.data);
            }
        });
        return;
    }
    Buffer<real> sums(size * parts.count);
    for (int64_t s = 0; s < g.systems; s++) {
        share(int(g.threads), parts.count, [&](auto next) {
            for (int64_t p; (p = next()) < parts.count;) {
                std::fill_n(sums + p * size, size, real(0));
                work(s, parts.first[p], parts.first[p + 1], sums + p * size);
            }
        });
        for (int p = 1; p < parts.count; p++)
            for (size_t e = 0; e < size; e++) sums[e] += sums[p * size + e];
        finish(s, sums.data);
    }
}

// One vector of a system, filled up with zeros to whole tiles.
static void pad_vector(const real *from, int64_t points, long padded, real *to) {
    std::copy_n(from, points, to);
    std::fill_n(to + points, padded - points, real(0));
}

// What one tile gives to both of its sides: below[J] += Z^T x[I], and right[I] += Z x[J] unless the tile is on the diagonal,
// where the first is already all of it (the tile is symmetric).
template <int NV> UNSOFT_INLINE void tile_product(const real *z, const real *across, const real *down, real *right, real *below, bool diagonal) {
    for (int c = 0; c < SIDE; c += NV * VL) {
        V x[NV], sum[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) x[v] = load(across + c + v * VL), sum[v] = load(below + c + v * VL);
        for (int r = 0; r < SIDE; r++) {
            V dot = {};
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                V entry = load(z + r * SIDE + c + v * VL);
                sum[v] += entry * down[r];
                dot += entry * x[v];
            }
            if (!diagonal) right[r] += horizontal_sum(dot);
        }
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) store(below + c + v * VL, sum[v]);
    }
}

constexpr int COLUMNS = REGISTERS == 32 ? 4 : 2;

static void product_rows(const Gaussian &g, int64_t system, int first, int end, const real *x, real *y) {
    for (long row = first; row < end; row++)
        for (long column = 0; column <= row; column++)
            tile_product<COLUMNS>(g.tile(system, row, column), x + column * SIDE, x + row * SIDE, y + row * SIDE, y + column * SIDE,
                                  row == column);
}

// y = Z x for every system.
static void gaussian_product(const Gaussian &g, const real *x, real *y) {
    by_parts(
        g, g.padded(),
        [&](int64_t s, int first, int end, real *sums) {
            Buffer<real> vector(g.padded());
            pad_vector(x + s * g.points, g.points, g.padded(), vector);
            product_rows(g, s, first, end, vector, sums);
        },
        [&](int64_t s, const real *sums) { std::copy_n(sums, g.points, y + s * g.points); });
}

constexpr int ROWS = 4;  // of a tile, worked on at a time

// R rows of a tile: squared distances in registers, then exp, and into memory.
template <int R>
UNSOFT_INLINE void distance_rows(int width, const real *rows, const real *columns, const real *present_row, const real *present, real *z) {
    for (int c = 0; c < SIDE; c += COLUMNS * VL) {
        V sum[R][COLUMNS] = {};
        for (int k = 0; k < width; k++) {
            V column[COLUMNS];
#pragma GCC unroll 8
            for (int v = 0; v < COLUMNS; v++) column[v] = load(columns + k * SIDE + c + v * VL);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                V row = splat(rows[r * width + k]);
#pragma GCC unroll 8
                for (int v = 0; v < COLUMNS; v++) {
                    V difference = column[v] - row;
                    sum[r][v] += difference * difference;
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < COLUMNS; v++)
                store(z + r * SIDE + c + v * VL, vexp(-sum[r][v]) * load(present + c + v * VL) * present_row[r]);
    }
}

// One tile of similarities between the points of two blocks, from points as rows and points as columns.
static void similarity_tile(int width, const real *rows, const real *columns, const real *present_rows, const real *present_columns, real *z) {
    for (int r = 0; r < SIDE; r += ROWS)
        distance_rows<ROWS>(width, rows + r * width, columns, present_rows + r, present_columns, z + r * SIDE);
}

// The points of one system in both layouts, filled up to whole blocks.
struct Laid {
    Buffer<real> rows, columns, present;
    Laid(const Gaussian &g, int64_t s) : rows(g.padded() * g.width), columns(g.padded() * g.width), present(g.padded()) {
        const int width = int(g.width);
        std::copy_n(g.x + s * g.points * width, g.points * width, rows.data);
        std::fill_n(rows + g.points * width, (g.padded() - g.points) * width, real(0));
        for (long block = 0; block < g.blocks(); block++)  // (block, width, 64), so that points lie along lanes
            for (int k = 0; k < width; k++)
                for (int p = 0; p < SIDE; p++) columns[(block * width + k) * SIDE + p] = rows[(block * SIDE + p) * width + k];
        pad_vector(g.present + s * g.points, g.points, g.padded(), present);
    }
    void tile(const Gaussian &g, long row, long column, real *z) const {
        similarity_tile(int(g.width), rows + row * SIDE * g.width, columns + column * SIDE * g.width, present + row * SIDE,
                        present + column * SIDE, z);
    }
};

// z(j, l) = exp(-|x_j - y_l|^2) for two sets of points of each system, as plain matrices (systems, rows, columns).
static void gaussian_between(int64_t threads, int64_t systems, int64_t rows, int64_t columns, int64_t width, const real *x, const real *y,
                             real *z) {
    const long row_blocks = (rows + SIDE - 1) / SIDE, column_blocks = (columns + SIDE - 1) / SIDE;
    share(int(threads), systems * column_blocks, [&](auto next) {
        Buffer<real> down(SIDE * width), across(SIDE * width), ones(SIDE), tile(TILE);
        std::fill_n(ones.data, SIDE, real(1));
        for (int64_t item; (item = next()) < systems * column_blocks;) {
            const int64_t s = item / column_blocks, column = item % column_blocks * SIDE;
            const long wide = std::min<long>(SIDE, columns - column);
            std::fill_n(across.data, SIDE * width, real(0));
            for (long p = 0; p < wide; p++)
                for (long k = 0; k < width; k++) across[k * SIDE + p] = y[(s * columns + column + p) * width + k];
            for (long block = 0; block < row_blocks; block++) {
                const long row = block * SIDE, high = std::min<long>(SIDE, rows - row);
                const real *points = x + (s * rows + row) * width;
                if (high < SIDE) {
                    std::copy_n(points, high * width, down.data);
                    std::fill_n(down + high * width, (SIDE - high) * width, real(0));
                    points = down;
                }
                for (int r = 0; r < high; r += ROWS)
                    distance_rows<ROWS>(int(width), points + r * width, across, ones, ones, tile + r * SIDE);
                for (long r = 0; r < high; r++) std::copy_n(tile + r * SIDE, wide, z + (s * rows + row + r) * columns + column);
            }
        }
    });
}

// Builds the matrix and, while a tile is in cache, its product with `x` (none if null).
static void gaussian_build(const Gaussian &g, const real *x, real *y) {
    by_parts(
        g, g.padded(),
        [&](int64_t s, int first, int end, real *sums) {
            Laid points(g, s);
            Buffer<real> vector(g.padded());
            if (x) pad_vector(x + s * g.points, g.points, g.padded(), vector);
            for (long row = first; row < end; row++)
                for (long column = 0; column <= row; column++) {
                    real *z = g.tile(s, row, column);
                    points.tile(g, row, column, z);
                    if (x)
                        tile_product<COLUMNS>(z, vector + column * SIDE, vector + row * SIDE, sums + row * SIDE, sums + column * SIDE,
                                              row == column);
                }
        },
        [&](int64_t s, const real *sums) {
            if (x) std::copy_n(sums, g.points, y + s * g.points);
        });
}

// What a tile of W, symmetric as a whole, adds to sum_l W_jl x_l and to sum_l W_jl.
static void tile_pull(real *w, long row, long column, int width, const real *points, const real *ones, real *sums, real *totals) {
    if (row == column)  // a point has no distance from itself
        for (int p = 0; p < SIDE; p++) w[p * (SIDE + 1)] = 0;
    tile_product<COLUMNS>(w, ones, ones, totals + row * SIDE, totals + column * SIDE, row == column);
    accumulate<true>(SIDE, width, SIDE, w, SIDE, points + row * SIDE * width, width, sums + column * SIDE * width, width);
    if (row != column)
        accumulate<false>(SIDE, width, SIDE, w, SIDE, points + column * SIDE * width, width, sums + row * SIDE * width, width);
}

// The gradient of sum_r u_r^T Z v_r with respect to the points: with W = Z (elementwise) sum_r (u_r v_r^T + v_r u_r^T),
//     gradient_j = -2 sum_l W_jl (x_j - x_l)
// u and v are (systems, rank, points).
static void gaussian_gradient(const Gaussian &g, int64_t rank, const real *u, const real *v, real *gradient) {
    const int width = g.padded_width(), depth = int(2 * rank);
    const long padded = g.padded();
    const size_t size = padded * (width + 1);  // sum_l W_jl x_l, and sum_l W_jl
    by_parts(
        g, size,
        [&](int64_t s, int first, int end, real *sums) {
            Buffer<real> rows(padded * width), left(padded * depth), across(padded * depth), w(TILE), ones(SIDE);
            std::fill_n(ones.data, SIDE, real(1));
            std::fill_n(rows.data, padded * width, real(0));
            for (long p = 0; p < g.points; p++) std::copy_n(g.x + (s * g.points + p) * g.width, g.width, rows + p * width);
            // left: (points, 2 rank) = (u, v); across: (block, 2 rank, 64) = (v, u)
            std::fill_n(left.data, padded * depth, real(0));
            std::fill_n(across.data, padded * depth, real(0));
            for (long r = 0; r < rank; r++)
                for (long p = 0; p < g.points; p++) {
                    real a = u[(s * rank + r) * g.points + p], b = v[(s * rank + r) * g.points + p];
                    left[p * depth + r] = a, left[p * depth + rank + r] = b;
                    real *to = across + (p / SIDE * depth + r) * SIDE + p % SIDE;
                    to[0] = b, to[rank * SIDE] = a;
                }
            real *weighted = sums, *totals = sums + padded * width;
            for (long row = first; row < end; row++)
                for (long column = 0; column <= row; column++) {
                    const real *z = g.tile(s, row, column);
                    for (int c = 0; c < SIDE; c += COLUMNS * VL)
                        ::rows<4, COLUMNS, false, false>(SIDE, depth, left + row * SIDE * depth, depth, across + column * depth * SIDE + c, SIDE,
                                                         w + c, SIDE);
                    for (int e = 0; e < TILE; e += VL) store(w + e, load(w + e) * load(z + e));
                    tile_pull(w, row, column, width, rows, ones, weighted, totals);
                }
        },
        [&](int64_t s, const real *sums) {
            for (long p = 0; p < g.points; p++) {
                const real *x = g.x + (s * g.points + p) * g.width;
                real *to = gradient + (s * g.points + p) * g.width;
                for (int k = 0; k < g.width; k++) to[k] = 2 * (sums[p * width + k] - sums[padded * width + p] * x[k]);
            }
        });
}
