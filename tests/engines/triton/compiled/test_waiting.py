"""Calls on fake tensors of a GPU: ``auto`` selects the GPU engine, and nothing reads a number, which would
wait for the GPU and could not be captured in a CUDA graph."""

from contextlib import nullcontext

import pytest
import torch

from tests.engines.triton.parity import SHARP
from unsoft.engines import POINTWISE
from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Upstream
from unsoft.engines.triton import availability, binding
from unsoft.engines.triton.codegen import kernels
from unsoft.formula import Formula
from unsoft.mechanisms import resolve

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.engines.triton.compiled.ahead import pretending  # noqa: E402

pytestmark = pytest.mark.gpu_check
FADING = Formula(
    "exp(s + c_i - c_j - m)", "exp(s + c_i - c_j - m)", "s + c_i - c_j", fields={"c": "query+key"}
)
CALLS = {
    "plain": {},
    "causal, masked, dropout": {"is_causal": True, "mask": torch.bool, "dropout_p": 0.2},
    "float mask": {"mechanism": "softmax", "mask": torch.float32},
    "count": {"mechanism": "relu2", "is_causal": "lower_right", "mask": torch.bool},
    # Indexing is refused on tensors that pretend to be on a GPU; these are on the CPU, without numbers too.
    "parameter": {"mechanism": SHARP, "params": {"tau": 2.0}, "device": "cpu"},
    "fields": {"mechanism": FADING, "keys": 40, "field": True, "device": "cpu"},
    "one query": {"queries": 1, "keys": 4000},
    "window": {"is_causal": True, "window": (8, 0), "keys": 40, "device": "cpu"},
}


class OneDevice(TorchDispatchMode):
    """Raise an error for copies between a GPU and the CPU, for which a call would wait."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        given = [x for x in arguments if isinstance(x, torch.Tensor)]
        made = [result] if isinstance(result, torch.Tensor) else []
        devices = {x.device.type for x in (*given, *made) if x.numel() > 1}
        assert len(devices) < 2, f"{function} copies between devices"
        return result


@pytest.fixture(params=["sm_80", "gfx942"])
def gpu(request, monkeypatch):
    """Allow tensors on "cuda" and collect launches."""
    # Rendering evaluates a formula's constants, once, on the CPU; on tensors without numbers it cannot.
    for formula in (*map(resolve, ("cog", "softmax", "relu2")), SHARP, FADING):
        for biased in (False, True):
            kernels(formula.key, biased)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 0))
    monkeypatch.setattr(availability, "failure", lambda device, index: None)
    monkeypatch.setattr(binding, "on_device", lambda x: nullcontext())
    # A torch without CUDA refuses this operator on such tensors.
    monkeypatch.setattr(torch.Tensor, "__invert__", lambda x: x == 0)
    launches = []
    with pretending(request.param, launches.append), FakeTensorMode(), OneDevice():
        yield launches


def arguments(*, mechanism="cog", queries=40, keys=50, mask=None, field=False, device="cuda", **options):
    q = torch.empty(2, 4, queries, 32, device=device, dtype=torch.bfloat16)
    k = torch.empty(2, 2, keys, 32, device=device, dtype=torch.bfloat16)
    if mask is not None:
        options["attn_mask"] = torch.empty(2, 1, queries, keys, device=device, dtype=mask)
    if field:
        options["fields"] = {"c": torch.empty(2, 4, queries, device=device)}
    formula = resolve(mechanism) if isinstance(mechanism, str) else mechanism
    return (q, k, k, formula), {"enable_gqa": True, **options}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits(gpu, name):
    given, options = arguments(**CALLS[name])
    call = checked_call(*given, **options)[0]
    rows = binding.forward(call)
    fields = (call.query_fields is not None, call.key_fields is not None)
    binding.backward(call, Upstream(rows.out, rows, call.bias is not None, True, *fields))
    assert {"query_gradients", "key_gradients"} <= {launch.name for launch in gpu}


def test_asking_for_a_number_is_found(gpu, monkeypatch):
    monkeypatch.setattr(binding, "_norm_names", lambda terms: bool(x.isfinite().all()))
    given, options = arguments()
    call = checked_call(*given, **options)[0]
    x, rows = call.q, binding.forward(call)
    with pytest.raises(DataDependentOutputException):
        binding.backward(call, Upstream(rows.out, rows, False, False))


def test_a_copy_is_found(gpu):
    with pytest.raises(AssertionError, match="between devices"):
        torch.empty(3, device="cuda").to("cpu")


def test_auto_takes_it(gpu):
    given, options = arguments(is_causal=True)
    assert POINTWISE.choose("auto", checked_call(*given, **options)[0]).name == "triton"
