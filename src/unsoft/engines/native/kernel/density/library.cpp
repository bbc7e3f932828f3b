// Attention divided by densities of keys (attention.h), and its decoding step (decoding.h). Each function returns 0, or 1 if some output is not finite, or 2 if memory ran out.
#include "density/attention.h"
#include "density/decoding.h"

template <class Function> static int status(Function function) {
    try {
        return function() ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}

extern "C" {
__attribute__((visibility("default"))) int unsoft_density_forward(const Call *call, const Density *density) {
    return status([&] { return density_forward(*call, *density); });
}
__attribute__((visibility("default"))) int unsoft_density_backward(const Call *call, const Density *density) {
    return status([&] { return density_backward(*call, *density); });
}
// `step` is kept from step to step, as in unsoft_step.
__attribute__((visibility("default"))) int unsoft_density_step(Step *step, const Token *token, const DensityStep *density) {
    return status([&] { return density_step(*step, *token, *density); });
}
}
