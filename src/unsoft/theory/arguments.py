"""Reads beta, gamma and other numbers: float64 tensors, or an error that names the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = float | Sequence[float] | Tensor


def read_numbers(name: str, given: Numbers) -> Tensor:
    """The argument as a float64 tensor without NaN or infinity.

    >>> read_numbers("beta", [1, 2])
    tensor([1., 2.], dtype=torch.float64)
    """
    try:
        numbers = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name}: expected a number, a list of numbers or a tensor, not {type(given).__name__}"
        ) from None
    if not numbers.isfinite().all():
        bad = numbers[~numbers.isfinite()].flatten()[0].item()
        raise ValueError(f"{name}: every value must be finite, but one is {bad}")
    return numbers.detach()


def read_logits(beta: Numbers, gamma: Numbers) -> tuple[Tensor, Tensor]:
    """Mean and spread of the logits, broadcast to one shape; the spread is 0 or more."""
    mean, spread = read_numbers("beta", beta), read_numbers("gamma", gamma)
    if (spread < 0).any():
        raise ValueError(
            f"gamma: the spread of the logits must not be negative, but one value is {spread.min():g}"
        )
    try:
        mean, spread = torch.broadcast_tensors(mean, spread)
    except RuntimeError:
        raise ValueError(
            f"beta, gamma: shapes {tuple(mean.shape)} and {tuple(spread.shape)} do not broadcast; give one"
            " number, equal shapes, or beta of shape (B, 1) and gamma of shape (G,)"
        ) from None
    return mean, spread


def read_at_least(name: str, given: Numbers, least: float) -> Tensor:
    """:func:`read_numbers` with a lower bound."""
    numbers = read_numbers(name, given)
    if (numbers < least).any():
        raise ValueError(f"{name}: every value must be at least {least:g}, but one is {numbers.min():g}")
    return numbers
