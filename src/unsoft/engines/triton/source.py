"""The kernels of one formula: the generated functions, written to the cache folder since Triton reads the
source of functions from files, and copies of the kernel modules that see them."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from unsoft.cache_dir import cache_directory, trusted_folder
from unsoft.engines.triton.codegen import formula_source
from unsoft.files import write_whole
from unsoft.formula import Formula

_KERNEL = Path(__file__).parent / "kernel"
_PACKAGE = f"{__package__}.kernel"


class Kernels(NamedTuple):
    """Functions that Triton compiles when they are launched."""

    forward: Any
    query_gradients: Any
    key_gradients: Any
    decode: Any
    combine: Any


@lru_cache(maxsize=256)
def kernels(formula: str, biased: bool) -> Kernels:
    """Of a formula's key; ``biased``: for calls with an additive mask."""
    text = formula_source(Formula.from_key(formula), biased)
    name = f"formula_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    names = public_names(_imported(f"{_PACKAGE}.{name}", _written(name, text), {}))
    for shared in ("symbols", "sums", "slopes"):
        names |= public_names(_imported(f"{_PACKAGE}.{name}.{shared}", _KERNEL / f"{shared}.py", names))

    def kernel(file: str, function: str) -> Any:
        return getattr(_imported(f"{_PACKAGE}.{name}.{file}", _KERNEL / f"{file}.py", names), function)

    return Kernels(
        kernel("forward", "forward_kernel"),
        kernel("query_gradients", "query_kernel"),
        kernel("key_gradients", "key_kernel"),
        kernel("decode", "decode_kernel"),
        kernel("decode", "combine_kernel"),
    )


def public_names(module: ModuleType) -> dict[str, Any]:
    """The functions and constants of a module."""
    return {name: x for name, x in vars(module).items() if not name.startswith("__")}


def generated_folder() -> Path:
    """Where the functions of formulas are kept."""
    return cache_directory() / "triton"


def _written(name: str, text: str) -> Path:
    folder = trusted_folder(generated_folder(), ("",))
    path = folder / f"{name}.py"
    if not path.is_file() or path.read_text() != text:
        write_whole(path, text.encode())
    return path


def _imported(name: str, path: Path, names: dict[str, Any]) -> ModuleType:
    """A module of its own from a file, which finds ``names`` among its globals."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
