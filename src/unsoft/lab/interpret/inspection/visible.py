"""Which keys does a row see? Read from the mask that the attention function got, without the padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from unsoft.hf.attention import NAME
from unsoft.lab.interpret.inspection.observe import Seen


@dataclass(frozen=True)
class Visible:
    """What each of n rows sees of n keys."""

    kind: str
    """``full``, ``causal``, or ``other`` for windows and everything else."""
    table: Tensor | None
    """Bool (1 or heads, n, n), None if everything is visible."""
    bias: Tensor | None = None
    """What the mask adds to the logits (1 or heads, n, n), if it does more than hide."""

    def rows(self, start: int, stop: int) -> tuple[Tensor | None, int]:
        """The part of the table for rows start..stop, and how many keys they need to look at."""
        keys = stop if self.kind == "causal" else -1
        if self.table is None:
            return None, keys
        return self.table[:, start:stop, : None if keys < 0 else keys], keys


def visible_keys(seen: Seen, item: int, kept: Tensor | None) -> Visible:
    """Of one sequence of the batch; ``kept`` are the positions (n,) that are not padding, None if all."""
    n = seen.query.shape[-2] if kept is None else len(kept)
    mask = seen.mask
    if mask is None:
        return Visible("causal", _causal(n, seen.query.device)) if looks_back(seen) else Visible("full", None)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise ValueError(
            f"inspect: the attention of {seen.name} got a mask of type"
            f" {type(mask).__name__}{list(mask.shape) if isinstance(mask, Tensor) else ''}, from which"
            " visibility cannot be read; load the model with attn_implementation='sdpa' or 'eager'"
        )
    table = mask[item if len(mask) > 1 else 0]
    table = table.expand(len(table), seen.query.shape[-2], seen.key.shape[-2])
    if mask.shape[-2] == 1 and hasattr(seen.module, NAME) and looks_back(seen):
        table = table & _causal(table.shape[-1], table.device)  # a swapped mechanism's mask names keys only
    if kept is not None:
        table = table[:, kept][:, :, kept]
    if table.dtype == torch.bool:
        return _named(table, None)
    visible = table > torch.finfo(table.dtype).min / 2
    bias = torch.where(visible, table, 0.0)
    return _named(visible, bias if bool(bias.any()) else None)


def _named(table: Tensor, bias: Tensor | None) -> Visible:
    n = table.shape[-1]
    if bool(table.all()):
        return Visible("full", None, bias)
    if torch.equal(table, _causal(n, table.device).expand_as(table)):
        return Visible("causal", _causal(n, table.device), bias)
    return Visible("other", table, bias)


def looks_back(seen: Seen) -> bool:
    """Is the attention causal by itself, as far as its mask does not say?"""
    told = seen.options.get("is_causal")
    if told is not None:
        return bool(told)
    config = getattr(seen.module, "config", None)
    return bool(getattr(seen.module, "is_causal", True) and getattr(config, "is_causal", True))


@lru_cache(maxsize=2)
def _causal(n: int, device: torch.device) -> Tensor:
    return torch.ones(1, n, n, dtype=torch.bool, device=device).tril()
