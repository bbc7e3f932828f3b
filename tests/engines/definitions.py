"""Attention as the papers define it, in plain torch and float64: the reference of tests, independent of unsoft."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Weights of unmasked rows: logits s (..., keys), which keys are seen (same shape), and their number n (..., 1).
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


def _normalised(
    weight: Callable[[Tensor], Tensor], mass: Callable[[Tensor], Tensor], nothing: float = 0.0
) -> Weights:
    """weight(s) / (nothing + sum of mass(s)), both without overflow: they get exp(s - m), which m cancels from."""

    def weights(s: Tensor, seen: Tensor, n: Tensor) -> Tensor:
        m = torch.where(seen, s.abs(), 0.0).amax(-1, keepdim=True)
        total = torch.where(seen, mass(s, m), 0.0).sum(-1, keepdim=True) + nothing * (-m).exp()
        return torch.where(total == 0, 0.0, weight(s, m) / torch.where(total == 0, 1.0, total))

    return weights


def _exp(s: Tensor, m: Tensor) -> Tensor:
    return (s - m).exp()


DEFINITIONS: dict[str, Weights] = {
    "softmax": _normalised(_exp, _exp),  # Vaswani et al. 2017
    "softmax1": _normalised(_exp, _exp, nothing=1.0),  # Miller 2023
    "cog": _normalised(lambda s, m: s.sign() * _exp(s.abs(), m), lambda s, m: _exp(s.abs(), m)),  # Lv et al. 2024
    "sinh": _normalised(lambda s, m: _exp(s, m) - _exp(-s, m), lambda s, m: _exp(s, m) + _exp(-s, m)),
    "softpick": _normalised(  # Zuhri et al. 2025
        lambda s, m: (s.expm1() * (-m).exp()).clamp(min=0), lambda s, m: (s.expm1() * (-m).exp()).abs()
    ),
    "swishmax": _normalised(lambda s, m: s * _exp(s, m), lambda s, m: s.abs() * _exp(s, m), nothing=1.0),
    "l2": lambda s, seen, n: torch.where(seen, s, -math.inf).softmax(-1) / (
        torch.where(seen, s, -math.inf).softmax(-1).square().sum(-1, keepdim=True).sqrt()
    ),
    "identity": lambda s, seen, n: s / n,
    "relu": lambda s, seen, n: s.clamp(min=0) / n,  # Wortsman et al. 2023
    "relu2": lambda s, seen, n: s.clamp(min=0).square() / n,  # Hua et al. 2022
    "tanh": lambda s, seen, n: s.tanh() / n,
    "sigmoid": lambda s, seen, n: (s - n.log()).sigmoid(),  # Ramapuram et al. 2024
    "polynomial(3)": lambda s, seen, n: s**3 / n.sqrt(),  # Saratchandran et al. 2024
}  # fmt: skip
"""Without the entries that a row does not see, and for rows that see something."""


def attention_and_bound(
    name: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The output in float64, and how far rounding in q's arithmetic (float32 at least) can move each number of it.

    ``seen`` is a bool mask broadcastable to (batch, heads, queries, keys). The bound follows from what rounds: the logits (a
    sum of ``width`` products), the weights, the sum over keys, and the output in its own type.
    """
    dtype, eps = q.dtype, torch.finfo(torch.float64 if q.dtype == torch.float64 else torch.float32).eps
    group = q.shape[1] // max(k.shape[1], 1)
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q @ k.mT * scale
    seen = torch.ones_like(s, dtype=torch.bool) if seen is None else seen.expand(s.shape)
    n = seen.sum(-1, keepdim=True).clamp(min=1).double()

    def weights(logits: Tensor) -> Tensor:
        return torch.where(seen & seen.any(-1, keepdim=True), DEFINITIONS[name](logits, seen, n), 0.0)

    a = weights(s)
    slip = 4 * eps * abs(scale) * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :]
    spread = (weights(s + slip) - weights(s - slip)).abs() + (
        4 * slip + (16 + 4 * s.shape[-1] ** 0.5) * eps
    ) * a.abs()
    if name in ("sinh", "softpick"):  # written as differences of exponentials, which cancel near 0
        spread = spread + 4 * eps * torch.where(seen, DEFINITIONS["softmax"](s.abs(), seen, n), 0.0)
    out = a @ v
    return out, spread @ v.abs() + (torch.finfo(dtype).eps + eps) * out.abs() + torch.finfo(dtype).tiny
