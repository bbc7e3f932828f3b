// A step of decoding: new rows at the end of a cache's buffers, then attention to all rows so far.
#pragma once
#include "append.h"
#include "call.h"

// What differs between two steps of the same shapes. Filled by unsoft/engines/native/step.py: 64-bit fields only, in this order.
struct Token {
    int64_t length, threads;  // length: rows that the buffers held before
    char *query, *key, *value, *out;
};

// Filled by the same file. The addresses of `to` are those of the buffers; call.k and call.v are the buffers too.
struct Step {
    Append keys, values;
    Call call;

    void move_to(const Token &t) {
        keys.from.data = t.key, values.from.data = t.value;
        keys.to.data = call.k.data + t.length * keys.to.row * keys.bytes;
        values.to.data = call.v.data + t.length * values.to.row * values.bytes;
        call.q.data = t.query, call.out.data = t.out;
        call.threads = t.threads;
        call.keys = t.length + keys.rows;
        call.causal_offset = call.keys - call.queries;
    }
};
