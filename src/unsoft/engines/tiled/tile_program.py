"""Evaluates expressions on a tile without autograd and almost without allocating: the inner loop of the tiled
engine.

A value that spans the whole tile is written into a buffer of a :class:`Workspace`, by torch's ``out=``; its
buffer is free again after its last use, and an operation may write over an operand that dies there.
Everything smaller (a value per row, per key, per head, a number) is computed with ordinary torch operations,
which costs next to nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.tiled.bit_masks import bit_mask, bits, flags_to_mask_
from unsoft.engines.tiled.peephole import tidy
from unsoft.formula import Expr, Instruction, lower
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import COMPARISONS, OPERATIONS


class Workspace:
    """Buffers for tiles of one dtype and any shape; a buffer grows to the largest tile it has held."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._buffers: list[Tensor] = []
        self._free: list[int] = []
        self._views: dict[tuple[int, torch.Size], Tensor] = {}
        self._owner: dict[int, int] = {}
        self._numbers: dict[float, Tensor] = {}

    def take(self, shape: torch.Size) -> Tensor:
        """An uninitialised tensor of this shape, until it is given back."""
        if not self._free:
            self._buffers.append(torch.empty(0, dtype=self.dtype, device=self.device))
            self._free.append(len(self._buffers) - 1)
        slot = self._free.pop()
        view = self._views.get((slot, shape))
        if view is None:
            view = self._new_view(slot, shape)
        self._owner[id(view)] = slot
        return view

    def give_back(self, tensor: Tensor) -> None:
        """Ends the use of a tensor that :meth:`take` returned; any other tensor is ignored."""
        slot = self._owner.pop(id(tensor), None)
        if slot is not None:
            self._free.append(slot)

    def give_back_all(self) -> None:
        self._owner.clear()
        self._free = list(range(len(self._buffers)))

    def number(self, value: float) -> Tensor:
        """A number as a zero-dimensional tensor, for operations that insist on tensors."""
        if value not in self._numbers:
            self._numbers[value] = torch.tensor(value, dtype=self.dtype, device=self.device)
        return self._numbers[value]

    def _new_view(self, slot: int, shape: torch.Size) -> Tensor:
        size = shape.numel()
        if self._buffers[slot].numel() < size:
            self._buffers[slot] = torch.empty(size, dtype=self.dtype, device=self.device)
            self._views = {key: view for key, view in self._views.items() if key[0] != slot}
        view = self._views[slot, shape] = self._buffers[slot][:size].view(shape)
        return view


class Program:
    """Several expressions, evaluated together on one tile.

    The symbol s is the tile itself, all other symbols broadcast to it. Running the program consumes s: its
    buffer may hold a result afterwards, unless ``keep_s``.

    >>> from unsoft.formula import parse
    >>> program = Program({"weight": parse("exp(s - m)"), "double": parse("2*exp(s - m)")})
    >>> space = Workspace(torch.float64, torch.device("cpu"))
    >>> s = space.take(torch.Size([2, 2])).copy_(torch.tensor([[0.0, 1.0], [2.0, 2.0]]))
    >>> program.run({"s": s, "m": torch.tensor([[1.0], [2.0]])}, space)["double"]
    tensor([[0.7358, 2.0000],
            [2.0000, 2.0000]], dtype=torch.float64)
    """

    def __init__(self, outputs: Mapping[Any, Expr], keep_s: bool = False) -> None:
        instructions, self.results = tidy(*lower(outputs))
        kept = set(self.results.values()) | ({"s"} if keep_s else set())
        self._steps = _plan(instructions, kept)

    def run(self, symbols: Mapping[str, Tensor], space: Workspace) -> dict[Any, Any]:
        """The value of each output, a tensor or a number; equal expressions are the same tensor."""
        values = dict(symbols)
        for target, op, args, fills_buffer, dying in self._steps:
            operands = [values[a] if isinstance(a, str) else a for a in args]
            if fills_buffer:
                out = values[dying[0]] if dying else space.take(values["s"].shape)
                values[target] = _filled(op, space, out, *operands)
                dying = dying[1:]
            else:
                values[target] = OPERATIONS[op].torch(*operands)
            for name in dying:
                space.give_back(values[name])
        return {name: values[r] if isinstance(r, str) else r for name, r in self.results.items()}


_Step = tuple[str, str, tuple[Operand, ...], bool, list[str]]


def _plan(instructions: Sequence[Instruction], kept: set[Operand]) -> list[_Step]:
    """Each instruction with: does it fill a buffer, and which buffers it is the last to use."""
    buffered = {"s"}
    for target, _, args in instructions:
        if buffered.intersection(args):
            buffered.add(target)
    steps, used_later = [], set(kept)
    for target, op, args in reversed(instructions):
        names = [a for a in dict.fromkeys(args) if isinstance(a, str)]
        dying = [a for a in names if a in buffered and a not in used_later]
        used_later.update(names)
        steps.append((target, op, args, target in buffered, dying))
    return steps[::-1]


def _filled(op: str, space: Workspace, out: Tensor, *operands: Any) -> Tensor:
    """The value of one operation, written into ``out``."""
    if op == "where":
        return _where(space, out, *operands)
    operation, (first, *others) = OPERATIONS[op], operands
    if operation.into is None:
        return out.copy_(operation.torch(*operands))
    # torch wants a tensor on the left; a number may stand on the right.
    operation.into(first if isinstance(first, Tensor) else space.number(first), *others, out=out)
    if op in COMPARISONS:
        flags_to_mask_(out)  # a bit mask in a float buffer
    return out


def _where(
    space: Workspace, out: Tensor, condition: Tensor | tuple[Tensor], *branches: Tensor | float
) -> Tensor:
    mask = bits(condition) if isinstance(condition, Tensor) else bit_mask(condition[0], space.dtype)
    a, b = (bits(x if isinstance(x, Tensor) else space.number(x)) for x in branches)
    if not isinstance(branches[1], Tensor) and branches[1] == 0.0:
        torch.bitwise_and(a, mask, out=bits(out))
        return out
    either = space.take(out.shape)  # b ^ ((a ^ b) & mask): all of a or all of b
    differing = torch.bitwise_xor(a, b, out=bits(either)) if out.shape in (a.shape, b.shape) else a ^ b
    torch.bitwise_and(differing, mask, out=bits(either))
    torch.bitwise_xor(bits(either), b, out=bits(out))
    space.give_back(either)
    return out
