"""Every mechanism once more, straight from its paper in plain torch: what the battery judges results by.

Each mechanism's file holds its definition (see unsoft.modules.definition);
here they are put together as a name says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from unsoft.formula import Formula, evaluate
from unsoft.modules import registry
from unsoft.modules.definition import (
    Defined,
    Definition,
    Logits,
    NotDefined,
    Pointwise,
    WrittenCall,
    logits_of,
    over,
    visible_part,
)
from unsoft.modules.spec import MechanismSpec
from unsoft.testing.definitions import magnitude

_PART = re.compile(r"([a-z][a-z0-9_-]*)(?:\(([^()]*)\))?")
Part = tuple[str, str | None]
"""A name and the number in its brackets."""


def definition_of(mechanism: str | Formula) -> Definition | None:
    """The definition of a mechanism by name, modifiers included; the text itself for a formula of your own;
    None if unknown.

    >>> definition_of("gated+logn+gpam") is None, definition_of("no-such-family") is None
    (False, True)
    """
    if isinstance(mechanism, Formula):
        return _pointwise(lambda layer: _from_text(mechanism, dict(layer.values)))
    *before, base = [_name_and_number(part) for part in mechanism.split("+")]
    if base[0] == "magnitude":
        before, base = [*before, base], ("softmax", None)
    around = [name for name, _ in before if name in _wrappers()]
    found = _base(base, [part for part in before if part[0] not in around])
    for name in reversed(around):
        found = None if found is None else _wrappers()[name](found)
    return found


def _name_and_number(part: str) -> Part:
    match = _PART.fullmatch(part.strip())
    return (match[1], match[2]) if match else (part, None)


def _wrappers() -> dict[str, Callable[[Definition], Definition]]:
    held = {m.name: registry.definition(m.name) for m in registry.modifiers() if not m.of_formula}
    return {name: found for name, found in held.items() if found is not None} | {"magnitude": _magnitude}


def _base(base: Part, rewriting: list[Part]) -> Definition | None:
    found = registry.definition(base[0])
    if found is None:
        return None
    stands_for = registry.resolve(base[0])
    if isinstance(stands_for, Formula):
        return _pointwise(lambda layer: _rewritten(base, rewriting, layer))
    assert isinstance(stands_for, MechanismSpec) and stands_for.family is not None
    if stands_for.family.base is None:
        return _completed(found)
    if isinstance(stands_for.family.base, Formula):  # its own, which nothing else defines
        return None if rewriting else _completed(found)
    inner = (stands_for.family.base, None)
    return _completed(lambda call, layer: found(call, layer, _rewritten(inner, rewriting, layer)))


def _rewritten(base: Part, rewriting: list[Part], layer: Any) -> Pointwise:
    found: Any = registry.definition(base[0])
    if registry.takes_number(base[0]):
        found = found(int(base[1])) if base[1] else found()
    for name, argument in reversed(rewriting):
        rewrite: Any = registry.definition(name)
        found = rewrite(found, float(argument) if argument else None, layer)
    return cast(Pointwise, found)


def _pointwise(formula: Callable[[Any], Pointwise]) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        weights = visible_part(formula(layer)(logits_of(call)), call.visible)
        return weights, weights @ call.spread(call.value)

    return definition


def _completed(found: Callable[[WrittenCall, Any], Any]) -> Definition:
    """With the output, where that is weights times values."""

    def definition(call: WrittenCall, layer: Any) -> Defined:
        result = found(call, layer)
        if isinstance(result, tuple):
            return result
        return result, result @ call.value.repeat_interleave(result.shape[1] // call.value.shape[1], dim=1)

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


def _from_text(formula: Formula, params: Mapping[str, Tensor]) -> Pointwise:
    """A formula of a user's own, evaluated as it stands: its text is its definition."""

    def weights(x: Logits) -> Tensor:
        strength = formula.mask_target is None or x.strength
        boost = x.bias if strength else torch.zeros_like(x.bias)
        env = {"s": x.s if strength else x.s + x.bias, "n": x.n, "i": x.i, "j": x.j}
        env |= {name: value[:, None, None] for name, value in params.items()} | dict(x.squares)
        shape = x.visible.shape
        if formula.peak is not None:
            peaks = (evaluate(formula.peak, env) + boost).expand(shape).masked_fill(~x.visible, -torch.inf)
            lowest = peaks.new_full((*shape[:3], 1), -torch.inf)
            env["m"] = torch.cat([peaks, lowest], -1).amax(-1, keepdim=True).nan_to_num(neginf=0.0).detach()
        # Where nothing is visible any finite logit will do: what is hidden is taken out below.
        env["s"] = torch.where(x.visible, env["s"], 0.0)
        weight = torch.where(x.visible, evaluate(formula.weight, env).expand(shape) * boost.exp(), 0.0)
        if formula.mass is None:
            return weight
        mass = evaluate(formula.mass, env).expand(shape) * (formula.mass_degree * boost).exp()
        total = torch.where(x.visible, mass, 0.0).sum(-1, keepdim=True)
        row = {name: value for name, value in env.items() if name not in ("s", "j", "k2")}
        if formula.offset_mass is not None:
            total = total + evaluate(formula.offset_mass, row)
        if formula.norm is not None:
            total = evaluate(formula.norm, row | {"z": total})
        return over(weight, total)

    return weights
