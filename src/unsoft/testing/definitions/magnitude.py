"""The gate of magnitude (Rosić 2026) by solving every system as it stands.

    Z_jl = exp(-t |k_j - k_l|^2 / d)        (Z + eps) w = 1        gate_j = sigmoid(beta w_j + gamma)

Keys that are not there are taken out of the system. Bidirectional: the system of all keys; arrival: that of
the keys up to j; prefix: that of the keys up to row i. Streaming is arrival as long as nothing is forgotten;
what it makes of more keys than its first chunk holds depends on what it forgets, and no formula says that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.modules.definition import WrittenCall, over


def is_defined(call: WrittenCall, layer: Any) -> bool:
    """Does a formula say what the gates are?"""
    exact = not call.causal or layer.causal in ("arrival", "prefix")
    return (exact or call.key.shape[2] <= layer.first) and (call.causal or layer.solver != "lowrank")


def gates(call: WrittenCall, layer: Any) -> Tensor:
    """(B, Hk, 1 or R, S): the factor of every key, for all rows or for each of them."""
    batch, heads, keys, width = call.key.shape
    log_t, beta, gamma = (_by_key_head(x, heads) for x in (layer.log_t, layer.beta, layer.gamma))
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
    return (beta[:, None, None] * weights + gamma[:, None, None]).sigmoid()


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """Query heads that share a key head use the mean of their parameters."""
    return x.reshape(heads, -1).mean(-1)


def _system(similar: Tensor, there: Tensor, eps: float) -> Tensor:
    """Z + eps, in which a key that is not there is alone."""
    both = there[..., :, None] & there[..., None, :]
    ridge = torch.where(there, eps, similar.new_ones(()))
    return torch.where(both, similar, 0.0) + torch.diag_embed(ridge)


def _solved(system: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve(system, right[..., None])[..., 0] if right.numel() else right


def _steps(system: Tensor, right: Tensor, steps: int) -> Tensor:
    """What conjugate gradients reach after some steps in exact arithmetic.

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
    found = (basis @ torch.linalg.solve(inside, basis.mT @ right[..., None]))[..., 0]
    # Where that solves the system, one more step would change nothing, here or near here:
    # the slope is the solution's.
    left = right - (system @ found[..., None])[..., 0]
    solved = left.norm(dim=-1, keepdim=True) <= 1e-10 * right.norm(dim=-1, keepdim=True)
    return torch.where(solved, _solved(system, right), found)


def _rounded_steps(system: Tensor, right: Tensor, steps: int, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """The textbook's recurrence with the rounding errors that it makes and amplifies."""
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
    """The last weight of every prefix: with (Z + eps) = L L', the weight of key j in its prefix is (L^-1 1)_j
    / L_jj."""
    if not system.numel():
        return there.to(system.dtype)
    lower = torch.linalg.cholesky(system)
    y = torch.linalg.solve_triangular(lower, there.to(system.dtype)[..., None], upper=False)[..., 0]
    weights: Tensor = y / lower.diagonal(dim1=-2, dim2=-1)
    return weights


def _of_rows(similar: Tensor, there: Tensor, eps: float, rows: Tensor) -> Tensor:
    """(B, Hk, R, S): the weights of the keys up to each row, solved again for each; 0 for keys after it."""
    found = []
    for row in rows.tolist():
        seen = there & (torch.arange(there.shape[-1]) <= row)
        found.append(_solved(_system(similar, seen, eps), seen.to(similar.dtype)))
    return torch.stack(found, dim=2) if found else similar[:, :, :0]
