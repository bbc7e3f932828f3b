"""A copy: the smallest kernel there is."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at))
