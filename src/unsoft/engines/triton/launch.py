"""Starts kernels with the tile sizes that suit them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.engines.triton.kernel.structures import Fixed
from unsoft.engines.triton.tile_sizes import (
    EXACT,
    SMALLEST,
    TileSizes,
    candidates,
    is_costly,
)
from unsoft.errors import one_line

Grid = Callable[[TileSizes], tuple[int, int]]
INTERPRETED_SIZES = TileSizes(16, 16, 4, 1)
"""Small, so that small tests have several tiles."""
_chosen: dict[tuple[object, ...], TileSizes] = {}
_refused: dict[tuple[object, ...], str] = {}
"""What cannot be compiled, and why: the next call is not to try it again."""


class Launch(NamedTuple):
    """One kernel with its arguments."""

    name: str
    """What errors, measurements and tests call it; of those in
    :data:`unsoft.engines.triton.tile_sizes.KERNELS` the table has tile sizes."""
    kernel: Any
    arguments: dict[str, Any]
    grid: Grid
    formula: str
    dtype: torch.dtype
    sizes: tuple[TileSizes, ...] = ()
    """Tile sizes to try one after the other, for kernels that the table does not know."""

    @property
    def fixed(self) -> Fixed:
        fixed: Fixed = self.arguments["FIXED"]
        return fixed

    @property
    def only_for_nan(self) -> bool:
        """Does the kernel end at once unless there is NaN or Inf in the inputs?"""
        return self.fixed.exact and "flag" in self.arguments

    @property
    def width(self) -> int:
        return max(self.fixed.padded, self.fixed.value_padded)


def interpreted() -> bool:
    """Do kernels run in Triton's interpreter, on the CPU?"""
    return os.environ.get("TRITON_INTERPRET") == "1"


class CannotCompileError(RuntimeError):
    """Triton does not make a kernel of a formula on this GPU; the message is one line that says why."""


_watching: list[Callable[[Launch], None]] = []


@contextmanager
def watched(look: Callable[[Launch], None]) -> Iterator[None]:
    """Inside, ``look`` is given every launch before it starts."""
    _watching.append(look)
    try:
        yield
    finally:
        _watching.remove(look)


def start(launch: Launch) -> None:
    """Runs a kernel; returns before it is done."""
    for look in _watching:
        look(launch)
    if interpreted():
        run(launch, sizes_for(launch))
        return
    from triton.runtime.errors import OutOfResources

    try:
        run(launch, sizes_for(launch))
    except OutOfResources:  # strides of another kind than those for which the sizes were found to fit
        _chosen.pop(_kind(launch))
        run(launch, sizes_for(launch))


def run(launch: Launch, sizes: TileSizes) -> None:
    """Runs a kernel with given tile sizes."""
    launch.kernel[launch.grid(sizes)](**launch.arguments, **options(sizes))


def sizes_for(launch: Launch) -> TileSizes:
    """The tile sizes of a launch: measured ones, or the first of the table's that the GPU has room for."""
    if interpreted():
        return launch.sizes[0] if launch.sizes else INTERPRETED_SIZES
    key = _kind(launch)
    if key in _refused:
        raise CannotCompileError(_refused[key])
    if key not in _chosen:
        try:
            _chosen[key] = _first_that_fits(launch)
        except CannotCompileError as error:
            _refused[key] = str(error)
            raise
    return _chosen[key]


def _kind(launch: Launch) -> tuple[object, ...]:
    """What tile sizes are chosen for."""
    present = kinds(launch.arguments)
    return id(launch.kernel), launch.fixed, launch.dtype, torch.cuda.current_device(), present


def options(sizes: TileSizes) -> dict[str, Any]:
    """Keywords of a launch.

    Fusing multiplications and additions is asked for aloud: exp2(s * log2(e) - m) is to be one.
    """
    fusion = {} if interpreted() else {"enable_fp_fusion": True}
    return {"M": sizes.rows, "N": sizes.keys, "num_warps": sizes.warps, "num_stages": sizes.stages, **fusion}


def kinds(arguments: dict[str, Any]) -> str:
    """Which of the optional tensors are there."""

    def kind(x: Any) -> str:
        return "".join(map(kind, x)) if isinstance(x, tuple) else "t" if isinstance(x, Tensor) else "-"

    return "".join(kind(x) for x in arguments.values())


def _first_that_fits(launch: Launch) -> TileSizes:
    for sizes in _possible(launch):
        if compiled(launch, sizes) is not None:
            return sizes
    raise CannotCompileError(
        "the GPU has too few registers or too little shared memory even for the smallest tiles"
    )


def _possible(launch: Launch) -> list[TileSizes]:
    if launch.sizes:
        return list(launch.sizes)
    if launch.only_for_nan:
        return [EXACT[launch.width > 128], SMALLEST]
    known = architecture(torch.cuda.current_device())
    costly = is_costly(launch.formula)
    return candidates(launch.name, known, launch.width, 8 * launch.dtype.itemsize, costly)


def compiled(launch: Launch, sizes: TileSizes) -> Any:
    """The kernel, compiled and loaded; None if the GPU has no room for tiles of this size."""
    from triton.runtime.errors import OutOfResources

    try:
        made = launch.kernel.warmup(**launch.arguments, **options(sizes), grid=launch.grid(sizes))
        made._init_handles()  # loads the code, which tells whether shared memory and registers suffice
    except OutOfResources:
        return None
    except Exception as error:  # whatever one of the compilers raises
        raise CannotCompileError(one_line(error)) from error
    return made


@cache
def architecture(device: int) -> str:
    """Of a GPU: "sm_90", "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
