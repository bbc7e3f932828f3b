"""Does an engine compute the right numbers on a device? What ``unsoft doctor --gpu`` runs there,
in a minute or two.

Each check is one kind of call on a few hundred tokens, forward and every gradient,
against the dense engine in float64 on the same device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from unsoft.attention import attention
from unsoft.errors import CompilerWarning, one_line
from unsoft.formula import Formula

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the relative error in the Euclidean norm: a few units of each dtype."""
SHARP = Formula(weight="s*exp(tau*s - m)", mass="abs(s)*exp(tau*s - m)", peak="tau*s", params={"tau": 1.0})
"""A signed formula with a parameter, as a user might write it."""
FADING = Formula(
    weight="exp(s + c_i - c_j - m)",
    mass="exp(s + c_i - c_j - m)",
    peak="s + c_i - c_j",
    fields={"c": "query+key"},
)
"""A formula that is told a number of every token."""


@dataclass(frozen=True)
class Kind:
    """One kind of call."""

    name: str
    mechanism: str | Formula = "cog"
    dtype: torch.dtype = torch.bfloat16
    length: int = 259
    keys: int = 259
    width: int = 64
    value_width: int = 64
    heads: int = 4
    kv_heads: int = 2
    causal: bool | str = True
    mask: str = ""
    """"" , "bool", "additive" or "dead rows"."""
    dropout: float = 0.0
    non_finite: bool = False
    """Is there NaN and Inf in a key that some rows see?"""


MECHANISMS = ("softmax", "cog", "relu2", "softpick", "sigmoid", "l2", "sinh", "softmax1", "tanh")
LINEAR_AND_MAGNITUDE = (
    *(Kind(f"cosformer, {str(dtype)[6:]}", "cosformer", dtype) for dtype in LIMITS),
    Kind("cosformer, not causal", "cosformer", torch.float32, length=70, causal=False),
    Kind("retention", "retention", torch.float32),
    Kind("retention, lower right, fewer queries", "retention", length=70, causal="lower_right"),
    Kind("linear-taylor2, width 24", "linear-taylor2", torch.float32, width=24, value_width=80),
    *(Kind(f"linear-exp, {str(dtype)[6:]}", "linear-exp", dtype) for dtype in LIMITS),
    Kind("linear-exp, not causal", "linear-exp", torch.float32, length=70, causal=False),
    Kind("performer", "performer", torch.float32),
    Kind("performer, lower right, fewer queries", "performer", length=70, causal="lower_right"),
    Kind("magnitude", "magnitude+cog", torch.float64),
    Kind("magnitude, not causal", "magnitude+cog", torch.float64, causal=False),
)
"""Kernels of their own; the rest is formulas."""
KINDS = (
    *(Kind(f"{name}, {str(dtype)[6:]}", name, dtype) for name in MECHANISMS for dtype in LIMITS),
    *LINEAR_AND_MAGNITUDE,
    Kind("formula of a user with a parameter", SHARP),
    Kind("bool mask", mask="bool"),
    Kind("rows that see nothing", mask="dead rows"),
    Kind("additive mask on the strength", mask="additive", causal=False),
    Kind("additive mask on the logit", "softmax", mask="additive", causal=False),
    Kind("not causal", causal=False),
    Kind("causal, lower right, fewer queries", causal="lower_right", length=70),
    Kind("dropout", dropout=0.25),
    Kind("no grouped heads", kv_heads=4),
    Kind("widths 80 and 24", width=80, value_width=24),
    Kind("width 128", width=128, value_width=128),
    Kind("width 256", width=256, value_width=256),
    Kind("one query", length=1, causal=False),
    Kind("one query, many keys", length=1, keys=4099, causal=False),
    Kind("few queries, many keys", length=5, keys=4099, causal="lower_right", mask="bool"),
    Kind("fields", FADING, kv_heads=4),
    Kind("NaN and Inf", non_finite=True, dtype=torch.float32),
)


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    passed: bool
    limit: float
    errors: dict[str, float] = field(default_factory=dict)
    """Relative errors of the output and of every gradient."""
    problem: str = ""
    """What was raised, if anything."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_device(device: str, engine: str, kinds: tuple[Kind, ...] = KINDS) -> Iterator[Finding]:
    """One finding after the other.

    >>> [finding.passed for finding in check_device("cpu", "tiled", KINDS[:2])]
    [True, True]
    """
    for kind in kinds:
        start = time.perf_counter()
        limit = LIMITS[kind.dtype]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", CompilerWarning)  # or another engine would be checked
                errors = _errors(kind, device, engine)
        except Exception as error:  # whatever a compiler or a driver raises is a finding
            taken = time.perf_counter() - start
            yield Finding(kind.name, False, limit, problem=one_line(error), seconds=taken)
            continue
        passed = all(error <= limit for error in errors.values())  # False for NaN too
        yield Finding(kind.name, passed, limit, errors, seconds=time.perf_counter() - start)


def verdict(findings: list[Finding]) -> str:
    """One sentence.

    >>> verdict([Finding("a", True, 1.0), Finding("b", False, 1.0)])
    '1 of 2 checks failed: b'
    """
    failed = [finding.name for finding in findings if not finding.passed]
    if not findings:
        return "nothing was checked"
    if failed:
        return f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}"
    return f"all {len(findings)} checks passed"


def _errors(kind: Kind, device: str, engine: str) -> dict[str, float]:
    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(kind.dtype).to(device)

    leaves = {
        "query": normal(2, kind.heads, kind.length, kind.width),
        "key": normal(2, kind.kv_heads, kind.keys, kind.width),
        "value": normal(2, kind.kv_heads, kind.keys, kind.value_width),
    }
    mask = torch.rand(2, 1, kind.length, kind.keys, generator=source).to(device) < 0.8
    if kind.mask == "dead rows":
        mask[:, :, ::3] = False
    if kind.mask == "additive":
        leaves["mask"] = normal(2, kind.heads, kind.length, kind.keys)
    formula = kind.mechanism if isinstance(kind.mechanism, Formula) else None
    if formula is not None and formula.fields:
        leaves["c"] = normal(2, kind.heads, kind.length)
    if formula is not None and formula.params:
        leaves["tau"] = torch.rand(kind.heads, generator=source).to(kind.dtype).to(device) + 0.5
    if kind.non_finite:
        leaves["key"][0, 0, kind.keys // 2, 3] = torch.inf
        leaves["value"][1, 0, kind.keys // 3, 1] = torch.nan
    grad = normal(2, kind.heads, kind.length, kind.value_width)
    seen = mask if kind.mask in ("bool", "dead rows") else None
    mine = _run(kind, engine, kind.dtype, leaves, seen, grad)
    exact = _run(kind, "dense", torch.float64, leaves, seen, grad)
    return {name: _distance(mine[name], exact[name]) for name in exact}


def _run(
    kind: Kind,
    engine: str,
    dtype: torch.dtype,
    leaves: dict[str, Tensor],
    seen: Tensor | None,
    grad: Tensor,
) -> dict[str, Tensor]:
    copies = {name: x.to(dtype, copy=True).requires_grad_() for name, x in leaves.items()}
    torch.manual_seed(1)
    out = attention(
        copies["query"],
        copies["key"],
        copies["value"],
        kind.mechanism,
        attn_mask=copies.get("mask", seen),
        dropout_p=kind.dropout,
        is_causal=kind.causal,
        enable_gqa=kind.heads != kind.kv_heads,
        engine=engine,
        params={"tau": copies["tau"]} if "tau" in copies else None,
        fields={"c": copies["c"]} if "c" in copies else None,
    )
    assert isinstance(out, Tensor)
    gradients = torch.autograd.grad(out, list(copies.values()), grad.to(dtype))
    return {"output": out.detach(), **dict(zip(copies, gradients, strict=True))}


def _distance(x: Tensor, exact: Tensor) -> float:
    """Relative, and infinite if NaN does not stand in the same places."""
    x = x.double()
    if not torch.equal(x.isfinite(), exact.isfinite()):
        return float("inf")
    x, exact = (torch.where(exact.isfinite(), y, 0.0) for y in (x, exact))
    return float((x - exact).norm() / exact.norm().clamp(min=1e-30))
