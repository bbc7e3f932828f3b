"""From the residual stream to logits: final norm, unembedding, soft-cap, as one small formula.

A norm divides the stream by one number per token, its scale, and multiplies by a gain. The gain is folded
into the unembedding, and so is the centring of a LayerNorm; what is left is

    logits = unembedding @ stream / scale + constant        (then the soft-cap, if there is one)

so an addition to the stream acts in two ways, through the scale and directly, which can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-3
"""Of the size of logits: how far the formula may be from the model."""


@dataclass(frozen=True)
class Norm:
    """``centred`` is that of LayerNorm; the other kind is RMSNorm."""

    centred: bool
    eps: float
    gain: Tensor
    shift: Tensor | None

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def square(self, stream: Tensor) -> Tensor:
        """The square of the scale, one number per token."""
        return self.centre(stream).square().mean(-1) + self.eps

    def __call__(self, stream: Tensor) -> Tensor:
        result = self.centre(stream) / self.square(stream).sqrt()[..., None] * self.gain
        return result if self.shift is None else result + self.shift


@dataclass(frozen=True)
class Readout:
    """``unembedding`` is (words, width) with the gain folded in, ``constant`` (words,) or None."""

    norm: Norm
    unembedding: Tensor
    constant: Tensor | None
    softcap: float | None

    def logits(self, stream: Tensor, square: Tensor | None = None) -> Tensor:
        """Of streams (..., width); ``square`` holds the squared scale fixed instead of taking the stream's
        own."""
        square = self.norm.square(stream) if square is None else square
        return self.finish(stream @ self.unembedding.mT / square.sqrt()[..., None])

    def finish(self, raw: Tensor) -> Tensor:
        """Logits from ``unembedding @ stream / scale``."""
        if self.constant is not None:
            raw = raw + self.constant
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


def read_norm(module: nn.Module) -> Norm:
    """The formula of a norm, found by trying which one computes what the module does.

    >>> read_norm(nn.LayerNorm(8)).centred
    True
    >>> read_norm(nn.Softmax(-1))
    Traceback (most recent call last):
    ValueError: neurons: the final norm Softmax is neither a LayerNorm nor an RMSNorm
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        probe = torch.randn(4, weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight)
        expected = module(probe).detach().float()
        for norm in _norms(module, weight.detach().float()):
            if torch.allclose(norm(probe.float()), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return norm
    raise ValueError(
        f"neurons: the final norm {type(module).__name__} is neither a LayerNorm nor an RMSNorm with a gain"
    )


def _norms(module: Any, weight: Tensor) -> Iterator[Norm]:
    """What a norm with these parameters could compute; Gemma's gain is one more than its weight."""
    names = ("eps", "variance_epsilon", "epsilon")
    eps = next((value for name in names if isinstance(value := getattr(module, name, None), float)), 1e-6)
    bias = getattr(module, "bias", None)
    shift = bias.detach().float() if isinstance(bias, Tensor) else None
    for centred in (True, False):
        for gain in (weight, 1 + weight):
            yield Norm(centred, eps, gain, shift)


def read_out(model: Any, norm: nn.Module, head: Any) -> Readout:
    """The formula of a model's logits, from its parameters and configuration;
    gain folded into the unembedding."""
    found = read_norm(norm)
    weight: Tensor = head.weight.detach().float()
    bias = getattr(head, "bias", None)
    constant = bias.detach().float() if isinstance(bias, Tensor) else None
    if found.shift is not None:
        constant = weight @ found.shift + (0.0 if constant is None else constant)
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    return Readout(
        found,
        found.centre(weight * found.gain),
        constant,
        next((float(cap) for cap in caps if cap), None),
    )


def check_readout(model: Any, readout: Readout, stream: Tensor, logits: Tensor) -> None:
    """Refuses a model whose logits are not what the formula says."""
    ours = readout.logits(stream.float())
    error = float((ours - logits.float()).abs().max())
    size = float(logits.float().abs().max())
    if not error <= _TOLERANCE * size + _TOLERANCE:
        raise ValueError(
            f"neurons: the logits of {type(model).__name__} are not its final norm and unembedding alone:"
            f" they differ by {error:.2g} where the largest is {size:.2g}, so something else changes them (a"
            " scale, a projection, another norm)"
        )
