"""Functions that triton.language lacks, for float32 and float64; and the hash of dropout."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def with_sign_of(y, x):
    """Return sign(x) * y: the sign bit of x flips y, and x = 0 makes it 0."""
    if y.dtype.primitive_bitwidth == 64:
        bits = x.to(tl.int64, bitcast=True) & -0x8000000000000000
        flipped = (y.to(tl.int64, bitcast=True) ^ bits).to(tl.float64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True) & -0x80000000
        flipped = (y.to(tl.int32, bitcast=True) ^ bits).to(tl.float32, bitcast=True)
    return tl.where(x == 0, 0.0, flipped)


@triton.jit
def root(x):
    if x.dtype.primitive_bitwidth == 64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def power(a, b):
    """Return a^b; NaN for a < 0 unless b is a whole number."""
    size = tl.exp2(b * tl.log2(tl.abs(a)))
    of_negative = tl.where(b % 1.0 == 0, tl.where(b % 2.0 == 0, size, -size), float("nan"))
    return tl.where(b == 0, 1.0, tl.where(a < 0, of_negative, size))


NEAR = tl.constexpr(0.34657359)
"""ln(2) / 2. Where |x| is at least this, exp(x) - 1 loses less than two bits."""


@triton.jit
def expm1_near_zero(x):
    """Return exp(x) - 1 in float32 for |x| < ln(2) / 2, by the polynomial that Cephes has for exp. It takes
    seven multiplications; Kahan's method takes exp, log and a division."""
    p = 1.9875691500e-4 * x + 1.3981999507e-3
    p = p * x + 8.3334519073e-3
    p = p * x + 4.1665795894e-2
    p = p * x + 1.6666665459e-1
    p = p * x + 5.0000001201e-1
    return p * (x * x) + x


@triton.jit
def expm1(x):
    u = tl.exp(x)
    if x.dtype.primitive_bitwidth != 64:
        return tl.where(tl.abs(x) < NEAR, expm1_near_zero(x), u - 1.0)
    else:
        # Kahan's method, here and in log1p: near u = 1 a rounding error in u changes (u - 1) / log(u) hardly
        # at all, while u - 1 alone would keep only its leading digits.
        near = (u - 1.0) * (x / tl.log(u))
        # log(u) is not finite for u = 0 and u = Inf. There, and long before, u - 1 alone is exact.
        return tl.where(u == 1.0, x, tl.where((u == 0.0) | (x > 80.0), u - 1.0, near))


@triton.jit
def expdiff(x, y, m):
    """Return exp(x - m) - exp(y - m) without cancellation where x and y are close."""
    difference, below = x - y, tl.exp(y - m)
    if x.dtype.primitive_bitwidth == 64:
        near = below * expm1(difference)
    else:
        near = below * expm1_near_zero(difference)
    return tl.where(tl.abs(difference) < NEAR, near, tl.exp(x - m) - below)


@triton.jit
def log1p(x):
    u = 1.0 + x
    plain, near = tl.log(u), tl.log(u) * (x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.where((u == 0.0) | (tl.abs(x) > 1e30), plain, near))


@triton.jit
def tanh(x):
    # (1 - power) / (1 + power) loses digits near 0, about eps / |x|. The series ends before x^9, so its
    # relative error is 0.022 x^8: 6e-8 at 0.2, half a unit of float32. Its coefficients have 11 digits, which
    # is enough for float64 below 1e-3 only.
    CLOSE: tl.constexpr = 1e-3 if x.dtype.primitive_bitwidth == 64 else 0.2
    size, square = tl.abs(x), x * x
    power = tl.exp2(size * (-2.0 * LOG2E))
    near = size * (1.0 - square * (0.33333333333 - square * (0.13333333333 - square * 0.05396825397)))
    return with_sign_of(tl.where(size < CLOSE, near, (1.0 - power) / (1.0 + power)), x)


@triton.jit
def sinh(x):
    # (e + e / (1 + e)) / 2 with e = exp(|x|) - 1 has no cancellation; e / (1 + e) is NaN for e = Inf.
    beyond = expm1(tl.abs(x))
    return with_sign_of(tl.where(beyond > 1e30, 0.5 * beyond, 0.5 * (beyond + beyond / (1.0 + beyond))), x)


@triton.jit
def cosh(x):
    return 0.5 * (tl.exp(x) + tl.exp(-x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def softplus(x):
    # The exponent is never positive, so exp2 cannot overflow.
    return tl.maximum(x, 0.0) + log1p(tl.exp2(-tl.abs(x) * LOG2E))


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float64 if x.dtype.primitive_bitwidth == 64 else tl.float32)) < float("inf")


@triton.jit
def mix(x):
    """Apply one step of the hash lowbias32 on uint32, the same in all engines (unsoft/engines/dropout.py)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(seed, threshold, head, rows, keys):
    """Return a bool tile of the weights that survive dropout."""
    low, high = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    word = mix(mix(low + head.to(tl.uint32) * 0x9E3779B1) ^ high)
    word = mix(word + rows.to(tl.uint32) * 0x85EBCA77)
    return mix(word + keys.to(tl.uint32) * 0xC2B2AE3D).to(tl.int64) >= threshold
