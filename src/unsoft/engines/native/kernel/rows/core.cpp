// Row-coupled attention, whatever its rule. Both functions return 0, or 1 if some result is not finite (the caller then
// applies the exact rules for NaN and Inf), or 2 if memory ran out.
#include "rows/backward.h"

extern "C" {
__attribute__((visibility("default"))) int unsoft_forward(const Call *call) {
    try {
        return rows_forward(*call) ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}
__attribute__((visibility("default"))) int unsoft_backward(const Call *call) {
    try {
        return rows_backward(*call) ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}
}
