"""Reasons why the Triton engine cannot run a call, or does not work on a device."""

import importlib.util
from collections.abc import Callable
from functools import cache

import torch

from unsoft.engines.call import Call
from unsoft.engines.triton.codegen import unprintable
from unsoft.engines.triton.launch import KernelError, interpreted, on_device
from unsoft.errors import one_line
from unsoft.tracing import constant_in_graph

WIDEST = 256
MOST_HEADS = 65535
"""Largest number of programs in the second dimension of a launch, which is heads for linear attention and
systems for magnitude. Kernels of formulas have one dimension."""
OLDEST = (8, 0)
"""Compute capability of Ampere, the oldest architecture whose code is compiled and run in the tests."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INSTALL = "pip install 'unsoft[gpu]'"


def unsupported(call: Call) -> str | None:
    """Return why the engine cannot run a call, None if it can."""
    if reason := missing(call.q.device.type, call.q.device.index):
        return reason
    if max(call.q.shape[3], call.v.shape[3]) > WIDEST:
        return f"heads are wider than {WIDEST}; use 'tiled'"
    if call.q.dtype not in DTYPES:
        return f"it has no code for {call.q.dtype}; use 'tiled'"
    reason = unprintable(call.formula.key)
    return None if reason is None else f"{reason}; use 'tiled'"


def unfit(call: Call) -> str | None:
    """Return why no kernel of linear attention can run a call, whatever it computes; None if one could."""
    if call.q.shape[0] * call.q.shape[1] > MOST_HEADS:
        return f"batch times heads is more than {MOST_HEADS}; use 'tiled'"
    if call.q.dtype not in DTYPES:
        return f"it has no code for {call.q.dtype}; use 'tiled'"
    return None


@cache
def installed() -> bool:
    """Return True if Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@constant_in_graph
def missing(device: str, index: int | None) -> str | None:
    """Return why the engine cannot run on a device at all, None if it can.

    >>> missing("mps", None) is None
    False
    """
    if not installed():
        other = "native" if device == "cpu" else "tiled"
        return f"Triton is not installed ({INSTALL}); use {other!r}"
    if device == "cpu":
        return None if interpreted() else "it runs on GPUs, and the tensors are on the CPU; use 'native'"
    if device != "cuda":
        return f"it runs on GPUs of NVIDIA and AMD, and the tensors are on {device}; use 'tiled'"
    if not torch.version.hip and torch.cuda.get_device_capability(index) < OLDEST:
        name = torch.cuda.get_device_name(index)
        own, oldest = (f"{x[0]}.{x[1]}" for x in (torch.cuda.get_device_capability(index), OLDEST))
        return f"it needs compute capability {oldest}, and {name} has {own}; use 'tiled'"
    return None


def device_of(device: str, index: int | None) -> torch.device:
    return torch.device(device) if index is None else torch.device(device, index)


def probe(device: torch.device) -> None:
    """Run the smallest kernel, which needs Triton, its compiler, a C compiler and the driver to work
    together."""
    from unsoft.engines.triton.kernel.tiles import copy_kernel

    x = torch.arange(16, dtype=torch.float32, device=device)
    y = torch.zeros_like(x)
    with on_device(x):
        copy_kernel[(1,)](x, y, SIZE=16)
    if not torch.equal(x, y):
        raise RuntimeError("a copy of sixteen numbers came out wrong")


@cache
def failure(device: str, index: int | None) -> str | None:
    """Return None if Triton compiles and runs a small kernel on the device, otherwise what went wrong."""
    try:
        probe(device_of(device, index))
    except Exception as error:  # whatever a compiler, a driver or a linker raises
        return one_line(error)
    return None


@cache
def first_failure(run: Callable[..., object], *arguments: object) -> str | None:
    """Return why Triton cannot compile what ``run(*arguments)`` starts, None if it can; tried once."""
    try:
        run(*arguments)
    except KernelError as error:
        return str(error)
    return None


@constant_in_graph
def unavailable(device: str, index: int | None) -> str | None:
    """Return why the engine does not work on the device, None if it does."""
    return failure(device, index)
