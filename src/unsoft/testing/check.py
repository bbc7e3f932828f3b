"""Check one formula on one engine: draw inputs, run, compare. Properties are tests written with it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from unsoft import engines
from unsoft.attention import attention
from unsoft.engines.arguments import checked_call
from unsoft.formula import Formula
from unsoft.testing.case import DOUBLE, Case, CaseInputs, draw
from unsoft.testing.reference import is_near_jump
from unsoft.testing.report import GATES, Measure, NotApplicable, close, fact
from unsoft.testing.rounding import half_sizes, natural_sizes

T = TypeVar("T")
Results = dict[str, Tensor]
"""The output, and every gradient under the name of its leaf."""

_NEAR = 2.0**-19
"""Inputs on which the formula jumps this close to a logit are drawn again: 32 relative float32 roundings."""

_HEADROOM = 0.1
"""Share of a dtype's range that exact results may use."""


@dataclass(frozen=True)
class Property:
    """A property that mechanisms must have: a function that yields the comparisons of one case."""

    name: str
    function: Callable[[Check, Case], Iterator[Measure]]
    cases: tuple[Case, ...]
    quick: tuple[Case, ...]
    engines: tuple[str, ...] | None
    """The engines it applies to; None = all."""

    def measures(self, check: Check) -> Iterator[Measure]:
        """Yield the comparisons of all cases."""
        yield from check.over(self.quick if check.quick else self.cases, partial(self.function, check))


_THEMES = (
    "parity gradients causality decoding masking edges nonfinite equivariance dtypes dropout purity promises"
)
THEMES: dict[str, list[Property]] = {theme: [] for theme in _THEMES.split()}
"""The properties of formulas by theme, in the order of a report; :func:`require` adds to it."""


def require(
    theme: str,
    name: str,
    cases: Sequence[Case],
    quick: slice | Sequence[Case] = slice(None),
    engines: tuple[str, ...] | None = None,
) -> Callable[[T], T]:
    """Add a function as a property to a theme. ``quick`` selects the cases of a quick run."""

    def add(function: T) -> T:
        few = cases[quick] if isinstance(quick, slice) else quick
        THEMES[theme].append(Property(name, cast(Any, function), tuple(cases), tuple(few), engines))
        return function

    return add


@dataclass(frozen=True)
class Check:
    """A mechanism on an engine, with methods to draw, run and compare."""

    formula: Formula
    engine: str
    seed: int = 0
    quick: bool = False
    memory: dict[object, Any] = field(default_factory=dict)
    """Shared by engines: inputs, reference results and natural sizes of the cases."""

    def draw(self, case: Case, grid: torch.dtype = torch.float32, near: float = _NEAR) -> CaseInputs:
        """Return random inputs on which the result is well defined."""
        return self._remember(("draw", case, grid, near), lambda: self._draw(case, grid, near))

    def run(
        self,
        inputs: CaseInputs,
        dtype: torch.dtype = DOUBLE,
        engine: str | None = None,
        gradients: bool = True,
    ) -> Results:
        """Run the call on this check's engine, or another."""
        engine = engine or self.engine
        self.require(inputs, dtype, engine)
        leaves = inputs.copies(dtype)
        arguments = inputs.arguments(leaves)
        # Gradients of the tensors as passed: what autograd makes of a view is not the engine's business.
        wanted = leaves | {name: arguments[name] for name in ("query", "key", "value")}
        output = self.call(inputs, arguments, engine)
        if not gradients:
            return {"output": output.detach()}
        grads = torch.autograd.grad(
            output, list(wanted.values()), inputs.grad_out.to(output.dtype), materialize_grads=True
        )
        return {"output": output.detach(), **dict(zip(wanted, grads, strict=True))}

    def call(self, inputs: CaseInputs, arguments: dict[str, Any], engine: str | None = None) -> Tensor:
        """Return the output, starting from the generator state that belongs to the inputs."""
        with torch.random.fork_rng(devices=[], enabled=inputs.case.dropout > 0):
            if inputs.case.dropout > 0:
                torch.manual_seed(inputs.seed)
            return cast(Tensor, attention(mechanism=self.formula, engine=engine or self.engine, **arguments))

    def output(self, inputs: CaseInputs, dtype: torch.dtype = DOUBLE) -> Tensor:
        """Return the output alone."""
        return self.run(inputs, dtype, gradients=False)["output"]

    def weights(self, inputs: CaseInputs, dtype: torch.dtype = DOUBLE) -> Tensor:
        """Return the weights (B, H, L, S) of any engine; see :func:`reading_weights`."""
        return self.output(reading_weights(inputs), dtype)

    def weight_sizes(self, inputs: CaseInputs) -> Tensor:
        """Return the natural sizes of the weights."""
        return natural_sizes(self.formula, reading_weights(inputs))["output"]

    def reference(self, inputs: CaseInputs, key: object) -> Results:
        """Return the results of the dense engine in float64."""
        return self._remember(("reference", key), lambda: self.run(inputs, DOUBLE, engine="dense"))

    def sizes(self, inputs: CaseInputs, key: object, dtype: torch.dtype = DOUBLE) -> Results:
        """Return what the error of each result is measured against, in units of the dtype's precision."""
        sizes = self._remember(("sizes", key), lambda: natural_sizes(self.formula, inputs))
        if dtype in (torch.float32, DOUBLE):
            return sizes
        arithmetic = GATES[torch.float32] * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
        rounding = half_sizes(self.formula, inputs, self.reference(inputs, key), dtype)
        return {name: rounding[name] + arithmetic * sizes[name] for name in sizes}

    def compare(
        self, label: str, results: Results, references: Results, sizes: Results, dtype: torch.dtype = DOUBLE
    ) -> Iterator[Measure]:
        """Yield one measure for each result that has a reference: dtype first, then the numbers."""
        for name, reference in references.items():
            what = f"{label}: {titled(name)}"
            if results[name].dtype != dtype:
                yield fact(f"{what} has dtype {dtype}, found {results[name].dtype}", False)
            else:
                yield close(what, results[name], reference, sizes[name], dtype)

    def compare_output(
        self, label: str, result: Tensor, reference: Tensor, size: Tensor, dtype: torch.dtype = DOUBLE
    ) -> Iterator[Measure]:
        """Compare outputs alone."""
        yield from self.compare(label, {"output": result}, {"output": reference}, {"output": size}, dtype)

    def against_dense(self, case: Case, dtype: torch.dtype) -> Iterator[Measure]:
        """Compare output and every gradient with the dense engine in float64 on the same numbers."""
        grid = torch.float32 if dtype == DOUBLE else dtype
        inputs, key = self.draw(case, grid), (case, grid)
        self.require(inputs, dtype, self.engine)
        references = self.require_range(inputs, key, dtype)
        results = self.run(inputs, dtype)
        label = f"{str(dtype).removeprefix('torch.')}, {case}"
        yield from self.compare(label, results, references, self.sizes(inputs, key, dtype), dtype)

    def require_range(self, inputs: CaseInputs, key: object, dtype: torch.dtype) -> Results:
        """Return references; raise :class:`NotApplicable` if one is near the largest number of the dtype."""
        references = self.reference(inputs, key)
        limit = _HEADROOM * torch.finfo(dtype).max
        if not all(bool((x.abs() < limit).all()) for x in references.values()):
            raise NotApplicable(
                f"the exact result for logits of spread {inputs.case.spread:g} does not fit into {dtype}"
            )
        return references

    def over(self, cases: Iterable[Case], measures: Callable[[Case], Iterator[Measure]]) -> Iterator[Measure]:
        """Yield the measures of all supported cases; raise :class:`NotApplicable` if there is none."""
        applies, reason = False, "there is no case"
        for case in cases:
            try:
                for measure in measures(case):
                    applies = True
                    yield measure
            except NotApplicable as not_here:
                reason = str(not_here)
        if not applies:
            raise NotApplicable(reason)

    def require(self, inputs: CaseInputs, dtype: torch.dtype, engine: str) -> None:
        """Raise :class:`NotApplicable` if the engine does not support the call or is not available here."""
        if engine == "auto":
            return
        arguments = inputs.arguments({name: leaf.to(dtype) for name, leaf in inputs.leaves.items()})
        q, k, v = (arguments.pop(name) for name in ("query", "key", "value"))
        with torch.random.fork_rng(devices=[], enabled=inputs.case.dropout > 0):
            call, _ = checked_call(q, k, v, self.formula, **arguments)
        chosen = engines.POINTWISE.named(engine)
        reason = chosen.unsupported_reason(call) or chosen.unavailable_reason(call)
        if reason is not None:
            raise NotApplicable(reason)

    def _draw(self, case: Case, grid: torch.dtype, near: float) -> CaseInputs:
        for attempt in range(50):
            seed = zlib.crc32(f"{self.seed} {attempt}".encode())
            inputs = draw(case, self.formula, seed, grid)
            if not is_near_jump(self.formula, inputs, near):
                break
        return inputs

    def _remember(self, key: object, make: Callable[[], T]) -> T:
        if key not in self.memory:
            self.memory[key] = make()
        return cast(T, self.memory[key])


def titled(name: str) -> str:
    """Return how a result is called in labels: the output, or the gradient of a leaf."""
    return name if name == "output" else f"gradient of {name}"


def reading_weights(inputs: CaseInputs) -> CaseInputs:
    """Return the same call on values that form an identity matrix, so that the output is the weights."""
    case = replace(inputs.case, value_width=inputs.case.keys)
    eye = torch.eye(case.keys, dtype=DOUBLE).expand(*inputs.leaves["value"].shape[:2], -1, -1)
    grad_out = torch.zeros(*case.shape, dtype=DOUBLE)
    return replace(inputs.with_leaves(value=eye), case=case, grad_out=grad_out)
