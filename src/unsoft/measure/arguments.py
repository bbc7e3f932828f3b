"""Checks of the tensors that users pass to a measure.

Every message names the argument, what was passed and what works.
"""

from typing import Any

import torch
from torch import Tensor


def wrong_shape(problem: str, **tensors: Tensor) -> ValueError:
    """Return an error with the shapes of the tensors, the wrong one first.

    >>> wrong_shape("it must match", keys=torch.ones(2, 3), weights=torch.ones(4, 5))
    ValueError("measure: argument 'keys' has shape (2, 3), 'weights' (4, 5); it must match")
    """
    shapes = ", ".join(f"'{name}' {tuple(x.shape)}" for name, x in tensors.items())
    return ValueError(f"measure: argument {shapes.replace(' (', ' has shape (', 1)}; {problem}")


def check_float(name: str, x: Any, dims: int, shape: str) -> None:
    """Raise unless ``x`` is a floating tensor of at least ``dims`` dimensions, described by ``shape``."""
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
        raise wrong_shape(f"expected {shape}", **{name: x})


def check_mask(name: str, mask: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless the mask is None or a bool tensor that broadcasts to ``shape``."""
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
    """Raise ValueError unless ``x`` can be expanded to ``shape``."""
    fits = x.dim() <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(x.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"measure: argument '{name}' has shape {tuple(x.shape)}, which does not broadcast to"
            f" {tuple(shape)}"
        )


def check_leading(name: str, x: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless batch and heads, all but the last two dimensions, broadcast to the weights'."""
    try:
        fits = torch.broadcast_shapes(x.shape[:-2], weights.shape[:-2]) == weights.shape[:-2]
    except RuntimeError:
        fits = False
    if not fits:
        raise wrong_shape(
            "the dimensions before the last two must broadcast to those of 'weights',"
            f" {tuple(weights.shape)}. Where query heads share key heads, repeat these:"
            f" {name}.repeat_interleave(queries_per_key_head, -3)",
            **{name: x},
        )


def check_per_key(name: str, x: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless ``x`` (..., keys, any) has a row for each key of ``weights``."""
    if x.shape[-2] != weights.shape[-1]:
        problem = f"it needs one row for each of the {weights.shape[-1]} keys"
        raise wrong_shape(problem, **{name: x}, weights=weights)
    check_leading(name, x, weights)


def computed(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of computation and result: float32 for half precision, else its own."""
    return x.float() if x.dtype.itemsize < 4 else x
