"""The engines that run a formula."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines import sdpa, tiled
from unsoft.engines.call import Call
from unsoft.engines.dense import dense_attention
from unsoft.engines.native import availability, binding
from unsoft.engines.operator import fused_operator
from unsoft.engines.registry import Engine, Registry
from unsoft.engines.triton import availability as gpu
from unsoft.engines.triton import binding as triton_binding

SMALL = 1 << 14
"""Up to this many weights one dense evaluation takes fewer torch calls than a walk over tiles."""


def no_transforms(call: Call | None = None) -> str | None:
    """Why a fused operator cannot run here, if so: its derivative is an operator too, not a torch program."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return (
            "fused operators have no rules for torch.func transforms such as vmap and jvp; use engine='dense'"
        )
    if torch.compiler.is_exporting():
        return "an exported program must run where unsoft is not installed; use engine='dense'"
    if torch.autograd.forward_ad._current_level >= 0:
        return "fused operators have no forward-mode derivative; use engine='dense'"
    return None


def native_unsupported(call: Call) -> str | None:
    """Why compiled code cannot run a call, if so."""
    if call.q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {call.q.device}; use 'tiled' there"
    return no_transforms(call)


def _native_unavailable(call: Call) -> str | None:
    return availability.formula_failure(call.formula.key, call.q.dtype == torch.float64)


def _triton_unsupported(call: Call) -> str | None:
    return gpu.unsupported(call) or no_transforms(call)


def _triton_unavailable(call: Call) -> str | None:
    return gpu.unavailable(call.q.device.type, call.q.device.index)


def _on_gpu(call: Call) -> bool:
    return call.q.device.type != "cpu"  # there Triton has an interpreter, for tests alone


def _sdpa_unsupported(call: Call) -> str | None:
    return no_transforms(call) or sdpa.unsupported(call)


def _is_large(call: Call) -> bool:
    return call.q.shape[:3].numel() * call.k.shape[2] > SMALL


def _never_unsupported(call: Call) -> None:
    return None


def _dense(call: Call) -> Tensor:
    return dense_attention(call)[0]


POINTWISE: Registry[Call, Tensor] = Registry(
    [
        Engine(
            "triton",
            _triton_unsupported,
            fused_operator("triton", triton_binding.forward, triton_binding.backward),
            pays=_on_gpu,
            unavailable=_triton_unavailable,
        ),
        Engine(
            "native",
            native_unsupported,
            fused_operator("native", binding.forward, binding.backward),
            unavailable=_native_unavailable,
        ),
        Engine("sdpa", _sdpa_unsupported, sdpa.run),
        Engine(
            "tiled", no_transforms, fused_operator("tiled", tiled.forward, tiled.backward), pays=_is_large
        ),
        Engine("dense", _never_unsupported, _dense),
    ],
)
"""All engines for formulas, the preferred ones first."""
