"""Checks of beta, gamma and other numbers, which return float64 tensors."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.formula import Formula

Mechanism = str | Formula
Numbers = float | Sequence[float] | Tensor
Params = Mapping[str, float] | None


def read_numbers(name: str, value: Numbers) -> Tensor:
    """Return the argument as a float64 tensor without NaN or infinity.

    >>> read_numbers("beta", [1, 2])
    tensor([1., 2.], dtype=torch.float64)
    """
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name}: expected a number, a list of numbers or a tensor, not {type(value).__name__}"
        ) from None
    if not numbers.isfinite().all():
        bad = numbers[~numbers.isfinite()].flatten()[0].item()
        raise ValueError(f"{name}: every value must be finite, but one is {bad}")
    return numbers.detach()


def read_logits(beta: Numbers, gamma: Numbers) -> tuple[Tensor, Tensor]:
    """Return mean and spread of the logits, broadcast to one shape; the spread is 0 or more."""
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


def read_at_least(name: str, value: Numbers, least: float) -> Tensor:
    """Return :func:`read_numbers` of values that have a lower bound."""
    numbers = read_numbers(name, value)
    if (numbers < least).any():
        raise ValueError(f"{name}: every value must be at least {least:g}, but one is {numbers.min():g}")
    return numbers


def read_dim(dim: int | None) -> int | None:
    """Return the dimension of a sphere of keys, at least 3, or None for Gaussian keys."""
    return None if dim is None else whole_number("sparsity", "dim", dim, 3)
