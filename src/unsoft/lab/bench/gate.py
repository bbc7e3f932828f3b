"""Is it right? No ratio is shown for a result that differs from the dense engine in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from unsoft.lab.bench.contender import Contender, engine
from unsoft.lab.bench.workload import Inputs, Workload

LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest relative RMS error: far above rounding (float32 1e-6, bfloat16 4e-3), far below any real defect."""


def error_of(contender: Contender, workload: Workload, inputs: Inputs) -> float:
    """The largest relative RMS error of the output and gradients,
    for the first head of the first batch entry.

    One head is the whole story, since heads never mix, and keeps the float64 reference affordable at any
    length.
    """
    results = contender.compute(workload, inputs)
    references = _reference(contender.mechanism, replace(workload, group="", mode="training"))
    # A forward workload has one result; its reference is the first of those that training needs anyway.
    return max(relative_error(x[:1, :1].detach(), r) for x, r in zip(results, references, strict=False))


@lru_cache(maxsize=64)
def _reference(mechanism: str, workload: Workload) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v by the dense engine in float64."""
    inputs = workload.inputs()
    first = Inputs(*(x[:1, :1].detach().double() for x in (*inputs.qkv, inputs.grad_out)))
    for x in first.qkv:
        x.requires_grad_()
    return tuple(x.detach() for x in engine("dense", mechanism).compute(workload, first))


def relative_error(result: Tensor, reference: Tensor) -> float:
    """RMS(result - reference) / RMS(reference); infinite if the result is not finite.

    >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    0.0
    >>> relative_error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]))
    inf
    """
    if not bool(result.isfinite().all()):
        return float("inf")
    difference = (result.double() - reference).square().mean().sqrt()
    return float(difference / reference.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny))


def is_right(error: float, workload: Workload) -> bool:
    """Does the error pass the gate?"""
    return error <= LIMITS[workload.dtype]
