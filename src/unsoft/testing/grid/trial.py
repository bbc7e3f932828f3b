"""One mechanism at one point of the grid: its layer, its tensors, what its definition says,
and how exact a result can be.

How large an error may be is found by asking the definition again with every input moved by a relative 2^-24,
for float64 2^-40: what that changes, times the precision of the dtype, is what rounding may change too. A row
of queries and a key are moved as a whole, so that a logit that is exactly 0 stays 0. On top of it comes the
precision times the size of the result and of what it is a sum of (docs/numerics.md).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from unsoft.modules.definition import Definition, NotDefined, WrittenCall
from unsoft.modules.module import Mechanism
from unsoft.modules.spec import LayerSpec, MechanismSpec
from unsoft.testing.grid.point import Point
from unsoft.testing.grid.tensors import DOUBLE, Tensors, draw
from unsoft.testing.measure import rms

Results = dict[str, Tensor]
"""The output at the compared rows, and every gradient under the name of what it belongs to."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)
}
_MOVES = {torch.float64: 2.0**-40, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-24}
"""How far inputs are moved: near the precision itself, as the change may grow in proportion for small errors
only."""
_PERTURB = 0.1
"""Parameters are moved away from their start by this, so that one that has no effect, or the wrong one,
shows."""


@dataclass(frozen=True)
class Trial:
    """What the checks of a point get."""

    spec: MechanismSpec
    definition: Definition | None
    """None, or NotDefined: the mechanism itself is the reference, in float64 and without a cache."""
    point: Point
    seed: str
    options: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.point.dtype]

    @cached_property
    def layer(self) -> Mechanism:
        """The mechanism in the dtype of the point."""
        heads, _ = self.point.head_counts
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = self.spec.build(
                LayerSpec(heads, self.point.width, self.point.value_width), **self.options
            )
        source = Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=source), alpha=_PERTURB)
        return layer.to(torch.bfloat16).to(self.dtype)

    @cached_property
    def tensors(self) -> Tensors:
        return draw(self.point, self.seed, self.layer.query_heads)

    @property
    def scale(self) -> float | None:
        """The argument of that name: a power of two, so that logits stay exact;
        None where the default is one."""
        exact = 2.0 ** round(math.log2(self.point.width**-0.5))
        return None if exact == self.point.width**-0.5 else exact

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the call that are not tensors."""
        causal = {"no": False, "upper left": True, "lower right": "lower_right"}[self.point.causal]
        grouped = self.tensors.query.shape[1] != self.tensors.key.shape[1]
        return {"is_causal": causal, "enable_gqa": grouped, "scale": self.scale}

    def run(self, engine: str = "auto") -> Results:
        """What the mechanism gives."""
        x = self.tensors
        leaves = {
            name: getattr(x, name).to(self.dtype, copy=True).requires_grad_()
            for name in ("query", "key", "value")
        }
        if x.bias is not None:
            leaves["mask"] = x.bias.to(self.dtype, copy=True).requires_grad_()
        mask = leaves.get("mask", x.visible)
        output = self.layer(
            *(leaves[name] for name in ("query", "key", "value")), mask, engine=engine, **self.arguments
        )
        wanted = leaves | {name: p for name, p in self.layer.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            output, list(wanted.values()), x.upstream.to(output.dtype), materialize_grads=True
        )
        return {
            "whole output": output.detach(),
            **self._results(output, dict(zip(wanted, gradients, strict=True))),
        }

    def _results(self, output: Tensor, gradients: Results) -> Results:
        """At the compared rows only: in the others no gradient of a query is expected."""
        rows = self.tensors.rows
        gradients["query"] = gradients["query"][:, :, rows]
        return {"output": output.detach()[:, :, rows], **gradients}

    @cached_property
    def reference(self) -> Results:
        """What the definition gives, output and gradients."""
        return self._defined(None)

    def decoded(self, pieces: Sequence[tuple[int, int]]) -> Tensor | None:
        """The output that the definition gives where tokens come in pieces; None if it does not say.

        Which keys there are (magnitude) is known from the rows of the piece that a key comes with:
        later rows are not there yet.
        """
        x = self.tensors
        leaves = {name: getattr(x, name) for name in ("query", "key", "value")}
        if x.bias is not None:
            leaves["mask"] = x.bias
        call = self.written(leaves)
        seen = self._seen(leaves)
        there = torch.cat([seen[:, :, start:end, start:end].any(2) for start, end in pieces], dim=-1)
        if self.definition is None or bool((there == call.there).all()):
            return self.reference["output"]
        try:
            with torch.no_grad():
                return self.definition(call.change(there=there), copy.deepcopy(self._exact_layer))[1]
        except NotDefined:
            return None

    @cached_property
    def sizes(self) -> dict[str, float]:
        """For every result the error, in units of the precision, that it may have."""
        moved = [self._defined(Generator().manual_seed(number)) for number in (2, 3)]
        natural = self._natural_sizes()
        sizes = {}
        for name, exact in self.reference.items():
            if name != "weights":
                change = max(rms(other[name] - exact) for other in moved) / _MOVES[self.dtype]
                sizes[name] = change + rms(exact) + natural.get(name, natural["parameter"])
        return sizes

    def _natural_sizes(self) -> dict[str, float]:
        """Of the terms that results are sums of, so that one that cancels to nothing is not measured against
        nothing."""
        x, weights, keys = self.tensors, self.reference["weights"], max(1, self.point.key_count)
        q, k, v, g = (rms(y) for y in (x.query, x.key, x.value, x.upstream[:, :, x.rows]))
        scale, entries, w = self.point.width**-0.5, weights.numel(), rms(weights) + 1 / keys
        by_weight = g * v * self.point.value_width**0.5
        # What is not a formula of the logit may have features that are not small where queries and keys are.
        formula = self.spec.formula if self.spec.family is None and not self.spec.modifiers else None
        by_query, by_key = (0.0 if formula is not None else 1 + 1 / (size or 1.0) for size in (q, k))
        shared = 1.0 if x.bias is None else max(1.0, entries / max(1, x.bias.numel())) ** 0.5
        reach = (
            keys if formula is None or {"i", "j"} & formula.uses else 1
        )  # of a parameter that multiplies positions
        return {
            "output": v,
            "value": g,
            "query": by_weight * (scale * k + by_query),
            "key": by_weight * (scale * q + by_key),
            "mask": by_weight * w * shared,
            "parameter": by_weight * w * entries**0.5 * (1 + q + scale * q * k + reach),
        }

    @cached_property
    def _exact_layer(self) -> Mechanism:
        return copy.deepcopy(self.layer).to(DOUBLE)

    def _defined(self, source: Generator | None) -> Results:
        """The definition's results, exactly or with every input moved a little."""

        def moved(x: Tensor, *shape: int) -> Tensor:
            if source is None:
                return x
            return x * (
                1 + _MOVES[self.dtype] * torch.randn(shape or x.shape, generator=source, dtype=DOUBLE)
            )

        x, layer = self.tensors, copy.deepcopy(self._exact_layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(moved(parameter))
        leaves = {
            "query": moved(x.query, *x.query.shape[:3], 1),
            "key": moved(x.key, *x.key.shape[:3], 1),
            "value": moved(x.value),
        }
        if x.bias is not None:
            leaves["mask"] = torch.where(x.bias.isinf(), x.bias, moved(x.bias.nan_to_num(neginf=0.0)))
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        wanted = leaves | {name: p for name, p in layer.named_parameters() if p.requires_grad}
        heads, _ = self.point.head_counts
        if min(self.point.batch, self.point.length, self.point.key_count) == 0:
            weights = x.value.new_zeros(0)
            output = x.value.new_zeros(self.point.batch, heads, len(x.rows), self.point.value_width)
            gradients = {name: torch.zeros_like(leaf) for name, leaf in wanted.items()}
        else:
            weights, output = self._written_out(leaves, layer, None if source is None else moved)
            found = torch.autograd.grad(
                output, list(wanted.values()), moved(x.upstream[:, :, x.rows]), materialize_grads=True
            )
            gradients = dict(zip(wanted, found, strict=True))
        return {
            "output": output.detach(),
            "weights": weights.detach(),
            **gradients,
            "query": gradients["query"][:, :, x.rows],
        }

    def _written_out(
        self, leaves: Mapping[str, Tensor], layer: Mechanism, rounding: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Weights and output at the compared rows."""
        try:
            if self.definition is not None:
                return self.definition(self.written(leaves).change(rounding=rounding), layer)
        except NotDefined:
            pass
        x = self.tensors
        mask = leaves.get("mask", x.visible)
        output = layer(*(leaves[name] for name in ("query", "key", "value")), mask, **self.arguments)[
            :, :, x.rows
        ]
        keys = self.point.key_count  # of weights of a size that a sum over keys could have
        return torch.full((*output.shape[:3], keys), 1 / keys, dtype=DOUBLE), output

    def written(self, leaves: Mapping[str, Tensor]) -> WrittenCall:
        """The call at the compared rows, as a definition sees it."""
        x, point = self.tensors, self.point
        seen, bias = self._seen(leaves), torch.zeros((), dtype=DOUBLE)
        if "mask" in leaves:
            bias = leaves["mask"].masked_fill(leaves["mask"] == -torch.inf, 0.0)
        there = seen.any(2)
        visible = seen if point.offset is None else seen.tril(point.offset)
        rows = (x.rows + (point.offset or 0)).to(DOUBLE)
        return WrittenCall(
            leaves["query"][:, :, x.rows],
            leaves["key"],
            leaves["value"],
            visible[:, :, x.rows],
            bias.expand(seen.shape)[:, :, x.rows],
            there,
            rows,
            point.offset is not None,
            self.scale or point.width**-0.5,
        )

    def _seen(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Bool (B, H, L, S): what the mask alone lets rows see."""
        seen = leaves["mask"] > -torch.inf if "mask" in leaves else self.tensors.visible
        shape = (*self.tensors.query.shape[:3], self.point.key_count)
        return torch.ones(shape, dtype=torch.bool) if seen is None else seen.expand(shape)
