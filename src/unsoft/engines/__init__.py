"""The engines and how one is chosen.

An engine is a name, a function that returns why a call is unsupported (or None), and a function from a
checked call to output (:mod:`unsoft.engines.registry`). All engines of one kind give the same result; they
differ in speed, memory and supported calls. For formulas (:mod:`unsoft.engines.pointwise`):

    triton  generated from the formula, GPU  NVIDIA and AMD, wherever Triton is installed; linear memory
    native  C++ from the formula, CPU        the fastest wherever there is a compiler; linear memory
    sdpa    PyTorch's fused kernel           softmax on finite inputs without masks
    tiled   torch operations                 any device; linear memory
    dense   torch operations                 the specification; any derivative and transform; quadratic memory
"""

from unsoft.engines.call import Call
from unsoft.engines.pointwise import POINTWISE
from unsoft.engines.registry import Engine, Registry

__all__ = ["POINTWISE", "Call", "Engine", "Registry", "check_name", "engine_names"]


def engine_names() -> list[str]:
    """Return the names that the argument ``engine`` accepts.

    >>> engine_names()
    ['auto', 'triton', 'native', 'sdpa', 'tiled', 'dense']
    """
    return POINTWISE.names()


def check_name(name: str) -> None:
    """Raise ValueError or TypeError unless ``name`` is an engine."""
    POINTWISE.check(name)
