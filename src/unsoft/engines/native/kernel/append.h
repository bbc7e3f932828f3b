// New rows at the end of a buffer: what a cache of keys and values does before a step of decoding.
#pragma once
#include <algorithm>
#include "tensors.h"
#include "threads.h"

// Filled by unsoft/engines/native/binding.py: 64-bit fields only, in this order. Both tensors have elements of `bytes` bytes; with 1,
// `to` has rows of INT8, and only the strides of `to` count bytes.
struct Append {
    int64_t batch, heads, rows, width, bytes;
    Tensor to, from;  // the columns of `to` are contiguous, and its data begins at the first new row
};

// `type`: of the new rows, if they are to be quantised.
static void append(const Append &a, int64_t type = FLOAT32) {
    if (a.bytes == 1) {
        Source from = {a.from, type};
        Buffer<real> scratch(a.width);
        long ld;
        for (int64_t row = 0; row < a.batch * a.heads * a.rows; row++) {
            const int64_t b = row / a.rows / a.heads, h = row / a.rows % a.heads, r = row % a.rows;
            const real *x = from.rows(b, h, r, 1, int(a.width), int(a.width), scratch, ld);
            write_int8(x, int(a.width), a.to.data + b * a.to.batch + h * a.to.head + r * a.to.row);
        }
        return;
    }
    for (int64_t b = 0; b < a.batch; b++)
        for (int64_t h = 0; h < a.heads; h++)
            for (int64_t r = 0; r < a.rows; r++) {
                char *to = a.to.data + (b * a.to.batch + h * a.to.head + r * a.to.row) * a.bytes;
                const char *from = a.from.data + (b * a.from.batch + h * a.from.head + r * a.from.row) * a.bytes;
                if (a.from.column == 1) memcpy(to, from, size_t(a.width * a.bytes));
                else
                    for (int64_t x = 0; x < a.width; x++) memcpy(to + x * a.bytes, from + x * a.from.column * a.bytes, size_t(a.bytes));
            }
}
