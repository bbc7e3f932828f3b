"""Runs instructions on tensors: one torch call each.

>>> import torch
>>> from unsoft.formula.lower import lower
>>> from unsoft.formula.parse import parse
>>> run(*lower({"y": parse("max(s, 0)")}), {"s": torch.tensor([-1.0, 3.0])})["y"].tolist()
[0.0, 3.0]
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unsoft.formula.lower import Instruction, Operand
from unsoft.formula.operation import OPERATIONS


def run(
    instructions: Sequence[Instruction], results: Mapping[str, Operand], env: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Executes lowered instructions on tensors of one dtype, without autograd conventions of our own.

    Results have the shape of the symbols they depend on; a result that depends on none stays a number.
    """
    values: dict[str, Any] = dict(env)
    for target, op, args in instructions:
        values[target] = OPERATIONS[op].torch(*(values[a] if isinstance(a, str) else a for a in args))
    return {
        name: values[operand] if isinstance(operand, str) else operand for name, operand in results.items()
    }
