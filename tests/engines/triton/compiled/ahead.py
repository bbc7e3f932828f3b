"""Compile the kernels of a call without a GPU.

A fake driver names the target, so that Triton specialises and compiles a launch as on that GPU, up to the
cubin or hsaco, and stops there.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Call, Upstream
from unsoft.engines.triton import binding, launch, recurrence
from unsoft.engines.triton.launch import candidates, is_costly

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class Driver:
    """The part of Triton's driver that its compiler uses."""

    def __init__(self, target: str) -> None:
        self.target = TARGETS[target]

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target)

    def get_current_stream(self, device):
        return 0


@contextmanager
def pretending(target: str, start):
    """Make the engine behave as on the target and pass its launches to ``start``."""
    hip = "7" if target.startswith("gfx") else None
    with (
        mock.patch.object(driver, "_active", Driver(target)),
        mock.patch.object(launch, "start", start),
        mock.patch.object(recurrence, "architecture", lambda device: target),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.version, "hip", hip),
        mock.patch.object(binding, "_splits", lambda programs, keys: 8),
    ):
        yield


def compile_launch(made: launch.Launch, sizes):
    """Return the compiled kernel; resources.py reads what it needs."""
    return made.kernel.warmup(**launch.keywords(made.arguments, sizes), grid=made.grid(sizes))


def first_sizes(made: launch.Launch, target: str):
    """Return the tile sizes that the engine tries first on a target."""
    if made.sizes:
        return made.sizes[0]
    if made.only_for_nan:
        return launch.EXACT[made.width > 128]
    costly = is_costly(made.formula)
    return candidates(made.name, target, made.width, 8 * made.dtype.itemsize, costly)[0]


def example(
    formula,
    *,
    width=64,
    queries=1024,
    keys=1024,
    heads=8,
    kv_heads=2,
    dtype=torch.bfloat16,
    causal=True,
    **options,
):
    """Return a call of zeros."""
    q = torch.zeros(1, heads, queries, width, dtype=dtype)
    k = torch.zeros(1, kv_heads, keys, width, dtype=dtype)
    return checked_call(q, k, k, formula, is_causal=causal, enable_gqa=True, **options)[0]


def launches(call: Call, target: str, *, exact: bool = False) -> list[launch.Launch]:
    """Return the launches of a forward and a backward call: exact ones (for NaN and Inf) or fast ones."""
    started: list[launch.Launch] = []
    with pretending(target, started.append):
        rows = binding.forward(call)
        fields = (call.query_fields is not None, call.key_fields is not None)
        needs = (call.bias is not None, call.params.shape[0] > 0, *fields)
        binding.backward(call, Upstream(rows.out, rows, *needs))
    return [made for made in started if made.only_for_nan == exact]
