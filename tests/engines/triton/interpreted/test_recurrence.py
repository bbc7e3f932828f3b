"""Linear attention by kernels, in the strict interpreter: output, state and every gradient against the
definition in float64."""

from functools import partial
from itertools import product

import pytest
import torch

import unsoft
from tests.engines.triton.linear_definition import (
    errors,
    example,
    logarithmic_example,
    logarithms_written_out,
)
from tests.engines.triton.parity import LIMIT, started
from tests.mechanisms.test_linear import attend, draw, make, near
from unsoft.engines.triton import launch, logarithms, recurrence
from unsoft.engines.triton.launch import TileSizes

pytestmark = pytest.mark.gpu_check
ROUGH = LIMIT[torch.float16]  # which has as many digits as TF32


def check(dtype=torch.float64, *, causal=True, normalise=True, limit=None, rough=False, **shape):
    run = partial(recurrence.recurrence, rough=rough)
    off = errors(run, example(dtype=dtype, **shape), dtype, causal=causal, normalise=normalise)
    assert max(off) < (limit or LIMIT[dtype]), [f"{x:.1e}" for x in off]


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
    monkeypatch.setattr(launch, "INTERPRETED_SIZES", recurrence.SIZES["rough"])
    check(
        torch.float32,
        length=length,
        width=width,
        value_width=width,
        decays=length != 129,
        state=length in (1, 129),
    )


def check_logarithms(dtype=torch.float64, *, causal=True, limit=None, rough=False, **shape):
    options = {"causal": causal, "normalise": True, "logarithmic": True}
    run = partial(recurrence.recurrence, rough=rough)
    off = errors(run, logarithmic_example(dtype=dtype, **shape), dtype, logarithms_written_out, **options)
    assert max(off) < (limit or LIMIT[dtype]), [f"{x:.1e}" for x in off]


@pytest.mark.parametrize("size", [1.0, 500.0])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_logarithms_of_features_of_any_size(size, state, causal):
    """exp(1000) alone would overflow, and exp(-1000) beside it vanish."""
    check_logarithms(length=40, size=size, state=state, causal=causal, heads=4, kv_heads=2)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_logarithms_in_float32(size):
    check_logarithms(torch.float32, length=37, size=size, state=True, width=20, value_width=24)


def test_logarithms_in_chunks_of_the_size_that_is_shipped(monkeypatch):
    sizes = recurrence.SIZES["float32"]._replace(rows=logarithms.SIZES.rows)
    monkeypatch.setattr(launch, "INTERPRETED_SIZES", sizes)
    check_logarithms(torch.float32, length=65, size=5.0, state=True, batch=1, width=40, value_width=40)


def test_a_large_key_does_not_hide_smaller_ones_from_rows_that_do_not_see_it():
    """All of one chunk: the last key is exp(300) times the others."""
    given = logarithmic_example(length=10, size=1.0, dtype=torch.float32)
    given["k"][:, :, -1] += 300
    out, _ = recurrence.recurrence(**given, causal=True, normalise=True, logarithmic=True)
    options = {"causal": True, "normalise": True, "logarithmic": True}
    exact = {name: x if x is None else x.double() for name, x in given.items()}
    expected, _ = logarithms_written_out(**exact, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("decays", [True, False])
def test_heads(heads, kv_heads, decays):
    check(length=20, heads=heads, kv_heads=kv_heads, decays=decays, state=True)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=str)
def test_tile_sizes(sizes, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED_SIZES", TileSizes(*sizes, 4, 1))
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


NAMES = [
    "linear-relu",
    "linear-elu1",
    "linear-identity",
    "linear-taylor2",
    "linear-exp",
    "performer(12)",
    "cosformer",
    "retention",
]
CALLS = {
    "causal": (20, 20, True, False),
    "more keys": (5, 20, "lower_right", True),
    "more queries": (20, 5, "lower_right", False),
    "bidirectional": (5, 20, False, True),
}


@pytest.mark.parametrize(
    ("name", "call"),
    [pair for pair in product(NAMES, CALLS) if pair != ("retention", "bidirectional")],  # it looks back only
)
def test_mechanisms(name, call):
    """Against the definition of each, in float64, with keys that are masked."""
    length, keys, alignment, padding = CALLS[call]
    layer = make(name, dtype=torch.float64)
    q, k, v = draw(layer, length, keys, kv_heads=1, dtype=torch.float64, batch=1)
    mask = torch.arange(keys).view(1, 1, 1, -1) != 3 if padding else None
    offset = {True: 0, False: None, "lower_right": keys - length}[alignment]
    expected = attend(name, layer, q, *(x.expand(-1, 2, -1, -1) for x in (k, v)), visible=mask, offset=offset)
    actual = layer(q, k, v, mask, is_causal=alignment, enable_gqa=True, engine="triton")
    near(actual, expected, 1e-12, v)


@pytest.mark.parametrize("name", ["linear-identity", "linear-exp", "performer(12)", "cosformer", "retention"])
def test_pieces_after_a_cache(name):
    layer = make(name, dtype=torch.float64)
    q, k, v = draw(layer, 21, dtype=torch.float64, batch=1)
    cache = layer.new_cache(1)
    parts = zip(*(x.split([1, 18, 2], dim=2) for x in (q, k, v)), strict=True)
    actual = torch.cat([layer(*part, cache=cache, engine="triton") for part in parts], dim=2)
    near(actual, attend(name, layer, q, k, v, offset=0), 1e-12, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    """Output and gradients, the learned decay's too, against dense float64."""
    layer = make("retention", learnable=True)
    q, k, v = draw(layer, 20, dtype=dtype, batch=1)
    results = []
    for engine, kind in (("triton", dtype), ("dense", torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        out = layer.to(torch.float64 if kind == torch.float64 else torch.float32)(
            *leaves, is_causal=True, engine=engine
        )
        gradients = torch.autograd.grad(out.sum(), [*leaves, layer.logit])
        results.append([x.detach().double() for x in (out, *gradients)])
        assert out.dtype == kind
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    assert max(errors) < LIMIT[dtype], errors


def test_nan_and_inf():
    layer = make("linear-elu1", dtype=torch.float64)
    q, k, v = draw(layer, 20, dtype=torch.float64, batch=1)
    q[0, 0, 3, 1], k[0, 1, 9, 0], v[0, 0, 12, 2] = torch.nan, torch.inf, -torch.inf
    actual, exact = (layer(q, k, v, is_causal=True, engine=engine) for engine in ("triton", "dense"))
    torch.testing.assert_close(actual, exact, equal_nan=True)


def test_the_kernels_really_run():
    """The results compared above came from kernels, not from torch operations."""
    q = torch.rand(1, 2, 20, 8, requires_grad=True)
    assert recurrence.kernels_failure("cpu", None, torch.float32) is None  # runs them too, the first time
    with started() as seen:
        unsoft.attention(q, q, q, "cosformer", is_causal=True, engine="triton").sum().backward()
    assert seen == ["state", "chunk", "state", "state", "chunk", "chunk", "chunk"]


@pytest.mark.parametrize("decays", [True, False])
def test_operator(decays):
    given = example(length=20, dtype=torch.float32, decays=decays, state=True) | {
        "weights": None,
        "kept": None,
    }
    leaves = [x if x is None else x.requires_grad_() for x in given.values()]
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    options = {"causal": True, "normalise": True, "rough": False}
    torch.library.opcheck(torch.ops.unsoft.triton_recurrence.default, leaves, options, test_utils=tests)


def test_operators_of_logarithms():
    given = example(length=20, dtype=torch.float32)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    tops = torch.full((2, 2, 20, 1), 3.0)
    torch.library.opcheck(torch.ops.unsoft.triton_pairs.default, (q, k, tops), {"size": 16}, test_utils=tests)
    weights, kept = torch.rand(2, 2, 20, 16, requires_grad=True), torch.rand(2, 1, 2, 8)
    options = {"causal": True, "normalise": True, "rough": False}
    given = (q, k, v, None, None, weights, kept)
    torch.library.opcheck(torch.ops.unsoft.triton_recurrence.default, given, options, test_utils=tests)


@pytest.mark.parametrize("name", ["linear-relu", "linear-exp"])
def test_compiled_by_torch(name):
    q, k, v = (torch.rand(1, 2, 20, 8) for _ in range(3))
    layer = unsoft.mechanism(name, heads=2, head_dim=8)

    def attend(q, k, v):
        return 2 * layer(q, k, v, is_causal=True, engine="triton")

    actual = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(actual, attend(q, k, v))
