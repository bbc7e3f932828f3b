"""Start kernels, with the first tile sizes that the GPU has room for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.engines.triton.structures import Fixed
from unsoft.engines.triton.tile_sizes import EXACT, SMALLEST, TileSizes, candidates, is_costly
from unsoft.errors import one_line

Grid = Callable[[TileSizes], tuple[int, int]]
INTERPRETED_SIZES = TileSizes(16, 16, 4, 1)
"""Small, so that small tests have several tiles."""
_chosen: dict[tuple[object, ...], TileSizes] = {}
_refused: dict[tuple[object, ...], str] = {}
"""Why a kernel cannot be compiled, so that the next call does not try again."""


class Launch(NamedTuple):
    """One kernel with its arguments."""

    name: str
    """The table has tile sizes for the names in :data:`unsoft.engines.triton.tile_sizes.KERNELS`."""
    kernel: Any
    arguments: dict[str, Any]
    grid: Grid
    formula: str
    dtype: torch.dtype
    sizes: tuple[TileSizes, ...] = ()
    """Tile sizes to try one after the other, for kernels that are not in the table."""

    @property
    def fixed(self) -> Fixed:
        fixed: Fixed = self.arguments["FIXED"]
        return fixed

    @property
    def only_for_nan(self) -> bool:
        """True if the kernel returns at once unless the inputs contain NaN or Inf."""
        return "flag" in self.arguments and self.fixed.exact

    @property
    def width(self) -> int:
        return max(self.fixed.padded, self.fixed.value_padded)


def interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usual_or_small(sizes: TileSizes) -> TileSizes:
    """Return ``sizes``, or small tiles in Triton's interpreter."""
    return INTERPRETED_SIZES if interpreted() else sizes


def on_device(x: Tensor) -> Any:
    """Make the tensor's GPU current, which is where Triton starts kernels."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


class CannotCompileError(RuntimeError):
    """Triton cannot compile a kernel on this GPU; the message is one line that says why."""


def start(launch: Launch) -> None:
    """Start a kernel and return without waiting for it."""
    if interpreted():
        run(launch, sizes_for(launch))
        return
    from triton.runtime.errors import OutOfResources

    try:
        run(launch, sizes_for(launch))
    except OutOfResources:  # Triton specialises on strides, and other strides may take more shared memory
        _chosen.pop(_kind(launch))
        run(launch, sizes_for(launch))


def start_on(x: Tensor, kernel: Any, grid: tuple[int, int], sizes: TileSizes, /, **arguments: Any) -> None:
    """Start a kernel with tile sizes of its own on the GPU and in the dtype of ``x``."""
    name = kernel.__name__.removesuffix("_kernel")
    with on_device(x):
        start(Launch(name, kernel, arguments, lambda _: grid, "", x.dtype, (sizes,)))


def run(launch: Launch, sizes: TileSizes) -> None:
    """Start a kernel with these tile sizes."""
    launch.kernel[launch.grid(sizes)](**launch.arguments, **options(sizes))


def sizes_for(launch: Launch) -> TileSizes:
    """Return the first tile sizes of a launch that the GPU has room for."""
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
    """Return the key under which tile sizes are remembered."""
    present = kinds(launch.arguments)
    return id(launch.kernel), launch.fixed, launch.dtype, torch.cuda.current_device(), present


def options(sizes: TileSizes) -> dict[str, Any]:
    """Return the keywords of a launch.

    Fusing multiplications and additions is requested explicitly: exp2(s * log2(e) - m) then takes one.
    """
    fusion = {} if interpreted() else {"enable_fp_fusion": True}
    return {"M": sizes.rows, "N": sizes.keys, "num_warps": sizes.warps, "num_stages": sizes.stages, **fusion}


def kinds(arguments: dict[str, Any]) -> str:
    """Return a text that tells which of the optional tensors are present."""

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
    target, bits = architecture(torch.cuda.current_device()), 8 * launch.dtype.itemsize
    return candidates(launch.name, target, launch.width, bits, is_costly(launch.formula))


def compiled(launch: Launch, sizes: TileSizes) -> Any:
    """Return the kernel, compiled and loaded; None if the GPU has no room for tiles of this size."""
    from triton.runtime.errors import OutOfResources

    try:
        kernel = launch.kernel.warmup(**launch.arguments, **options(sizes), grid=launch.grid(sizes))
        kernel._init_handles()  # loads the code, which raises if shared memory or registers do not suffice
    except OutOfResources:
        return None
    except Exception as error:  # whatever one of the compilers raises
        raise CannotCompileError(one_line(error)) from error
    return kernel


@cache
def architecture(device: int) -> str:
    """Return the architecture of a GPU: "sm_90", "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
