"""The engines and how one is chosen.

An engine is a name, a question ("do you support this call?", answered by None or by the reason why not) and a function
from :class:`Call` to output. All engines give the same result; they differ in speed, memory and what they can do.

    native  C++ made from the formula, CPU     the fastest wherever a compiler is found; linear memory
    sdpa    PyTorch's fused kernel             softmax on finite inputs without masks
    tiled   torch operations                   any device; linear memory
    dense   torch operations                   the specification; any derivative and transform; quadratic memory
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.engines import fused_softmax, tiled
from unsoft.engines.call import Call
from unsoft.engines.dense import dense_attention
from unsoft.engines.native import availability, binding
from unsoft.engines.operator import fused_operator

__all__ = ["ENGINES", "Call", "Engine", "check_name", "choose", "engine_names"]

SMALL = 1 << 14
"""Up to this many weights one dense evaluation takes fewer torch calls than a walk over tiles."""


def _always(call: Call) -> bool:
    return True


@dataclass(frozen=True)
class Engine:
    """One way of computing a call."""

    name: str
    supports: Callable[[Call], str | None]
    """None if the engine can run the call, otherwise the reason why not."""
    run: Callable[[Call], Tensor]
    pays: Callable[[Call], bool] = _always
    """Would ``auto`` want it for this call, if it is the first that supports it?"""
    ready: Callable[[Call], bool] = _always
    """Could everything it needs be prepared? If not, a warning has been given and the tiled engine takes over."""


def no_transforms(call: Call) -> str | None:
    """Why a fused operator cannot run here, if so: its derivative is an operator too, not a torch program."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return (
            "fused operators have no rules for torch.func transforms such as vmap and jvp; use engine='dense'"
        )
    if torch.autograd.forward_ad._current_level >= 0:
        return "fused operators have no forward-mode derivative; use engine='dense'"
    return None


def _native_unsupported(call: Call) -> str | None:
    if call.q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {call.q.device}; use 'tiled' there"
    return no_transforms(call)


def _native_ready(call: Call) -> bool:
    return availability.ready(call.formula.key, call.q.dtype == torch.float64)


def _large(call: Call) -> bool:
    return call.q.shape[:3].numel() * call.k.shape[2] > SMALL


ENGINES: list[Engine] = [
    Engine(
        "native",
        _native_unsupported,
        fused_operator("native", binding.forward, binding.backward),
        ready=_native_ready,
    ),
    Engine("sdpa", lambda call: no_transforms(call) or fused_softmax.unsupported(call), fused_softmax.run),
    Engine("tiled", no_transforms, fused_operator("tiled", tiled.forward, tiled.backward), pays=_large),
    Engine("dense", lambda call: None, lambda call: dense_attention(call)[0]),
]
"""All engines, the preferred ones first: ``auto`` takes the first that supports the call, pays and is ready."""


_NAMES = ("auto", *(engine.name for engine in ENGINES))


def engine_names() -> list[str]:
    """The names that the argument ``engine`` accepts.

    >>> engine_names()
    ['auto', 'native', 'sdpa', 'tiled', 'dense']
    """
    return list(_NAMES)


def choose(name: str, call: Call) -> Engine:
    """The engine called ``name``, or for "auto" the fastest one that supports the call."""
    check_name(name)
    if name == "auto":
        return next(e for e in ENGINES if e.supports(call) is None and e.pays(call) and e.ready(call))
    engine = _by_name(name)
    if reason := engine.supports(call):
        raise ValueError(f"attention: argument 'engine': {name!r} does not support this call: {reason}")
    return engine if engine.ready(call) else _by_name("tiled")


def _by_name(name: str) -> Engine:
    return next(engine for engine in ENGINES if engine.name == name)


def check_name(name: str) -> None:
    """ValueError or TypeError unless ``name`` is an engine."""
    if type(name) is str and name in _NAMES:
        return
    if not isinstance(name, str):
        raise TypeError(f"attention: argument 'engine' must be a name, not {type(name).__name__}")
    if name not in engine_names():
        near = difflib.get_close_matches(name, engine_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"attention: argument 'engine': unknown name {name!r}{hint} (known: {', '.join(engine_names())})"
        )
