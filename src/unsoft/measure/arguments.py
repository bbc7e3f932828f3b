"""What a user passes to a measure, checked once.

Every message names the argument, what was given and what works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import Formula


def check_float(name: str, x: Any, dims: int, shape: str) -> None:
    """A floating tensor of at least ``dims`` dimensions; ``shape`` says in words what they are."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"measure: argument '{name}' must be a tensor of shape {shape}, not {type(x).__name__}"
        )
    if not x.dtype.is_floating_point:
        raise TypeError(
            f"measure: argument '{name}' has dtype {x.dtype}; use a floating dtype, for example"
            f" {name}.float()"
        )
    if x.dim() < dims:
        raise ValueError(f"measure: argument '{name}' has shape {tuple(x.shape)}; expected {shape}")


def check_mask(name: str, mask: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """None, or a bool tensor that broadcasts to ``shape``."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"measure: argument '{name}' must be a bool tensor or None, not {type(mask).__name__}"
        )
    if mask.dtype != torch.bool:
        raise TypeError(
            f"measure: argument '{name}' has dtype {mask.dtype}; use bool, True = visible. Of an additive"
            f" mask pass {name} > torch.finfo({name}.dtype).min, of zeros and ones {name}.bool()"
        )
    if mask.device != device:
        raise ValueError(
            f"measure: argument '{name}' is on device {mask.device}, the measured tensor on {device}"
        )
    check_broadcast(name, mask, shape)


def check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """``x`` may be expanded to ``shape``."""
    fits = x.dim() <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(x.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"measure: argument '{name}' has shape {tuple(x.shape)}, which does not broadcast to"
            f" {tuple(shape)}"
        )


def check_leading(name: str, x: Tensor, weights: Tensor) -> None:
    """The dimensions of ``x`` before the last two broadcast to those of ``weights``, heads and batch."""
    try:
        fits = torch.broadcast_shapes(x.shape[:-2], weights.shape[:-2]) == weights.shape[:-2]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"measure: argument '{name}' has shape {tuple(x.shape)}; the dimensions before the last two must"
            f" broadcast to those of 'weights', {tuple(weights.shape)}. Where query heads share key heads,"
            f" repeat these: {name}.repeat_interleave(queries_per_key_head, -3)"
        )


def check_count(name: str, value: Any, least: int) -> None:
    """A whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"measure: argument '{name}' must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"measure: argument '{name}' is {value}; it must be at least {least}")


def computed(x: Tensor) -> Tensor:
    """``x`` in the dtype that measures compute and answer in: float32 for half precision, else its own."""
    return x.float() if x.dtype.itemsize < 4 else x


def row_weights(mechanism: Any) -> Callable[[Tensor], Tensor]:
    """The function from logits (..., keys), all visible, to weights of the same shape that a mechanism is.

    >>> row_weights(Formula("max(s, 0)/n"))(torch.tensor([2.0, -1.0]))
    tensor([1., 0.])
    """
    if isinstance(mechanism, Formula):
        return mechanism.row
    if not callable(mechanism):
        raise TypeError(
            "measure: argument 'mechanism' must be a Formula or a function from logits (..., keys) to"
            f" weights, not {mechanism!r}; for a name such as 'cog' pass unsoft.mechanisms()['cog']"
        )

    def checked(logits: Tensor) -> Tensor:
        weights = mechanism(logits)
        if not isinstance(weights, Tensor) or weights.shape != logits.shape:
            given = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"measure: argument 'mechanism' turned logits of shape {tuple(logits.shape)} into {given}; it"
                " must return one weight for each logit"
            )
        return weights

    return checked
