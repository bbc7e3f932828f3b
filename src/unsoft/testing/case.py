"""A case is one kind of call. Inputs are the tensors of a call, drawn from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from unsoft.formula import Formula
from unsoft.formula.arguments import SIDES

DOUBLE = torch.float64
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (DOUBLE, torch.float32, torch.bfloat16)}
_NOT_PRINTED = {"mask": "none", "layout": "contiguous", "spread": 1.0, "dropout": 0.0, "inputs": "normal"}
"""Values that are left out of the text of a case."""


@dataclass(frozen=True)
class Case:
    """One kind of call: L queries, S keys of width D, values of width Dv, H query heads on Hk key heads.

    >>> case = Case(length=129, keys=129, width=96, value_width=96, batch=1, causal=True)
    >>> print(case)
    length=129 keys=129 width=96/96 heads=2/2 batch=1 causal=True
    >>> Case.parse(str(case)) == case
    True
    """

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
    dtype: torch.dtype = DOUBLE
    inputs: str = "normal"
    """Kind of queries and keys, a name of :data:`unsoft.testing.grid.INPUTS`."""

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
        text = f"length={self.length} keys={self.keys} width={self.width}/{self.value_width}"
        text += f" heads={self.heads}/{self.kv_heads} batch={self.batch} causal={self.causal}"
        text += "" if self.dtype == DOUBLE else f" dtype={str(self.dtype).removeprefix('torch.')}"
        more = ((name, getattr(self, name)) for name in _NOT_PRINTED)
        return text + "".join(f" {name}={value}" for name, value in more if value != _NOT_PRINTED[name])

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case that prints as ``text``.

        Missing sizes are those of a short causal call: as many keys as queries, values as wide as keys.
        """
        given = {"length": "20", "width": "20", "heads": "2/2", "batch": "1", "causal": "True"}
        name = ""
        for word in text.split():
            head, equals, tail = word.partition("=")
            name = head if equals else name
            given[name] = tail if equals else f"{given.get(name, '')} {word}"  # "mask=left padding"
        known = ("length", "keys", "width", "heads", "batch", "causal", "dtype", *_NOT_PRINTED)
        if unknown := given.keys() - {*known}:
            raise ValueError(f"case: unknown {', '.join(sorted(unknown))} (known: {', '.join(known)})")
        options: dict[str, Mapping[str, Any]] = {
            "causal": {"True": True, "False": False, "lower_right": "lower_right"},
            "dtype": DTYPES,
            "mask": {mask: mask for mask in MASKS},
            "layout": {layout: layout for layout in LAYOUTS},
        }
        content: dict[str, Any] = {}
        for name, value in given.items():
            if name in options and value not in options[name]:
                raise ValueError(f"case: {name}={value!r} is not one of {', '.join(options[name])}")
            content[name] = options[name][value] if name in options else value
        try:
            for name, pair in (("width", ("width", "value_width")), ("heads", ("heads", "kv_heads"))):
                first, _, second = given[name].partition("/")
                content |= {pair[0]: int(first), pair[1]: int(second or first)}
            content |= {name: int(given[name]) for name in ("length", "batch")}
            content["keys"] = int(given.get("keys", given["length"]))
            content |= {name: float(given[name]) for name in ("spread", "dropout") if name in given}
        except ValueError:
            raise ValueError(f"case: {text!r} has a size that is not a number") from None
        return cls(**content)


@dataclass(frozen=True)
class CaseInputs:
    """Tensors of one call in float64, with numbers that the dtype under test represents exactly."""

    case: Case
    leaves: dict[str, Tensor]
    """query, key, value, mask (if floating), params.<name> and fields.<name>.i or .j (of queries or keys):
    everything that gets a gradient."""
    grad_out: Tensor
    visible: Tensor | None = None
    """The bool mask, if there is one."""
    seed: int = 0
    """Seed of torch's generator at the time of the call (for dropout)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the call."""

    def arguments(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Return the keyword arguments of ``attention`` made of (copies of) the leaves."""
        layout = LAYOUTS[self.case.layout]
        params: dict[str, Tensor] = {}
        fields: dict[str, tuple[Tensor, ...]] = {}
        for leaf, x in leaves.items():
            kind, _, name = leaf.partition(".")
            if kind == "params":
                params[name] = x
            elif kind == "fields":  # "c.i" of the queries, then "c.j" of the keys
                fields[name[:-2]] = (*fields.get(name[:-2], ()), x)
        return {
            **{name: layout(leaves[name]) for name in ("query", "key", "value")},
            "attn_mask": leaves.get("mask", self.visible),
            "params": params or None,
            "fields": {name: x if len(x) == 2 else x[0] for name, x in fields.items()} or None,
            "is_causal": self.case.causal,
            "enable_gqa": self.case.heads != self.case.kv_heads,
            "dropout_p": self.case.dropout,
            **self.options,
        }

    def copies(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the leaves in a dtype, ready for gradients."""
        return {name: leaf.to(dtype, copy=True).requires_grad_() for name, leaf in self.leaves.items()}

    def with_leaves(self, **leaves: Tensor) -> CaseInputs:
        """Return the same call with some leaves replaced."""
        return replace(self, leaves=self.leaves | leaves)


def side_of(leaf: str) -> str:
    """Return "query" or "key" for those and for their fields, otherwise the name of the leaf.

    >>> side_of("fields.c.j"), side_of("query"), side_of("mask")
    ('key', 'query', 'mask')
    """
    if not leaf.startswith("fields."):
        return leaf
    return "query" if leaf.endswith(".i") else "key"


def draw(case: Case, formula: Formula, seed: int, grid: torch.dtype = torch.float32) -> CaseInputs:
    """Return random inputs for a case: a function of the case and the seed. ``grid`` must represent them.

    >>> inputs = draw(Case(length=3, mask="additive"), Formula("tanh(b*s)", params={"b": 1.0}), seed=0)
    >>> sorted(inputs.leaves)
    ['key', 'mask', 'params.b', 'query', 'value']
    """
    source = Generator().manual_seed(zlib.crc32(f"{seed} {case}".encode()))
    normal = Normal(source, grid)
    batch, heads, length, keys = case.shape
    leaves = {
        "query": normal(batch, heads, length, case.width, size=case.spread),
        "key": normal(batch, case.kv_heads, keys, case.width),
        "value": normal(batch, case.kv_heads, keys, case.value_width),
    }
    visible = add_mask(leaves, case, normal)
    for name, default in sorted(formula.params.items()):
        # Near the default, where the formula is surely meant to work; of a default 0 only the positive side.
        noise = torch.rand(heads, generator=source, dtype=DOUBLE)
        leaves[f"params.{name}"] = _fit(default * (0.9 + noise / 5) if default else noise / 8, grid)
    for name, side in formula.fields.items():
        for letter in SIDES[side]:
            tokens = length if letter == "i" else keys
            leaves[f"fields.{name}.{letter}"] = normal(batch, heads, tokens, size=0.5)
    grad_out = normal(batch, heads, length, case.value_width)
    return CaseInputs(case, leaves, grad_out, visible, seed)


def add_mask(leaves: dict[str, Tensor], case: Case, normal: Normal) -> Tensor | None:
    """Draw the mask of a case. Return it if it is bool; one that is added becomes a leaf."""
    mask = MASKS[case.mask](case, normal)
    if mask is None or mask.dtype == torch.bool:
        return mask
    leaves["mask"] = mask
    return None


@dataclass(frozen=True)
class Normal:
    """Draws normal numbers that ``grid`` represents."""

    source: Generator
    grid: torch.dtype

    def __call__(self, *shape: int, size: float = 1.0) -> Tensor:
        return _fit(size * torch.randn(*shape, generator=self.source, dtype=DOUBLE), self.grid)

    def some(self, *shape: int, share: float = 0.7) -> Tensor:
        """Return a bool tensor of which about ``share`` is True."""
        return torch.rand(*shape, generator=self.source) < share


def _fit(x: Tensor, grid: torch.dtype) -> Tensor:
    """Round to a dtype, without its subnormal numbers, whose precision is lower."""
    fitted = x.to(grid)
    return torch.where(fitted.abs() < torch.finfo(grid).smallest_normal, 0, fitted).double()


def _padding(case: Case, normal: Normal, left: bool = False) -> Tensor:
    """(B, 1, 1, S): every sequence lacks up to half of its keys at one end."""
    missing = torch.randint(0, case.keys // 2 + 1, (case.batch, 1, 1, 1), generator=normal.source)
    keys = torch.arange(case.keys)
    return keys >= missing if left else keys < case.keys - missing


def _dead_rows(case: Case, normal: Normal) -> Tensor:
    seen = normal.some(case.length, case.keys)
    seen[::3] = False
    return seen


def _hiding(case: Case, normal: Normal) -> Tensor:
    mask = normal(case.length, case.keys)
    mask[normal.some(case.length, case.keys, share=0.3)] = -torch.inf
    mask[1::4] = -torch.inf
    return mask


def _hiding_keys(case: Case, normal: Normal) -> Tensor:
    mask = normal(case.batch, 1, 1, case.keys)
    return mask.masked_fill(normal.some(*mask.shape, share=0.2), -torch.inf)


MASKS: dict[str, Callable[[Case, Normal], Tensor | None]] = {
    "none": lambda case, normal: None,
    "bool": lambda case, normal: normal.some(*case.shape),
    "padding": _padding,
    "left padding": lambda case, normal: _padding(case, normal, left=True),
    "dead rows": _dead_rows,
    "additive": lambda case, normal: normal(*case.shape),
    "additive per key": lambda case, normal: normal(case.batch, 1, 1, case.keys),
    "additive per row": lambda case, normal: normal(case.heads, case.length, 1),
    "additive with -inf": _hiding,
    "additive per key with -inf": _hiding_keys,
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
"""Memory layouts of a logical tensor; each is a differentiable function of the contiguous one."""
