"""A float mask is added after a modifier has changed the logit:
every engine against plain torch from the definitions."""

import math

import pytest
import torch

import unsoft
from unsoft.hf.swap import capped
from unsoft.modules.registry import resolve


def normalised(weight, mass, extra=0.0):
    return weight / (mass.sum(-1, keepdim=True) + extra)


def softpick(s, n):
    e = s.exp() - 1
    return normalised(e.clamp(min=0), e.abs())


ON_LOGIT = {  # of the logit with the mask in it, and n
    "softmax": lambda s, n: s.softmax(-1),
    "softmax1": lambda s, n: normalised(s.exp(), s.exp(), 1.0),
    "l2": lambda s, n: s.exp() / s.exp().norm(dim=-1, keepdim=True),
    "softpick": softpick,
    "sigmoid": lambda s, n: (s - math.log(n)).sigmoid(),
    "relu": lambda s, n: s.clamp(min=0) / n,
    "relu2": lambda s, n: s.clamp(min=0) ** 2 / n,
}
ON_STRENGTH = {  # of the logit, exp(mask) and n
    "cog": lambda s, b, n: normalised(s.sign() * s.abs().exp() * b, s.abs().exp() * b),
    "sinh": lambda s, b, n: normalised(s.sinh() * b, s.cosh() * b),
    "swishmax": lambda s, b, n: normalised(s * s.exp() * b, (s * s.exp() * b).abs(), 1.0),
    "identity": lambda s, b, n: s * b / n,
    "tanh": lambda s, b, n: s.tanh() * b / n,
}
CHANGES = {
    "logn": (lambda name: resolve(f"logn+{name}"), lambda s, n: s * math.log(n) / math.log(512)),
    "cap": (lambda name: capped(resolve(name), 2.0), lambda s, n: 2 * (s / 2).tanh()),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, "logn") for name in (*ON_LOGIT, *ON_STRENGTH)),
        ("softpick", "cap"),
        ("sigmoid", "cap"),
        ("cog", "cap"),
    ],
)
def test_values_and_gradients(name, change):
    length = 129
    generator = torch.Generator().manual_seed(3)
    q, k, v, g = (torch.randn(1, 2, length, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    slopes = torch.tensor([0.5, 0.03125], dtype=torch.float64)[:, None, None]
    mask = -slopes * (torch.arange(length)[:, None] - torch.arange(length)).abs()  # ALiBi
    leaves = [x.requires_grad_() for x in (q, k, v, mask)]
    make, of = CHANGES[change]
    s = of(q @ k.mT / 4, length)
    weights = (
        ON_LOGIT[name](s + mask, length) if name in ON_LOGIT else ON_STRENGTH[name](s, mask.exp(), length)
    )
    expected = weights @ v
    true = torch.autograd.grad(expected, leaves, g)
    for engine in ("dense", "tiled", "native"):
        out = unsoft.attention(q, k, v, make(name), attn_mask=mask, engine=engine)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
        for a, b in zip(torch.autograd.grad(out, leaves, g), true, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_row_of_one_key_keeps_its_mask_though_its_logit_is_scaled_to_nothing():
    q, k, v = torch.ones(3, 1, 1, 1, 4, dtype=torch.float64)
    mask = torch.full((1, 1), 0.7, dtype=torch.float64, requires_grad=True)
    for engine in ("dense", "tiled", "native"):
        out = unsoft.attention(q, k, v, "logn+sigmoid", attn_mask=mask, engine=engine)
        torch.testing.assert_close(out, torch.full_like(out, 0.7).sigmoid())
        (grad,) = torch.autograd.grad(out.sum(), mask)
        assert grad.item() == pytest.approx(
            4 * torch.tensor(0.7).sigmoid().item() * torch.tensor(-0.7).sigmoid().item()
        )
