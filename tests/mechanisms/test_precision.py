"""No formula cancels: weights of rows from 1e-300 to 1e3 have a relative error of some roundings,
against 60 digits."""

import mpmath
import pytest
import torch

import unsoft
from unsoft.modules.registry import resolve


def over(weights, masses, extra=0):
    total = mpmath.fsum(masses) + extra
    return [w / total for w in weights]


def softpick(s, n):
    return over([max(mpmath.expm1(x), 0) for x in s], [abs(mpmath.expm1(x)) for x in s])


DEFINITIONS = {
    "cog": lambda s, n: over(
        [mpmath.sign(x) * mpmath.exp(abs(x)) for x in s], [mpmath.exp(abs(x)) for x in s]
    ),
    "identity": lambda s, n: [x / n for x in s],
    "l2": lambda s, n: [mpmath.exp(x) / mpmath.sqrt(mpmath.fsum(mpmath.exp(2 * y) for y in s)) for x in s],
    "polynomial(3)": lambda s, n: [x**3 / mpmath.sqrt(n) for x in s],
    "relu": lambda s, n: [max(x, 0) / n for x in s],
    "relu2": lambda s, n: [max(x, 0) ** 2 / n for x in s],
    "sigmoid": lambda s, n: [1 / (1 + n * mpmath.exp(-x)) for x in s],
    "sinh": lambda s, n: over([mpmath.sinh(x) for x in s], [mpmath.cosh(x) for x in s]),
    "softmax": lambda s, n: over([mpmath.exp(x) for x in s], [mpmath.exp(x) for x in s]),
    "softmax1": lambda s, n: over([mpmath.exp(x) for x in s], [mpmath.exp(x) for x in s], 1),
    "softpick": softpick,
    "logn(2)+softpick": lambda s, n: softpick([x * mpmath.log(n) / mpmath.log(2) for x in s], n),
    "swishmax": lambda s, n: over([x * mpmath.exp(x) for x in s], [abs(x * mpmath.exp(x)) for x in s], 1),
    "tanh": lambda s, n: [mpmath.tanh(x) / n for x in s],
}
ROW = torch.tensor([1.0, -0.75, 0.5, 0.3, -0.2, 0.9, 0.011, -1.0], dtype=torch.float64)


@pytest.mark.parametrize("size", [1e-300, 1e-100, 1e-30, 1e-8, 1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_weights(name, size):
    dtype = torch.float64
    logits = ROW * size
    with mpmath.workdps(60):
        expected = DEFINITIONS[name]([mpmath.mpf(x) for x in logits.tolist()], len(ROW))
    roundings = (
        16 * torch.finfo(dtype).eps * max(1, size)
    )  # a logit of 1000 that is off in its last bit moves exp by 1000 of them
    row = resolve(name).row(logits)
    q, k = (
        logits.view(1, 1, 1, 8),
        torch.eye(8, dtype=dtype).view(1, 1, 8, 8),
    )  # key j reads logit j, value j shows its weight
    actual = [row.tolist()]
    for engine in ("dense", "tiled", "native"):
        actual.append(unsoft.attention(q, k, k, name, scale=1.0, engine=engine).flatten().tolist())
    for weights in actual:
        for weight, true in zip(weights, expected, strict=True):
            smallest = 1e-290  # below, digits are lost and numbers vanish, as in every float64
            assert abs(weight - true) <= roundings * abs(true) + smallest, (weight, true)


@pytest.mark.parametrize("engine", ["dense", "tiled", "native"])
@pytest.mark.parametrize("name", ["softpick", "sinh"])
def test_float32_keeps_the_ratios_of_tiny_logits(name, engine):
    logits = (ROW * 1e-30).float()
    q, k = logits.view(1, 1, 1, 8), torch.eye(8).view(1, 1, 8, 8)
    actual = unsoft.attention(q, k, k, name, scale=1.0, engine=engine).flatten().double()
    with mpmath.workdps(60):
        expected = DEFINITIONS[name]([mpmath.mpf(x) for x in logits.tolist()], 8)
    true = torch.tensor([float(x) for x in expected], dtype=torch.float64)
    torch.testing.assert_close(actual, true, rtol=1e-6, atol=0)
