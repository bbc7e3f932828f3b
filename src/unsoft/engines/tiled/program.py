"""Evaluates expressions on a tile without autograd and almost without allocating: the inner loop of the tiled
engine.

A value that spans the whole tile is written into a buffer of a :class:`Workspace`, by torch's ``out=``; its
buffer is free again after its last use, and an operation may write over an operand that dies there.
Everything smaller (a value per row, per key, per head, a number) is computed with ordinary torch operations,
which costs next to nothing.

Conditions are bit masks: integer tensors of the width of the numbers, -1 (all bits) to keep and 0 to drop.
They are exact, branch-free, and several times faster than torch.where on a CPU. Unlike a product with 0 and 1
they drop NaN and Inf too.

>>> x = torch.tensor([1.0, torch.nan, 3.0])
>>> keep_(x, bit_mask(torch.tensor([True, False, True]), torch.float32))
tensor([1., 0., 3.])
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import Expr, Instruction, lower
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import COMPARISONS, OPERATIONS

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def bits(x: Tensor) -> Tensor:
    """Return the same memory as integers."""
    return x.view(_INTEGERS[x.dtype])


def bit_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask of a bool tensor, for numbers of ``dtype``."""
    return keep.to(_INTEGERS[dtype]).neg_()


def keep_(x: Tensor, mask: Tensor) -> Tensor:
    """Replace what the mask drops by 0, in place."""
    bits(x).bitwise_and_(mask)
    return x


def keep_or_fill_(x: Tensor, mask: Tensor, filler: Tensor) -> Tensor:
    """Replace what the mask drops by the number in ``filler`` (zero-dimensional), in place."""
    bits(x).bitwise_and_(mask).bitwise_or_(~mask & bits(filler))
    return x


def flags_to_mask_(flags: Tensor) -> Tensor:
    """Turn 1.0 and 0.0, which comparisons write into a float tensor, into a mask in the same memory."""
    # 1.0 is a positive integer bit pattern and 0.0 is 0: after negation the sign bit alone tells them apart.
    mask = bits(flags)
    return mask.neg_().bitwise_right_shift_(8 * mask.element_size() - 1)


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
        """Return an uninitialised tensor of this shape, to be used until it is given back."""
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
        """End the use of a tensor that :meth:`take` returned; any other tensor is ignored."""
        slot = self._owner.pop(id(tensor), None)
        if slot is not None:
            self._free.append(slot)

    def give_back_all(self) -> None:
        self._owner.clear()
        self._free = list(range(len(self._buffers)))

    def number(self, value: float) -> Tensor:
        """Return a number as a zero-dimensional tensor, for operations that only take tensors."""
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


class TileProgram:
    """Several expressions, evaluated together on one tile.

    The symbol s is the tile itself, all other symbols broadcast to it. Running the program consumes s: its
    buffer may hold a result afterwards, unless ``keep_s``.

    >>> from unsoft.formula import parse
    >>> program = TileProgram({"weight": parse("exp(s - m)"), "double": parse("2*exp(s - m)")})
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
        """Return the value of each output, a tensor or a number; equal expressions are the same tensor."""
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
    """Return each instruction with whether it fills a buffer, and the buffers that it is the last to use."""
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
    """Return the value of one operation, written into ``out``."""
    if op == "where":
        return _where(space, out, *operands)
    operation, (first, *others) = OPERATIONS[op], operands
    if operation.into is None:
        return out.copy_(operation.torch(*operands))
    # torch needs a tensor on the left; the right may be a number.
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


def tidy(
    instructions: Sequence[Instruction], results: Mapping[Any, Operand]
) -> tuple[list[Instruction], dict[Any, Operand]]:
    """Return fewer instructions with the same results, bit for bit: each one saved is a pass over a tile.

    Symbolic derivatives are full of (-1) x, a - (-b) and of products that differ only in the order of their
    factors.

    >>> from unsoft.formula import lower, parse
    >>> instructions, results = tidy(*lower({"y": parse("s*m + m*s"), "x": parse("s - m*(-1)")}))
    >>> for instruction in instructions: print(*instruction)
    _0 mul ('s', 'm')
    _2 add ('_0', '_0')
    _4 add ('s', 'm')
    >>> results
    {'y': '_2', 'x': '_4'}
    """
    renamed: dict[Operand, Operand] = {}
    known: dict[tuple[Operand, ...], str] = {}
    negated: dict[Operand, Operand] = {}
    kept: list[Instruction] = []
    for target, op, args in instructions:
        op, args = _rewritten(op, tuple(renamed.get(a, a) for a in args), negated)
        key = (op, *(sorted(args, key=str) if OPERATIONS[op].commutative else args))
        renamed[target] = known.setdefault(key, target)
        if renamed[target] == target:
            kept.append(Instruction(target, op, args))
            if op == "neg":
                negated[target] = args[0]
    final = {name: renamed.get(operand, operand) for name, operand in results.items()}
    return used_instructions(kept, set(final.values())), final


def _rewritten(
    op: str, args: tuple[Operand, ...], negated: Mapping[Operand, Operand]
) -> tuple[str, tuple[Operand, ...]]:
    match op, args:
        case ("mul", (-1.0, x)) | ("mul", (x, -1.0)):
            return "neg", (x,)
        case "add", (a, b) if b in negated:
            return "sub", (a, negated[b])
        case "add", (a, b) if a in negated:
            return "sub", (b, negated[a])
        case "sub", (a, b) if b in negated:
            return "add", (a, negated[b])
    return op, args


def used_instructions(instructions: list[Instruction], needed: set[Operand]) -> list[Instruction]:
    """Return the instructions without those that nothing needs any more."""
    used = []
    for instruction in reversed(instructions):
        if instruction.target in needed:
            used.append(instruction)
            needed.update(instruction.args)
    return used[::-1]
