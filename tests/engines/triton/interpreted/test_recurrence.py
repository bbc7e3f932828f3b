"""Linear attention by kernels, in the strict interpreter: output, state and every gradient against the
definition in float64."""

from functools import partial

import pytest
import torch

import unsoft
from tests.engines.triton.linear_definition import errors, example
from tests.engines.triton.parity import LIMIT
from unsoft.engines.triton import launch, recurrence
from unsoft.engines.triton.tile_sizes import TileSizes

pytestmark = pytest.mark.gpu_check
ROUGH = LIMIT[torch.float16]  # which has as many digits as TF32


def check(dtype=torch.float64, *, causal=True, normalise=True, limit=None, rough=False, **shape):
    run = partial(recurrence.recurrence, rough=rough)
    found = errors(run, example(dtype=dtype, **shape), dtype, causal=causal, normalise=normalise)
    assert max(found) < (limit or LIMIT[dtype]), [f"{x:.1e}" for x in found]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_causal(normalise, decays, state):
    check(length=20, normalise=normalise, decays=decays, state=state)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_bidirectional(normalise, state):
    check(length=5, keys=20, causal=False, normalise=normalise, state=state)


@pytest.mark.parametrize(("length", "width"), [(1, 128), (65, 80), (65, 128), (129, 64), (257, 64)])
def test_borders_of_chunks_of_the_size_that_is_shipped(length, width, monkeypatch):
    monkeypatch.setattr(recurrence, "INTERPRETED_SIZES", recurrence.SIZES["rough"])
    check(
        torch.float32,
        length=length,
        width=width,
        value_width=width,
        decays=length != 129,
        state=length in (1, 129),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("decays", [True, False])
def test_heads(heads, kv_heads, decays):
    check(length=20, heads=heads, kv_heads=kv_heads, decays=decays, state=True)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=str)
def test_tile_sizes(sizes, monkeypatch):
    monkeypatch.setattr(recurrence, "INTERPRETED_SIZES", TileSizes(*sizes, 4, 1))
    check(length=40, width=40, value_width=20, decays=True, state=True)


def test_rough_products_have_the_digits_of_tf32():
    shape = {"length": 20, "width": 64, "decays": True, "state": True}
    check(torch.float32, rough=True, limit=ROUGH, **shape)
    with pytest.raises(AssertionError):
        check(torch.float32, rough=True, **shape)


def test_a_decay_that_forgets_all_at_once():
    """d = 0: d^0 is 1, and nothing is NaN."""
    given = example(length=20, dtype=torch.float64, decays=True) | {"decay": torch.zeros(2).double()}
    out, _ = recurrence.recurrence(**given, causal=True, normalise=True)
    values = given["v"].repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, values)


def test_a_row_without_weights_is_zero():
    given = example(length=20, dtype=torch.float64)
    given["q"][:, :, 7] = 0
    given = {name: x if x is None else x.requires_grad_() for name, x in given.items()}
    out, _ = recurrence.recurrence(**given, causal=True, normalise=True)
    assert not out[:, :, 7].any() and out[:, :, 8].all()
    gradient = torch.autograd.grad(out.sum(), [given["q"], given["k"], given["v"]])
    assert all(bool(x.isfinite().all()) for x in gradient)


NAMES = ["linear-relu", "linear-elu1", "linear-identity", "linear-taylor2", "cosformer", "retention"]
THEMES = ["parity", "gradients", "causality", "decoding", "masking", "edges", "nonfinite", "dtypes"]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", NAMES)
def test_battery(name, theme):
    unsoft.testing.check_mechanism(name, engines=["triton"], quick=True, only=theme)


def test_the_kernels_really_run():
    """What the battery found equal did not come from torch operations."""
    seen, q = [], torch.rand(1, 2, 20, 8, requires_grad=True)
    assert recurrence.kernels_ready("cpu", None, torch.float32)  # which runs them too, the first time
    with launch.watched(lambda made: seen.append(made.name)):
        unsoft.attention(q, q, q, "cosformer", is_causal=True, engine="triton").sum().backward()
    assert seen == ["state", "chunk", "state", "state", "chunk", "chunk", "chunk"]


@pytest.mark.parametrize("decays", [True, False])
def test_operator(decays):
    given = example(length=20, dtype=torch.float32, decays=decays, state=True)
    leaves = [x if x is None else x.requires_grad_() for x in given.values()]
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    options = {"causal": True, "normalise": True, "rough": False}
    torch.library.opcheck(torch.ops.unsoft.triton_recurrence.default, leaves, options, test_utils=tests)


def test_compiled_by_torch():
    q, k, v = (torch.rand(1, 2, 20, 8) for _ in range(3))
    layer = unsoft.mechanism("linear-relu", heads=2, head_dim=8)

    def attend(q, k, v):
        return 2 * layer(q, k, v, is_causal=True, engine="triton")

    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, attend(q, k, v))
