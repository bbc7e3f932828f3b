// New rows at the end of a buffer: what a cache of keys and values does before a step of decoding.
#pragma once
#include "tensors.h"

// Filled by unsoft/engines/native/binding.py: 64-bit fields only, in this order. Both tensors have elements of `bytes` bytes.
struct Append {
    int64_t batch, heads, rows, width, bytes;
    Tensor to, from;  // the columns of `to` are contiguous, and its data begins at the first new row
};

static void append(const Append &a) {
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
