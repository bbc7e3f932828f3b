"""Expected results of a call by the definition of its mechanism, and bounds of their rounding errors."""

import torch
from torch import Tensor

from unsoft.mechanisms import formulas
from unsoft.modules.definition import Logits
from unsoft.modules.registry import definition

DEFINED = sorted(name for name in formulas() if definition(name) is not None and name != "polynomial")
"""Formulas whose file has their definition in plain torch, without the one that takes a number."""
CANCELLING = ("sinh", "softpick")
"""Written as differences of exponentials, which lose digits near 0."""


def attention_and_bound(
    name: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The output in float64, and how far rounding in q's arithmetic (float32 at least) can move each number
    of it.

    ``seen`` is a bool mask broadcastable to (batch, heads, queries, keys). The bound follows from what
    rounds: the logits (a sum of ``width`` products), the weights (to bfloat16 where inputs are), the sum over
    keys, and the output in its own type.
    """
    dtype, eps = q.dtype, torch.finfo(torch.float64 if q.dtype == torch.float64 else torch.float32).eps
    group = q.shape[1] // max(k.shape[1], 1)
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q @ k.mT * scale
    seen = torch.ones_like(s, dtype=torch.bool) if seen is None else seen.expand(s.shape)
    n = seen.sum(-1, keepdim=True).clamp(min=1).double()
    i, j = (torch.arange(size, dtype=s.dtype) for size in s.shape[2:])

    def weights(logits: Tensor, name: str = name) -> Tensor:
        values = definition(name)(Logits(logits, torch.zeros_like(logits), seen, n, i[:, None], j))
        return torch.where(seen & seen.any(-1, keepdim=True), values, 0.0)

    a = weights(s)
    slip = 4 * eps * abs(scale) * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :]
    spread = (weights(s + slip) - weights(s - slip)).abs()
    spread = spread + (4 * slip + (16 + 4 * s.shape[-1] ** 0.5) * eps) * a.abs()
    if dtype == torch.bfloat16:
        spread = spread + torch.finfo(dtype).eps / 2 * a.abs()  # weights are rounded to it
    if name in CANCELLING:
        spread = spread + 4 * eps * weights(s.abs(), "softmax")
    out = a @ v
    return out, spread @ v.abs() + (torch.finfo(dtype).eps + eps) * out.abs() + torch.finfo(dtype).tiny
