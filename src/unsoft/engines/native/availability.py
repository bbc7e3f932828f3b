"""Can the native engine run a formula here? Finding out means compiling it; failure is said once, clearly."""

from __future__ import annotations

import warnings

import torch

from unsoft.engines.native.binding import kernel
from unsoft.engines.native.compiler import CompilationError
from unsoft.errors import CompilerWarning

_failed: dict[tuple[str, bool], str] = {}


def ready(formula: str, double: bool) -> bool:
    """True if the formula (its key) is compiled for float32, or float64 if ``double``; else warns once and says False.

    After a failure the same reason is not tried, nor reported, again in this process.
    """
    if (formula, double) in _failed:
        return False
    try:
        kernel(formula, torch.float64 if double else torch.float32)
    except CompilationError as error:
        if str(error) not in _failed.values():
            text = f"unsoft's native engine is not available ({error}); the same results are computed by a slower engine"
            warnings.warn(text, CompilerWarning, stacklevel=2)
        _failed[formula, double] = str(error)
        return False
    return True


# As torch.compiler.assume_constant_result does, without importing all of dynamo: a traced caller asks once, while traced.
ready._dynamo_marked_constant = True
