"""Query, key and value: what they must be and how they must fit each other, and the shapes that follow."""

import math
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def device_type(x: Any) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"


def as_autocast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """What autocast does to the inputs of torch's attention; the arithmetic inside keeps its precision."""
    kind = device_type(query)
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    query, key, value = (
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in narrow else x for x in (query, key, value)
    )
    return query, key, value


def check_tensors(query: Any, key: Any, value: Any) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"attention: argument '{name}' must be a tensor, not {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            raise TypeError(f"attention: argument '{name}' must be a dense tensor, not nested or {x.layout}")
        if x.dtype not in DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"attention: argument '{name}' has dtype {x.dtype}; supported are {allowed}")
        if x.dim() < 2:
            raise ValueError(
                f"attention: argument '{name}' has shape {shape_of(x)}; expected (..., heads, length, dim),"
                " at least 2-D"
            )
    for name in ("key", "value"):
        x = named[name]
        if x.dtype != query.dtype:
            raise TypeError(
                f"attention: argument '{name}' has dtype {x.dtype}, 'query' has {query.dtype}; they must"
                " match"
            )
        if x.device != query.device:
            raise ValueError(
                f"attention: argument '{name}' is on device {x.device}, 'query' is on {query.device}; they"
                " must match"
            )
        if x.dim() != query.dim():
            raise ValueError(
                f"attention: argument '{name}' has {x.dim()} dimensions (shape {shape_of(x)}), 'query' has"
                f" {query.dim()} (shape {shape_of(query)}); they must match"
            )


def check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(_mismatch("key", key, "query", query, "head dimension", -1))
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(_mismatch("value", value, "key", key, "keys", -2))


def batch_shape(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The dimensions before the heads, broadcast over the three tensors."""
    batch = list(query.shape[:-3])
    for name, x in (("key", key), ("value", value)):
        for place, size in enumerate(x.shape[:-3]):
            if size != 1 and batch[place] not in (1, size):
                raise ValueError(
                    f"attention: argument '{name}' has batch size {size} in dimension {place} (shape"
                    f" {shape_of(x)}), which does not broadcast with 'query' (shape {shape_of(query)}) and"
                    f" 'key' (shape {shape_of(key)})"
                )
            batch[place] = size if batch[place] == 1 else batch[place]
    return tuple(batch)


def head_count(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The head dimension of the output: () for 2-D inputs."""
    if not isinstance(enable_gqa, bool):
        raise TypeError(f"attention: argument 'enable_gqa' must be True or False, not {enable_gqa!r}")
    if query.dim() == 2:
        return ()
    heads, shared = query.shape[-3], key.shape[-3]
    if value.shape[-3] != shared:
        raise ValueError(_mismatch("value", value, "key", key, "heads", -3))
    if heads != shared and not enable_gqa:
        raise ValueError(
            _mismatch("key", key, "query", query, "heads", -3)
            + ", unless enable_gqa=True lets groups of query heads share one key head"
        )
    if heads != shared and (shared == 0 or heads % shared):
        raise ValueError(
            f"attention: argument 'query' has {heads} heads (shape {shape_of(query)}), which is not a"
            f" multiple of the {shared} heads of 'key' (shape {shape_of(key)})"
        )
    return (heads,)


def as_4d(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    if x.dim() < 4:
        return x[(None,) * (4 - x.dim())]
    if x.shape[:-3] != batch:
        x = x.expand(*batch, *x.shape[-3:])
    return x if x.dim() == 4 else x.reshape(math.prod(batch), *x.shape[-3:])


def _mismatch(name: str, x: Tensor, other: str, y: Tensor, what: str, dim: int) -> str:
    return (
        f"attention: argument '{name}' has {_counted(what, x.shape[dim])} (shape {shape_of(x)}), '{other}'"
        f" has {y.shape[dim]} (shape {shape_of(y)}); they must match"
    )


def _counted(what: str, size: int) -> str:
    return f"{size} {what}" if what.endswith("s") else f"{what} {size}"


def shape_of(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
