"""Runs the PTX that Triton compiled, on the CPU: what a GPU of the families sm_80 (mma) and sm_90 (wgmma)
would execute, instruction by instruction.

All threads of a program (CTA) step together, one numpy operation for each instruction. Registers are bits, as
in the machine. Unlike the interpreter this sees the layouts, the shared memory, the matrix instructions, the
roundings and the pipelining of the compiled kernel. It is an error if

- an address is outside the tensors of the launch or outside shared memory;
- a warp reads shared memory that another one wrote, or writes what another one read or wrote, with no barrier
  between;
- shared memory is read while an asynchronous copy to it has not been waited for, or overwritten while a
  matrix product that has not been waited for reads it, or read by such a product without a proxy fence; or
  the product's result is read before it is there;
- a branch is not taken by all threads or by none.

Instructions that the kernels here do not need are not there: an unknown one is an error.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.engines.triton.compiled.ptx.errors import PtxError
from tests.engines.triton.compiled.ptx.memory import GlobalMemory, SharedMemory
from tests.engines.triton.compiled.ptx.numbers import UNSIGNED, numpy_type
from tests.engines.triton.compiled.ptx.text import Text

Handler = Callable[["Program", list[str], list[Any], Any], None]
"""(program, kinds, operands, which threads take part)"""
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Makes a function the meaning of some instructions."""

    def add(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return add


class Program:
    """One program of a launch: registers, shared memory, products under way."""

    def __init__(
        self,
        text: Text,
        place: tuple[int, ...],
        grid: tuple[int, ...],
        warps: int,
        shared: int,
        values: list[int],
        memory: GlobalMemory,
    ) -> None:
        self.text, self.memory, self.threads = text, memory, 32 * warps
        self.shared = SharedMemory(shared)
        thread = np.arange(self.threads)
        self.warp = thread // 32
        self.special = {"%tid.x": thread, "%laneid": thread % 32}
        self.special |= dict.fromkeys(("%tid.y", "%tid.z", "global_smem"), 0 * thread)
        for axis, p, g in zip("xyz", place, grid, strict=True):
            self.special |= {f"%ctaid.{axis}": 0 * thread + p, f"%nctaid.{axis}": 0 * thread + g}
        self.params = {name: value for (name, _), value in zip(text.params, values, strict=False)}
        self.registers: dict[str, Any] = {}
        self.products: list[tuple[list[Any], set[str]]] = [([], set())]
        """Groups of matrix products under way: what they read and where their results go."""

    def run(self) -> None:
        at, code = 0, self.text.code
        with np.errstate(all="ignore"):
            while at < len(code):
                predicate, name, kinds, args = code[at]
                at += 1
                active = np.ones(self.threads, bool)
                if predicate:
                    active = self.registers[predicate.lstrip("!")] ^ (predicate[0] == "!")
                if name == "ret":
                    return
                if name == "bra":
                    if active.any() != active.all():
                        raise PtxError("threads of a program branch differently")
                    at = self.text.labels[args[0]] if active[0] else at
                elif name in HANDLERS:
                    HANDLERS[name](self, kinds, args, active)
                else:
                    raise PtxError(f"unknown instruction {'.'.join([name, *kinds])}")

    def bits(self, x: Any, width: int) -> Any:
        """An operand as unsigned integers, one for each thread."""
        unsigned = UNSIGNED[width]
        if isinstance(x, int):
            return np.full(self.threads, x & ((1 << width) - 1), np.uint64).astype(unsigned)
        if x in self.special:
            return self.special[x].astype(np.int64).astype(unsigned)
        if any(x in targets for _, targets in self.products):
            raise PtxError(f"{x} is read before the matrix product that makes it was waited for")
        return self.registers[x].astype(unsigned)

    def value(self, x: Any, kind: str) -> Any:
        """An operand as numbers of a PTX type."""
        if kind == "pred":
            return np.full(self.threads, x != 0) if isinstance(x, int) else self.registers[x]
        return self.bits(x, int(kind[1:])).view(numpy_type(kind))

    def put(self, target: str, content: Any, active: Any) -> None:
        """Writes a register in the threads that take part."""
        if target == "_":
            return
        if content.dtype != bool:
            content = np.ascontiguousarray(content)
            content = content.view(UNSIGNED[8 * content.dtype.itemsize])
        old = self.registers.get(target)
        if not active.all() and old is not None:
            content = np.where(active, content, old.astype(content.dtype))
        self.registers[target] = content.copy()

    def addresses(self, operand: tuple[str, int], width: int) -> Any:
        base, offset = operand
        start = self.special[base] if base in self.special else self.bits(base, width).astype(np.int64)
        return start + offset
