"""Test the numbers of an engine on a device: the checks of ``unsoft doctor --gpu``, a minute or two.

Each check is one kind of call on a few hundred tokens: output and every gradient against the dense engine in
float64 on the same device.
"""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unsoft.attention import attention
from unsoft.errors import CompilerWarning, one_line
from unsoft.formula import Formula
from unsoft.testing.case import Case, CaseInputs, draw

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Limits of the relative error in the Euclidean norm: a few units of each dtype."""
SHARP = Formula(weight="s*exp(tau*s - m)", mass="abs(s)*exp(tau*s - m)", peak="tau*s", params={"tau": 1.0})
"""A signed formula with a parameter, as a user might write it."""
FADING = Formula(
    weight="exp(s + c_i - c_j - m)",
    mass="exp(s + c_i - c_j - m)",
    peak="s + c_i - c_j",
    fields={"c": "query+key"},
)
"""A formula with a field."""


@dataclass(frozen=True)
class DeviceCheck:
    """One kind of call on a device."""

    name: str
    mechanism: str | Formula
    case: Case
    non_finite: bool = False
    """True: some keys and values that rows see contain NaN or Inf."""


def _check(
    name: str,
    mechanism: str | Formula = "cog",
    dtype: torch.dtype = torch.bfloat16,
    *,
    non_finite: bool = False,
    **sizes: Any,
) -> DeviceCheck:
    case = Case(259, 259, 64, 64, 2, 4, 2, causal=True, dtype=dtype)
    return DeviceCheck(name, mechanism, replace(case, **sizes), non_finite)


_MECHANISMS = ("softmax", "cog", "relu2", "softpick", "sigmoid", "l2", "sinh", "softmax1", "tanh")


def _in_every_dtype(mechanism: str) -> list[DeviceCheck]:
    return [_check(f"{mechanism}, {str(dtype)[6:]}", mechanism, dtype) for dtype in LIMITS]


LINEAR_AND_MAGNITUDE = (
    *_in_every_dtype("cosformer"),
    _check("cosformer, not causal", "cosformer", torch.float32, length=70, causal=False),
    _check("retention", "retention", torch.float32),
    _check("retention, lower right, fewer queries", "retention", length=70, causal="lower_right"),
    _check("linear-taylor2, width 24", "linear-taylor2", torch.float32, width=24, value_width=80),
    *_in_every_dtype("linear-exp"),
    _check("linear-exp, not causal", "linear-exp", torch.float32, length=70, causal=False),
    _check("performer", "performer", torch.float32),
    _check("performer, lower right, fewer queries", "performer", length=70, causal="lower_right"),
    _check("magnitude", "magnitude+cog", torch.float64),
    _check("magnitude, not causal", "magnitude+cog", torch.float64, causal=False),
)
"""Mechanisms with kernels of their own; the others are formulas."""
KINDS = (
    *(check for name in _MECHANISMS for check in _in_every_dtype(name)),
    *LINEAR_AND_MAGNITUDE,
    _check("formula of a user with a parameter", SHARP),
    _check("bool mask", mask="bool"),
    _check("rows that see nothing", mask="dead rows"),
    _check("additive mask on the strength", mask="additive", causal=False),
    _check("additive mask on the logit", "softmax", mask="additive", causal=False),
    _check("not causal", causal=False),
    _check("causal, lower right, fewer queries", causal="lower_right", length=70),
    _check("dropout", dropout=0.25),
    _check("no grouped heads", kv_heads=4),
    _check("widths 80 and 24", width=80, value_width=24),
    _check("width 128", width=128, value_width=128),
    _check("width 256", width=256, value_width=256),
    _check("one query", length=1, causal=False),
    _check("one query, many keys", length=1, keys=4099, causal=False),
    _check("few queries, many keys", length=5, keys=4099, causal="lower_right", mask="bool"),
    _check("fields", FADING, kv_heads=4),
    _check("density", "density+cog", torch.float32),
    _check("density, not causal", "density", torch.float32, causal=False),
    _check("NaN and Inf", dtype=torch.float32, non_finite=True),
)


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    passed: bool
    limit: float
    errors: dict[str, float] = field(default_factory=dict)
    """Relative errors of the output and of every gradient."""
    problem: str = ""
    """The exception, if there was one."""
    seconds: float = 0.0


def check_device(device: str, engine: str, checks: tuple[DeviceCheck, ...] = KINDS) -> Iterator[Finding]:
    """Yield one finding after the other.

    >>> [finding.passed for finding in check_device("cpu", "tiled", KINDS[:2])]
    [True, True]
    """
    for check in checks:
        start = time.perf_counter()
        limit, problem = LIMITS[check.case.dtype], ""
        errors: dict[str, float] = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", CompilerWarning)  # or another engine would be checked
                errors = _errors(check, device, engine)
        except Exception as error:  # an exception of a compiler or a driver is a failed check
            problem = one_line(error)
        passed = not problem and all(error <= limit for error in errors.values())  # False for NaN too
        yield Finding(check.name, passed, limit, errors, problem, time.perf_counter() - start)


def verdict(findings: list[Finding]) -> str:
    """Return one sentence about all findings.

    >>> verdict([Finding("a", True, 1.0), Finding("b", False, 1.0)])
    '1 of 2 checks failed: b'
    """
    failed = [finding.name for finding in findings if not finding.passed]
    if not findings:
        return "nothing was checked"
    if failed:
        return f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}"
    return f"all {len(findings)} checks passed"


def _errors(check: DeviceCheck, device: str, engine: str) -> dict[str, float]:
    case = check.case
    # A formula is needed only for its parameters and fields.
    formula = check.mechanism if isinstance(check.mechanism, Formula) else Formula("s")
    inputs = draw(case, formula, 0, case.dtype)
    inputs.leaves.pop("fields.c.i", None)  # one tensor for both sides: alone, c_i has no effect
    if check.non_finite:
        inputs.leaves["key"][0, 0, case.keys // 2, 3] = torch.inf
        inputs.leaves["value"][1, 0, case.keys // 3, 1] = torch.nan
    mine = _run(check, inputs, engine, case.dtype, device)
    exact = _run(check, inputs, "dense", torch.float64, device)
    return {name: _distance(mine[name], exact[name]) for name in exact}


def _run(
    check: DeviceCheck, inputs: CaseInputs, engine: str, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    leaves = {name: x.to(device, dtype, copy=True).requires_grad_() for name, x in inputs.leaves.items()}
    arguments = inputs.arguments(leaves)
    if inputs.visible is not None:
        arguments["attn_mask"] = inputs.visible.to(device)
    torch.manual_seed(1)
    output = attention(mechanism=check.mechanism, engine=engine, **arguments)
    assert isinstance(output, Tensor)
    gradients = torch.autograd.grad(output, list(leaves.values()), inputs.grad_out.to(device, dtype))
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def _distance(x: Tensor, exact: Tensor) -> float:
    """Return the relative distance; infinite unless the same entries are finite."""
    x = x.double()
    if not torch.equal(x.isfinite(), exact.isfinite()):
        return float("inf")
    x, exact = (torch.where(exact.isfinite(), y, 0.0) for y in (x, exact))
    return float((x - exact).norm() / exact.norm().clamp(min=1e-30))
