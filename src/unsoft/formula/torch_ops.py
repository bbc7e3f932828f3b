"""Runs instructions on tensors: one torch call each.

>>> import torch
>>> from unsoft.formula.lower import lower
>>> from unsoft.formula.parse import parse
>>> run(*lower({"y": parse("max(s, 0)")}), {"s": torch.tensor([-1.0, 3.0])})["y"].tolist()
[0.0, 3.0]
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unsoft.formula.lower import Instruction, Operand


def run(
    instructions: Sequence[Instruction], results: Mapping[str, Operand], env: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Executes lowered instructions on tensors of one dtype, without autograd conventions of our own.

    Results have the shape of the symbols they depend on; a result that depends on none stays a number.
    """
    values: dict[str, Any] = dict(env)
    for target, op, args in instructions:
        values[target] = TORCH[op](*(values[a] if isinstance(a, str) else a for a in args))
    return {
        name: values[operand] if isinstance(operand, str) else operand for name, operand in results.items()
    }


def _max(a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    return torch.clamp(a, min=b) if isinstance(a, Tensor) else torch.clamp(b, min=a)


def _min(a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    return torch.clamp(a, max=b) if isinstance(a, Tensor) else torch.clamp(b, max=a)


def _sign(a: Tensor) -> Tensor:
    return torch.where(a.isnan(), a, torch.sign(a))  # torch.sign(nan) is 0, which would hide a bad logit


class _Compare:
    """A comparison that remembers the dtype of its operands, which a boolean tensor forgets."""

    def __init__(self, compare: Callable) -> None:
        self.compare = compare

    def __call__(self, a: Any, b: Any) -> tuple[Tensor, torch.dtype]:
        return self.compare(a, b), (a if isinstance(a, Tensor) else b).dtype


def _where(condition: tuple[Tensor, torch.dtype], a: Tensor | float, b: Tensor | float) -> Tensor:
    chosen, dtype = condition
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = torch.full((), a, dtype=dtype, device=chosen.device)  # two numbers would give the default dtype
    return torch.where(chosen, a, b)


TORCH: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "neg": operator.neg,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "sign": _sign,
    "max": _max,
    "min": _min,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "erf": torch.erf,
    "where": _where,
    **{op: _Compare(getattr(operator, op)) for op in ("lt", "le", "gt", "ge", "eq", "ne")},
}
