"""Several processes that train one model, as ``torchrun`` starts them; all no-ops in a single process."""

from __future__ import annotations

import os

import torch
from torch import distributed


def count() -> int:
    """Return the number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return True in the process that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def join() -> None:
    """Join the process group, before files are read or written that all must see alike."""
    if count() > 1:
        from accelerate import PartialState  # type: ignore[import-untyped]

        PartialState(cpu=not torch.accelerator.is_available())


def wait() -> None:
    """Wait for all processes."""
    if count() > 1:
        distributed.barrier()


def any_set(flag: bool) -> bool:
    """Return True in all processes if the flag is set in any, so that all stop at the same step."""
    if count() == 1:
        return flag
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    largest = torch.tensor(int(flag), device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return bool(largest.item())
