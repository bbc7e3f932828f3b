"""The definition of every mechanism in plain torch, straight from its paper: the reference of the test suite.

Each mechanism's file contains its definition (see unsoft.modules.definition). Here they are composed for
names with modifiers, such as "gated+logn+gpam".
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from unsoft.formula import Formula
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
from unsoft.testing.reference import FormulaRows

Part = tuple[str, float | int | None]
"""A name and the number in its brackets."""


def definition_of(mechanism: str | Formula) -> Definition | None:
    """Return the definition of a mechanism by name, modifiers included; None if unknown.

    A formula is its own definition.

    >>> definition_of("gated+logn+gpam") is None, definition_of("no-such-family") is None
    (False, True)
    """
    if isinstance(mechanism, Formula):
        return _pointwise(lambda layer: _from_text(mechanism, dict(layer.values)))
    parts = registry.parts_of(mechanism)
    *before, base = [registry.split_name(mechanism, part)[:2] for part in parts]
    if base[0] in _wrappers():  # "magnitude", "density" and "gau" alone wrap their usual base
        usual = cast(MechanismSpec, registry.resolve(base[0])).family
        before, base = [*before, base], (cast(str, usual and usual.base), None)
    around = [name for name, _ in before if name in _wrappers()]
    definition = _base(base, [part for part in before if part[0] not in around])
    for name in reversed(around):
        definition = None if definition is None else _wrappers()[name](definition)
    return definition


def _wrappers() -> dict[str, Callable[[Definition], Definition]]:
    held = {m.name: registry.definition(m.name) for m in registry.modifiers() if not m.of_formula}
    return {name: wrap for name, wrap in held.items() if wrap is not None} | {"magnitude": _magnitude}


def _base(base: Part, rewriting: list[Part]) -> Definition | None:
    definition = registry.definition(base[0])
    if definition is None:
        return None
    spec = registry.resolve(base[0])
    if isinstance(spec, Formula):
        return _pointwise(lambda layer: _rewritten(base, rewriting, layer))
    assert isinstance(spec, MechanismSpec) and spec.family is not None
    if spec.family.base is None:
        return _completed(definition)
    if isinstance(spec.family.base, Formula):  # its own, which nothing else defines
        return None if rewriting else _completed(definition)
    inner = (spec.family.base, None)
    return _completed(lambda call, layer: definition(call, layer, _rewritten(inner, rewriting, layer)))


def _rewritten(base: Part, rewriting: list[Part], layer: Any) -> Pointwise:
    definition: Any = registry.definition(base[0])
    if registry.takes_number(base[0]):
        definition = definition() if base[1] is None else definition(base[1])
    for name, argument in reversed(rewriting):
        rewrite: Any = registry.definition(name)
        definition = rewrite(definition, argument, layer)
    return cast(Pointwise, definition)


def _pointwise(formula: Callable[[Any], Pointwise]) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        weights = visible_part(formula(layer)(logits_of(call)), call.visible)
        return weights, weights @ call.spread(call.value)

    return definition


def _completed(weights_of: Callable[[WrittenCall, Any], Any]) -> Definition:
    """Add the output to a definition that returns weights only."""

    def definition(call: WrittenCall, layer: Any) -> Defined:
        result = weights_of(call, layer)
        if isinstance(result, tuple):
            return result
        return result, result @ call.value.repeat_interleave(result.shape[1] // call.value.shape[1], dim=1)

    return definition


def _magnitude(inner: Definition) -> Definition:
    def definition(call: WrittenCall, layer: Any) -> Defined:
        if not _gates_are_defined(call, layer):
            raise NotDefined("what a gate of bounded cost forgets is not a formula")
        gate = _gates(call, layer)
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
    """Evaluate a formula directly: its text is its definition."""

    def weights(x: Logits) -> Tensor:
        symbols = {"s": x.s, "n": x.n, "i": x.i, "j": x.j, **x.squares}
        symbols |= {name: value[:, None, None] for name, value in params.items()}
        return FormulaRows(formula, symbols, x.visible, x.bias, strength=x.strength).weights

    return weights


def _gates_are_defined(call: WrittenCall, layer: Any) -> bool:
    """Return True if a formula gives the gates.

    Streaming equals arrival as long as nothing is forgotten; beyond its first chunk no formula applies.
    """
    exact = not call.causal or layer.causal in ("arrival", "prefix")
    return (exact or call.key.shape[2] <= layer.first) and (call.causal or layer.solver != "lowrank")


def _gates(call: WrittenCall, layer: Any) -> Tensor:
    """Return the gates of magnitude (Rosić 2026), (B, Hk, 1 or R, S), by solving every system directly.

        Z_jl = exp(-t |k_j - k_l|^2 / d)        (Z + eps) w = 1        gate_j = sigmoid(beta w_j + gamma)

    Absent keys are taken out of the system. Bidirectional: the system of all keys; arrival: that of the keys
    up to j; prefix: that of the keys up to row i.
    """
    batch, heads, keys, width = call.key.shape
    log_t = _by_key_head(layer.log_t, heads)
    there = call.there.reshape(batch, heads, -1, keys).any(2)
    lengths = call.key.square().sum(-1)
    squares = (
        lengths[..., :, None] + lengths[..., None, :] - 2 * call.key @ call.key.mT
    )  # the battery's keys make this exact
    similar = call.move((-log_t.exp()[:, None, None] / width * squares).exp())
    if not call.causal:
        system, right = _system(similar, there, layer.eps), there.to(similar.dtype)
        if layer.solver != "cg":
            weights = _solved(system, right)[:, :, None]
        elif call.rounding is None:
            weights = _steps(system, right, layer.iterations)[:, :, None]
        else:
            weights = _rounded_steps(system, right, layer.iterations, call.rounding)[:, :, None]
    elif layer.causal == "prefix":
        weights = _of_rows(similar, there, layer.eps, call.rows)
    else:
        weights = _arrivals(_system(similar, there, layer.eps), there)[:, :, None]
    if layer.beta is None:
        return weights if layer.where == "values" else weights.clamp(min=0)
    beta, gamma = (_by_key_head(x, heads)[:, None, None] for x in (layer.beta, layer.gamma))
    return (beta * weights + gamma).sigmoid()


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """Return the mean of a parameter over the query heads that share a key head."""
    return x.reshape(heads, -1).mean(-1)


def _system(similar: Tensor, there: Tensor, eps: float) -> Tensor:
    """Return Z + eps, in which an absent key is similar to none."""
    both = there[..., :, None] & there[..., None, :]
    ridge = torch.where(there, eps, similar.new_ones(()))
    return torch.where(both, similar, 0.0) + torch.diag_embed(ridge)


def _solved(system: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve(system, right[..., None])[..., 0] if right.numel() else right


def _steps(system: Tensor, right: Tensor, steps: int) -> Tensor:
    """Return the result of some steps of conjugate gradients in exact arithmetic.

    That is the solution within the space of right, A right, A^2 right ...,
    on a basis kept orthogonal to the last digit.
    """
    basis = _unit(right)[..., None]
    for _ in range(1, min(steps, right.shape[-1])):
        new = (system @ basis[..., -1:])[..., 0]
        size = new.norm(dim=-1, keepdim=True)
        for _ in range(2):
            new = new - (basis @ (basis.mT @ new[..., None]))[..., 0]
        # The space may be all there is: then what is left is rounding.
        new = torch.where(new.norm(dim=-1, keepdim=True) > 1e-12 * size, new, 0.0)
        basis = torch.cat([basis, _unit(new)[..., None]], dim=-1)
    inside = basis.mT @ system @ basis
    inside = inside + torch.diag_embed((inside.diagonal(dim1=-2, dim2=-1) == 0).to(inside.dtype))
    solution = (basis @ torch.linalg.solve(inside, basis.mT @ right[..., None]))[..., 0]
    # Where that solves the system, one more step would change nothing, here or near here:
    # the slope is the solution's.
    left = right - (system @ solution[..., None])[..., 0]
    solved = left.norm(dim=-1, keepdim=True) <= 1e-10 * right.norm(dim=-1, keepdim=True)
    return torch.where(solved, _solved(system, right), solution)


def _rounded_steps(system: Tensor, right: Tensor, steps: int, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Run the textbook recurrence of conjugate gradients with rounding errors, which it amplifies."""
    w, r = torch.zeros_like(right), right
    p, size = r, (r * r).sum(-1, keepdim=True)
    for _ in range(steps):
        product = (rounding(system) @ p[..., None])[..., 0]
        alpha = rounding(over(size, (p * product).sum(-1, keepdim=True)))
        w, r = rounding(w + alpha * p), r - rounding(alpha * product)
        size, before = (r * r).sum(-1, keepdim=True), size
        p = r + rounding(over(size, before) * p)
    return w


def _unit(x: Tensor) -> Tensor:
    square = x.square().sum(-1, keepdim=True)
    return torch.where(square == 0, 0.0, x / torch.where(square == 0, 1.0, square).sqrt())


def _arrivals(system: Tensor, there: Tensor) -> Tensor:
    """Return the last weight of every prefix.

    With (Z + eps) = L L', the weight of key j in its prefix is (L^-1 1)_j / L_jj.
    """
    if not system.numel():
        return there.to(system.dtype)
    lower = torch.linalg.cholesky(system)
    y = torch.linalg.solve_triangular(lower, there.to(system.dtype)[..., None], upper=False)[..., 0]
    weights: Tensor = y / lower.diagonal(dim1=-2, dim2=-1)
    return weights


def _of_rows(similar: Tensor, there: Tensor, eps: float, rows: Tensor) -> Tensor:
    """Return the weights (B, Hk, R, S) of the keys up to each row; 0 for keys after it."""
    weights = []
    for row in rows.tolist():
        seen = there & (torch.arange(there.shape[-1]) <= row)
        weights.append(_solved(_system(similar, seen, eps), seen.to(similar.dtype)))
    return torch.stack(weights, dim=2) if weights else similar[:, :, :0]
