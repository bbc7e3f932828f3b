"""The fused engines are operators that PyTorch knows completely: schema, shapes for tracing, autograd."""

import pytest
import torch

import unsoft

OWN = unsoft.Formula("b*exp(s - m)/n", "exp(s - m)", "s", params={"b": 1.5})


def arguments(make_call, kind, dtype):
    options = {
        "plain": {},
        "everything": {"mask": (2, 1, 7, 9), "bias": (1, 4, 7, 9), "causal": 2, "dropout": 0.3},
    }
    return make_call(OWN if kind == "everything" else "cog", dtype=dtype, **options[kind]).flat()


@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ["native", "tiled"])
def test_forward_operator(make_call, engine, dtype, kind):
    tensors, options = arguments(make_call, kind, dtype)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if dtype == torch.float32:
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.unsoft, engine).default, tensors, options, test_utils=tests)


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("engine", ["native", "tiled"])
def test_backward_operator(make_call, engine, kind, needed):
    tensors, options = arguments(make_call, kind, torch.float32)
    tensors = [None if x is None else x.detach() for x in tensors]
    saved = getattr(torch.ops.unsoft, engine).default(*tensors, **options)
    need = {"need_bias": needed and tensors[4] is not None, "need_params": needed}
    need |= {"need_query_fields": False, "need_key_fields": False}
    torch.library.opcheck(
        getattr(torch.ops.unsoft, f"{engine}_backward").default,
        (torch.randn_like(saved[0]), *tensors, *saved),
        options | need,
        test_utils=["test_schema", "test_faketensor"],
    )
