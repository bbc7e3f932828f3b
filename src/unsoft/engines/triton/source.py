"""The kernels of one formula as one Python module: functions and constants printed by codegen.py, followed by
the kernels of kernel/forward.py and kernel/backward.py. The module is written to the cache folder, because
Triton reads the source of functions from files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from unsoft.cache_dir import cache_directory, trusted_folder
from unsoft.engines.triton.codegen import formula_source
from unsoft.files import write_whole
from unsoft.formula import Formula

_KERNELS = Path(__file__).parent / "kernel"


def render(formula: Formula, biased: bool) -> str:
    """Return the source of the module; ``biased``: for calls with an additive mask.

    >>> text = render(Formula("exp(s - m)", "exp(s - m)", "s"), biased=False)
    >>> "HAS_PEAK = tl.constexpr(True)" in text and "def forward_kernel(" in text
    True
    """
    kernels = [(_KERNELS / name).read_text() for name in ("forward.py", "backward.py")]
    return "\n\n".join([formula_source(formula, biased), *kernels])


@lru_cache(maxsize=256)
def kernels(formula: str, biased: bool) -> ModuleType:
    """Return the imported module of a formula's key, with the functions ``forward_kernel``,
    ``query_gradients_kernel``, ``key_gradients_kernel``, ``decode_kernel`` and ``combine_kernel``."""
    text = render(Formula.from_key(formula), biased)
    name = f"formula_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    path = trusted_folder(generated_folder(), ("",)) / f"{name}.py"
    if not path.is_file() or path.read_text() != text:
        write_whole(path, text.encode())
    spec = importlib.util.spec_from_file_location(f"{__package__}.kernel.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def generated_folder() -> Path:
    """Return the folder of the rendered modules."""
    return cache_directory() / "triton"
