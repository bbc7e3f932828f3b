"""Start kernels, with the first tile sizes that the GPU has room for: a table found by compiling for each
architecture. Also the arguments that all kernels take in the same form."""

import json
import math
import os
import struct
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.engines.triton.structures import Fixed, View
from unsoft.errors import one_line
from unsoft.formula import Formula
from unsoft.formula.expr import postorder


class TileSizes(NamedTuple):
    """Rows and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


KERNELS = ("forward", "query_gradients", "key_gradients")
_TABLE = Path(__file__).parent / "tile_sizes.json"
SMALLEST = TileSizes(16, 16, 4, 1)
EXACT = {False: TileSizes(16, 32, 4, 1), True: SMALLEST}
"""Tile sizes of exact kernels (see ``Fixed.exact``), by whether heads are wider than 128. They rarely run. No
other kernel may have fewer rows in a tile: an exact kernel overwrites the partial sums of the fast one, which
are stored by block of rows, so every block that the fast kernel wrote must be written again."""


COSTLY = frozenset({"erf", "expdiff", "expm1", "log1p", "softplus", "tanh", "sin", "cos", "sinh"})
"""Operations that take many instructions, so that a tile needs more registers."""


def candidates(
    kernel: str, architecture: str, width: int, bits: int, costly: bool = False
) -> list[TileSizes]:
    """Return tile sizes to try until one fits, largest first. ``bits``: size of an input number.

    >>> candidates("forward", "sm_90", 64, 16)[0].rows >= 64
    True

    A GPU that is not in the table gets the sizes of its nearest relative:

    >>> candidates("forward", "sm_89", 128, 16) == candidates("forward", "sm_80", 128, 16)
    True
    """
    known = _table()[_relative(architecture)]
    usual, special = known[kernel], known.get(f"{kernel}, costly", {})
    widest = str(min(w for w in map(int, usual) if w >= min(width, 256)))
    first = TileSizes(*(special.get(widest, usual[widest]) if costly else usual[widest]))
    for _ in range(bits // 32):  # the table is for 16 bits; numbers have twice or four times the bytes
        rows, keys, warps, stages = first
        first = TileSizes(max(rows // 2, 16), max(keys // 2, 16), warps, max(stages - 1, 1))
    sizes = [first]
    while sizes[-1] != SMALLEST:
        sizes.append(_smaller(sizes[-1]))
    return sizes


@cache
def is_costly(formula: str) -> bool:
    """Return True if the formula of a key has an operation that takes many instructions.

    >>> is_costly(Formula("tanh(s)/n").key), is_costly(Formula("max(s, 0)/n").key)
    (True, False)
    """
    tree = Formula.from_key(formula)
    parts = [part for part in (tree.weight, tree.mass, tree.peak) if part is not None]
    return any(node.op in COSTLY for node in postorder(*parts))


def _relative(architecture: str) -> str:
    """Return the architecture of the table with the longest common prefix: sm_80 for sm_89, gfx942 for
    gfx90a."""
    common = {name: len(commonprefix((name, architecture))) for name in _table()}
    nearest = max(common, key=lambda name: common[name])
    return nearest if common[nearest] >= len("sm_8") else "other"


def _smaller(sizes: TileSizes) -> TileSizes:
    rows, keys, warps, stages = sizes
    if stages > 1:
        return TileSizes(rows, keys, warps, stages - 1)
    if rows > 16 and rows >= keys:
        return TileSizes(rows // 2, keys, min(warps, 4), 1)
    return TileSizes(rows, max(keys // 2, 16), 4, 1)


@cache
def _table() -> dict[str, dict[str, dict[str, list[int]]]]:
    content: dict[str, dict[str, dict[str, list[int]]]] = json.loads(_TABLE.read_text())
    return content


Grid = Callable[[TileSizes], tuple[int, ...]]
INTERPRETED_SIZES = TileSizes(16, 16, 4, 1)
"""Small, so that small tests have several tiles."""
_chosen: dict[tuple[object, ...], TileSizes] = {}
_refused: dict[tuple[object, ...], str] = {}
"""Why a kernel cannot be compiled, so that the next call does not try again."""


class Launch(NamedTuple):
    """One kernel with its arguments."""

    name: str
    """The table has tile sizes for the names in :data:`KERNELS`."""
    kernel: Any
    arguments: dict[str, Any]
    grid: Grid
    formula: str
    dtype: torch.dtype
    sizes: tuple[TileSizes, ...] = ()
    """Tile sizes to try one after the other, for kernels that are not in the table."""
    prepare: Callable[[TileSizes], dict[str, Any]] | None = None
    """Computes arguments that depend on the tile sizes. Those in ``arguments`` only have their types."""

    def complete(self, sizes: TileSizes) -> dict[str, Any]:
        """Return the arguments for tiles of this size."""
        return self.arguments if self.prepare is None else self.arguments | self.prepare(sizes)

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


def flag_parts() -> int:
    """Return the programs of the kernel that prepares a call: two for each multiprocessor of most GPUs."""
    return 2 if interpreted() else 256


def on_device(x: Tensor) -> Any:
    """Make the tensor's GPU current, which is where Triton starts kernels."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


class KernelError(RuntimeError):
    """A kernel cannot be compiled or started on this GPU; the message is one line with its name and why."""


def start(launch: Launch) -> None:
    """Start a kernel and return without waiting for it. Raise KernelError if that fails."""
    if interpreted():
        run(launch, sizes_for(launch))
        return
    from triton.runtime.errors import OutOfResources

    try:
        try:
            run(launch, sizes_for(launch))
        except OutOfResources:  # Triton specialises on strides, and other strides may take more shared memory
            _chosen.pop(_kind(launch))
            run(launch, sizes_for(launch))
    except KernelError:
        raise
    except Exception as error:  # whatever the driver raises
        raise _failed(launch, one_line(error)) from error


def _failed(launch: Launch, reason: str) -> KernelError:
    return KernelError(f"kernel {launch.name}: {reason}")


def start_on(x: Tensor, kernel: Any, grid: tuple[int, int], sizes: TileSizes, /, **arguments: Any) -> None:
    """Start a kernel with tile sizes of its own on the GPU and in the dtype of ``x``."""
    name = kernel.__name__.removesuffix("_kernel")
    with on_device(x):
        start(Launch(name, kernel, arguments, lambda _: grid, "", x.dtype, (sizes,)))


def run(launch: Launch, sizes: TileSizes) -> None:
    """Start a kernel with these tile sizes."""
    launch.kernel[launch.grid(sizes)](**keywords(launch.complete(sizes), sizes))


def sizes_for(launch: Launch) -> TileSizes:
    """Return the first tile sizes of a launch that the GPU has room for."""
    if interpreted():
        return launch.sizes[0] if launch.sizes else INTERPRETED_SIZES
    key = _kind(launch)
    if key in _refused:
        raise KernelError(_refused[key])
    if key not in _chosen:
        try:
            _chosen[key] = _first_that_fits(launch)
        except KernelError as error:
            _refused[key] = str(error)
            raise
    return _chosen[key]


def _kind(launch: Launch) -> tuple[object, ...]:
    """Return the key under which tile sizes are remembered."""
    present = kinds(launch.arguments)
    return id(launch.kernel), launch.fixed, launch.dtype, torch.cuda.current_device(), present


def keywords(arguments: dict[str, Any], sizes: TileSizes) -> dict[str, Any]:
    """Return the keywords of a launch with tiles of this size.

    Fusing multiplications and additions is requested explicitly: exp2(s * log2(e) - m) then takes one.
    """
    fusion = {} if interpreted() else {"enable_fp_fusion": True}
    fixed = arguments["FIXED"]._replace(M=sizes.rows, N=sizes.keys)
    return {**arguments, "FIXED": fixed, "num_warps": sizes.warps, "num_stages": sizes.stages, **fusion}


def kinds(arguments: dict[str, Any]) -> str:
    """Return a text that tells which of the optional tensors are present."""

    def kind(x: Any) -> str:
        return "".join(map(kind, x)) if isinstance(x, tuple) else "t" if isinstance(x, Tensor) else "-"

    return "".join(kind(x) for x in arguments.values())


def _first_that_fits(launch: Launch) -> TileSizes:
    for sizes in _possible(launch):
        if compiled(launch, sizes) is not None:
            return sizes
    raise _failed(launch, "too few registers or too little shared memory even for the smallest tiles")


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
        kernel = launch.kernel.warmup(**keywords(launch.arguments, sizes), grid=launch.grid(sizes))
        kernel._init_handles()  # loads the code, which raises if shared memory or registers do not suffice
    except OutOfResources:
        return None
    except Exception as error:  # whatever one of the compilers raises
        raise _failed(launch, one_line(error)) from error
    return kernel


@cache
def architecture(device: int) -> str:
    """Return the architecture of a GPU: "sm_90", "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def view(x: Tensor | None) -> View:
    """Return a tensor as kernels take it."""
    return View(None, ()) if x is None else View(x, x.stride())


def views(**tensors: Tensor | None) -> dict[str, View]:
    """Return tensors as kernels take them, by name."""
    return {name: view(x) for name, x in tensors.items()}


def fields_view(x: Tensor | None) -> View:
    """Return fields (F, B, H, rows), or their gradients, as a view (B, H, rows, F)."""
    return view(None if x is None else x.resolve_neg().permute(1, 2, 3, 0))


def padded(width: int) -> int:
    """Return the next power of two, at least 16, the smallest width of matrix instructions."""
    return max(16, 1 << (width - 1).bit_length())


def two_floats(x: float) -> tuple[float, float]:
    """Return two float32 whose sum is ``x``, since Triton passes numbers as float32.

    >>> high, low = two_floats(0.1)
    >>> high + low - 0.1
    0.0
    """
    # struct.pack raises OverflowError beyond the largest float32, 3.4e38.
    high: float = struct.unpack("f", struct.pack("f", x))[0] if abs(x) < 3e38 else math.copysign(3e38, x)
    return high, x - high


def precision(dtype: torch.dtype, rough: bool = False) -> str:
    """Return how matrices of float32 are multiplied, as tl.dot names it.

    TF32 only if the user allowed it for all of torch or ``rough`` says that it is enough. Otherwise three
    TF32 products, which together have the precision of float32. AMD multiplies float32 in hardware."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if rough or _tf32_is_allowed() else "tf32x3"


def _tf32_is_allowed() -> bool:
    """Return the user's choice by ``torch.set_float32_matmul_precision`` or the switch of torch >= 2.9. Once
    the latter was used, reading the former raises."""
    switch = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if switch is None else switch == "tf32"
