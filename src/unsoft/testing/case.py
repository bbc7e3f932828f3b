"""What is called: sizes and kinds that can be printed, and the tensors drawn from a seed for them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from unsoft.formula import Formula
from unsoft.formula.arguments import SIDES

DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    """One kind of call: L queries, S keys of width D, values of width Dv, H query heads on Hk key heads."""

    length: int = 7
    keys: int = 9
    width: int = 8
    value_width: int = 5
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    mask: str = "none"
    """A name of :data:`MASKS`."""
    causal: bool | str = False
    layout: str = "contiguous"
    """A name of :data:`LAYOUTS`."""
    spread: float = 1.0
    """Standard deviation of the logits."""
    dropout: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, L, S), the shape of the weights."""
        return self.batch, self.heads, self.length, self.keys

    @property
    def offset(self) -> int | None:
        """Row i sees the keys up to i + offset; None = not causal."""
        if self.causal is False:
            return None
        return self.keys - self.length if self.causal == "lower_right" else 0

    def __str__(self) -> str:
        text = f"B={self.batch} H={self.heads}/{self.kv_heads} L={self.length} S={self.keys}"
        text += f" D={self.width}/{self.value_width}"
        text += "" if self.mask == "none" else f" mask={self.mask}"
        text += f" causal={self.causal}" if self.causal else ""
        text += "" if self.layout == "contiguous" else f" layout={self.layout}"
        text += "" if self.spread == 1.0 else f" spread={self.spread:g}"
        return text + (f" dropout={self.dropout:g}" if self.dropout else "")


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, in float64, holding numbers that the dtype under test represents exactly."""

    case: Case
    leaves: dict[str, Tensor]
    """query, key, value, mask (if floating), params.<name> and fields.<name>.i or .j (of queries or keys):
    everything that gets a gradient."""
    grad_out: Tensor
    visible: Tensor | None = None
    """A bool mask, if there is one."""
    params: tuple[str, ...] = ()
    """Names of the formula's parameters."""
    fields: tuple[str, ...] = ()
    """Names of the formula's fields."""
    seed: int = 0
    """Seed of torch's generator at the time of the call (for dropout)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the call."""

    def arguments(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments of ``attention`` made of (copies of) the leaves."""
        layout = LAYOUTS[self.case.layout]
        return {
            **{name: layout(leaves[name]) for name in ("query", "key", "value")},
            "attn_mask": leaves.get("mask", self.visible),
            "params": {name: leaves[f"params.{name}"] for name in self.params},
            **({"fields": {name: _field(name, leaves) for name in self.fields}} if self.fields else {}),
            "is_causal": self.case.causal,
            "enable_gqa": self.case.heads != self.case.kv_heads,
            "dropout_p": self.case.dropout,
            **self.options,
        }

    def copies(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The leaves in a dtype, ready for gradients."""
        return {name: leaf.to(dtype, copy=True).requires_grad_() for name, leaf in self.leaves.items()}

    def with_leaves(self, **leaves: Tensor) -> Inputs:
        """The same call with some leaves replaced."""
        return replace(self, leaves=self.leaves | leaves)


def _field(name: str, leaves: dict[str, Tensor]) -> Any:
    """Both sides of a field as a pair, or the one that it has."""
    sides = [leaves[f"fields.{name}.{letter}"] for letter in "ij" if f"fields.{name}.{letter}" in leaves]
    return tuple(sides) if len(sides) == 2 else sides[0]


def side_of(leaf: str) -> str:
    """Whom a leaf belongs to: "query" or "key" for those and for their fields, otherwise its own name.

    >>> side_of("fields.c.j"), side_of("query"), side_of("mask")
    ('key', 'query', 'mask')
    """
    if not leaf.startswith("fields."):
        return leaf
    return "query" if leaf.endswith(".i") else "key"


def draw(case: Case, formula: Formula, seed: int, grid: torch.dtype = torch.float32) -> Inputs:
    """Random inputs for a case: a function of the case and the seed. ``grid`` is the dtype they must fit in.

    >>> inputs = draw(Case(length=3, mask="additive"), Formula("tanh(b*s)", params={"b": 1.0}), seed=0)
    >>> sorted(inputs.leaves)
    ['key', 'mask', 'params.b', 'query', 'value']
    """
    source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {case}".encode()))
    normal = _Normal(source, grid)
    batch, heads, length, keys = case.shape
    leaves = {
        "query": normal(batch, heads, length, case.width, size=case.spread),
        "key": normal(batch, case.kv_heads, keys, case.width),
        "value": normal(batch, case.kv_heads, keys, case.value_width),
    }
    mask = MASKS[case.mask](case, source, normal)
    if mask is not None and mask.dtype != torch.bool:
        leaves["mask"] = mask
    for name, default in sorted(formula.params.items()):
        # Near the default, where the formula is surely meant to work; of a default 0 only the positive side.
        noise = torch.rand(heads, generator=source, dtype=DOUBLE)
        leaves[f"params.{name}"] = _fit(default * (0.9 + noise / 5) if default else noise / 8, grid)
    for name, side in formula.fields.items():
        for letter in SIDES[side]:
            tokens = length if letter == "i" else keys
            leaves[f"fields.{name}.{letter}"] = normal(batch, heads, tokens, size=0.5)
    grad_out = normal(batch, heads, length, case.value_width)
    visible = mask if mask is not None and mask.dtype == torch.bool else None
    names = tuple(sorted(formula.params)), tuple(formula.fields)
    return Inputs(case, leaves, grad_out, visible, *names, seed)


@dataclass(frozen=True)
class _Normal:
    source: Generator
    grid: torch.dtype

    def __call__(self, *shape: int, size: float = 1.0) -> Tensor:
        return _fit(size * torch.randn(*shape, generator=self.source, dtype=DOUBLE), self.grid)


def _fit(x: Tensor, grid: torch.dtype) -> Tensor:
    """The nearest numbers that the dtype holds, without its subnormal ones, whose precision is lower."""
    fitted = x.to(grid)
    return torch.where(fitted.abs() < torch.finfo(grid).smallest_normal, 0, fitted).double()


def _some(*shape: int, source: Generator, share: float = 0.7) -> Tensor:
    return torch.rand(*shape, generator=source) < share


def _padding(case: Case, source: Generator, normal: _Normal) -> Tensor:
    lengths = torch.randint(1, case.keys + 1, (case.batch, 1, 1, 1), generator=source)
    return torch.arange(case.keys) < lengths


def _dead_rows(case: Case, source: Generator, normal: _Normal) -> Tensor:
    seen = _some(case.length, case.keys, source=source)
    seen[::3] = False
    return seen


def _hiding(case: Case, source: Generator, normal: _Normal) -> Tensor:
    mask = normal(case.length, case.keys)
    mask[_some(case.length, case.keys, source=source, share=0.3)] = -torch.inf
    mask[1::4] = -torch.inf
    return mask


MASKS: dict[str, Callable[[Case, Generator, _Normal], Tensor | None]] = {
    "none": lambda case, source, normal: None,
    "bool": lambda case, source, normal: _some(*case.shape, source=source),
    "padding": _padding,
    "dead rows": _dead_rows,
    "additive": lambda case, source, normal: normal(*case.shape),
    "additive per key": lambda case, source, normal: normal(case.batch, 1, 1, case.keys),
    "additive per row": lambda case, source, normal: normal(case.heads, case.length, 1),
    "additive with -inf": _hiding,
}
"""Masks by name. Bool: True = visible; floating: added."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dim first": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded batch": lambda x: x[:1].expand(x.shape),
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
}
"""How a logical tensor lies in memory; each is a differentiable function of the contiguous one."""
