"""Every mechanism once more, straight from its paper in plain torch: what the battery judges results by.

Slow, quadratic and in float64; independent of every engine and of the mechanisms' own code, from which only the parameters
and the settings are read. A definition takes a :class:`WrittenCall` and the layer, and returns the weights (B, heads, R, S), or
weights and output where the output is more than weights times values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.testing.definitions import formulas, linear, magnitude, pairs
from unsoft.testing.definitions.call import NotDefined, WrittenCall
from unsoft.testing.definitions.formulas import Pointwise

Defined = tuple[Tensor, Tensor]
"""Weights and output."""
Definition = Callable[[WrittenCall, Any], Defined]

_LINEAR = {
    "linear-relu": linear.relu,
    "linear-elu1": linear.elu1,
    "linear-exp": linear.exponential,
    "linear-taylor2": linear.taylor2,
    "linear-identity": linear.identity,
    "performer": linear.performer,
    "cosformer": linear.cosformer,
    "retention": linear.retention,
    "decay": linear.decay,
}
_PAIRS = {"gpam": pairs.gpam, "differential": pairs.differential, "differential2": pairs.differential2}
_PART = re.compile(r"([a-z][a-z0-9_-]*)(?:\(([^()]*)\))?")


def definition_of(mechanism: str | Formula) -> Definition | None:
    """The definition of a mechanism by name, modifiers included; the text itself for a formula of your own; None if unknown.

    >>> definition_of("gated+logn+gpam") is None, definition_of("no-such-family") is None
    (False, True)
    """
    if isinstance(mechanism, Formula):
        return _pointwise(lambda layer: formulas.from_text(mechanism, dict(layer.values)))
    *modifiers, (base, number) = [_PART.fullmatch(part.strip()).groups() for part in mechanism.split("+")]
    if base == "magnitude":
        modifiers, base = [*modifiers, ("magnitude", None)], "softmax"
    rewriting = [(name, argument) for name, argument in modifiers if name not in _AROUND]
    around = [name for name, _ in modifiers if name in _AROUND]
    found = _base(base, number, rewriting)
    for name in reversed(around):
        found = None if found is None else _AROUND[name](found)
    return found


def _base(base: str, number: str | None, rewriting: list[tuple[str, str | None]]) -> Definition | None:
    if base in _LINEAR:
        return _linear(_LINEAR[base])
    if base in _PAIRS:
        return _pair(_PAIRS[base], lambda layer: _rewritten("softmax", None, rewriting, layer))
    if base in formulas.BUILT_IN:
        return _pointwise(lambda layer: _rewritten(base, number, rewriting, layer))
    return None


def _rewritten(
    base: str, number: str | None, rewriting: list[tuple[str, str | None]], layer: Any
) -> Pointwise:
    found = formulas.polynomial(int(number)) if base == "polynomial" and number else formulas.BUILT_IN[base]
    for name, argument in reversed(rewriting):
        if name.startswith("logn"):
            found = formulas.logn(found, float(argument or 512), 16.0 if name == "logn16" else 1.0)
        else:
            found = formulas.sink(found, layer.values["sink"] if hasattr(layer, "values") else torch.zeros(1))
    return found


def _pointwise(formula: Callable[[Any], Pointwise]) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        weights = formulas.visible_part(formula(layer)(formulas.logits_of(call)), call.visible)
        return weights, weights @ call.spread(call.value)

    return definition


def _linear(weights_of: Callable[[WrittenCall, Any], Tensor]) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        weights = weights_of(call, layer)
        return weights, weights @ call.spread(call.value)

    return definition


def _pair(found: Callable[..., Any], formula: Callable[[Any], Pointwise]) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        result = found(call, layer, formula(layer))
        if isinstance(result, tuple):
            return result
        return result, result @ call.value.repeat_interleave(result.shape[1] // call.value.shape[1], dim=1)

    return definition


def _gated(inner: Definition) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        factor = pairs.gate(call, layer)
        weights, out = inner(call, layer.inner)
        return factor * weights, factor * out

    return definition


def _magnitude(inner: Definition) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        if not magnitude.is_defined(call, layer):
            raise NotDefined("what a gate of bounded cost forgets is not a formula")
        gate = magnitude.gates(call, layer)
        if layer.where == "mass":
            log = gate.log().repeat_interleave(call.query.shape[1] // gate.shape[1], dim=1)
            return inner(call.change(bias=call.bias + log, strength=True), layer.inner.inner)
        if gate.shape[2] > 1:
            weights, _ = inner(call, layer.inner)
            weights = weights * gate.repeat_interleave(weights.shape[1] // gate.shape[1], dim=1)
            return weights, weights @ call.value.repeat_interleave(weights.shape[1] // gate.shape[1], dim=1)
        weights, out = inner(call.change(value=call.value * gate.mT), layer.inner)
        return weights * gate.repeat_interleave(weights.shape[1] // gate.shape[1], dim=1), out

    return definition


_AROUND = {"gated": _gated, "magnitude": _magnitude}
