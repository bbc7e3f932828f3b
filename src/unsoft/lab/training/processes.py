"""Several processes that train one model, as ``torchrun`` starts them; alone, all of this does nothing."""

from __future__ import annotations

import os

import torch
from torch import distributed


def count() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Is this the one that prints and writes?"""
    return int(os.environ.get("RANK", "0")) == 0


def join() -> None:
    """Meets the others, before anything is read or written that all must see alike."""
    if count() > 1:
        from accelerate import PartialState  # type: ignore[import-untyped]

        PartialState(cpu=not torch.accelerator.is_available())


def wait() -> None:
    """Until all are here."""
    if count() > 1:
        distributed.barrier()


def any_says(flag: bool) -> bool:
    """Does one of them say so? All get the same answer, so all stop at the same step."""
    if count() == 1:
        return flag
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    said = torch.tensor(int(flag), device=device)
    distributed.all_reduce(said, distributed.ReduceOp.MAX)
    return bool(said.item())
