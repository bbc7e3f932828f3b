// The formula-independent half of the native engine. They return 0, or 1 if some output is not finite (the
// caller then applies the exact rules for NaN and Inf), or 2 if memory ran out.
#include "backward.h"
#include "step.h"

extern "C" {
__attribute__((visibility("default"))) int unsoft_forward(const Call *call) {
    try {
        return forward(*call) ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}
// The same with statistics of the weights. A call whose keys forward would cut into parts may differ from it in the last bits.
__attribute__((visibility("default"))) int unsoft_statistics(const Call *call, const Statistics *statistics) {
    try {
        return forward(*call, statistics) ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}
// Appends keys and values to the buffers of a cache, then attends to them. `step` is kept from step to step.
__attribute__((visibility("default"))) int unsoft_step(Step *step, const Token *token) {
    try {
        step->move_to(*token);
        append(step->keys, step->call.q.type), append(step->values, step->call.q.type);
        return unsoft_forward(&step->call);
    } catch (const std::bad_alloc &) {
        return 2;
    }
}
__attribute__((visibility("default"))) int unsoft_backward(const Call *call) {
    try {
        return backward(*call) ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}
}
