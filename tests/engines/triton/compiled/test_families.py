"""Linear attention and Gaussian matrices compiled for real, and their PTX for sm_80 executed."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.engines.triton.compiled.ahead import compile_launch, pretending  # noqa: E402
from tests.engines.triton.compiled.emulate import emulated  # noqa: E402
from tests.engines.triton.compiled.resources import resources  # noqa: E402
from tests.engines.triton.linear_definition import errors, example  # noqa: E402
from tests.engines.triton.parity import LIMIT  # noqa: E402
from unsoft.engines.triton import chunks, gaussian, recurrence  # noqa: E402
from unsoft.engines.triton.tile_sizes import TileSizes  # noqa: E402

pytestmark = pytest.mark.gpu_check
TARGETS = ["sm_80", "sm_90", "gfx942"]
SMALL = TileSizes(32, 32, 2, 1)


def linear_kernels(target, *, width, decays, dtype=torch.float32, rough=False, causal=True, heads=8):
    """All launches of a forward and a backward pass, none of which runs."""
    found = []
    shape = {"width": width, "value_width": width, "heads": heads, "kv_heads": 2, "decays": decays}
    given = example(length=256, dtype=dtype, state=True, **shape)
    leaves = {name: x if x is None else x.requires_grad_() for name, x in given.items()}
    with pretending(target, found.append):
        out, after = recurrence.recurrence(**leaves, causal=causal, normalise=True, rough=rough)
        (out.sum() + after.sum()).backward()
    return found


def gaussian_kernels(target, *, width, dtype=torch.float32):
    found = []
    x, u = torch.zeros(4, 256, width, dtype=dtype), torch.zeros(4, 3, 256, dtype=dtype)
    with pretending(target, found.append):
        for most in (0, gaussian.STORED):
            z = gaussian.TiledGaussian(x, torch.ones(4, 256, dtype=torch.bool), u[:, 0], most=most)
            z.product(u[:, 0])
            z.gradient(u, u)
        gaussian.between(x, x)
    return found


def compiled(launches, target):
    with pretending(target, None):
        for made in launches:
            yield made, resources(compile_launch(made, made.sizes[0]))


@pytest.mark.parametrize(("decays", "rough"), [(True, True), (False, False)])
@pytest.mark.parametrize("target", TARGETS)
def test_linear_attention_compiles_without_spilling(target, decays, rough):
    names = []
    for made, used in compiled(linear_kernels(target, width=64, decays=decays, rough=rough), target):
        names.append(made.name)
        assert used.matrix and used.shared <= used.shared_limit, made.name
        assert not used.spills_in_loops, made.name
    assert names == ["state", "chunk", "state", "state", *["chunk"] * 3, *["decay"] * decays]


@pytest.mark.parametrize("options", [{"width": 80, "causal": False}, {"dtype": torch.float64}], ids=str)
def test_other_calls_of_linear_attention_compile(options):
    options = {"width": 64, "decays": False} | options
    for made, used in compiled(linear_kernels("sm_80", **options), "sm_80"):
        assert used.shared <= used.shared_limit, made.name


@pytest.mark.parametrize(
    ("target", "dtype"), [*((target, torch.float32) for target in TARGETS), ("sm_80", torch.float64)]
)
def test_gaussian_matrices_compile_without_spilling(target, dtype):
    for made, used in compiled(gaussian_kernels(target, width=64, dtype=dtype), target):
        assert used.shared <= used.shared_limit, made.name
        assert not used.spilled, made.name


@pytest.mark.parametrize("rough", [True, False])
def test_linear_attention_is_executed(rough, monkeypatch):
    """In TF32, and in three products of it; the latter with a decay and a state before."""
    for kind in chunks.SIZES:
        monkeypatch.setitem(chunks.SIZES, kind, SMALL)
    run, shape = partial(recurrence.recurrence, rough=rough), {"batch": 1, "width": 40, "value_width": 24}
    given = example(length=40, decays=not rough, state=not rough, dtype=torch.float32, **shape)
    with emulated(SMALL) as done:
        found = errors(run, given, torch.float32, causal=True, normalise=True)
    assert max(found) < LIMIT[torch.float16 if rough else torch.float32], [f"{x:.1e}" for x in found]
    assert done == ["state", "chunk", "state", "state", *["chunk"] * 3, *["decay"] * (not rough)]


def test_gaussian_matrices_are_executed(monkeypatch):
    monkeypatch.setitem(gaussian.SIZES, False, SMALL)
    monkeypatch.setattr(gaussian, "GRADIENT_SIZES", SMALL)
    torch.manual_seed(0)
    x, u, v = torch.randn(1, 40, 5) / 2, torch.randn(1, 3, 40), torch.randn(1, 3, 40)
    exact = x.double().requires_grad_()
    matrix = (-(exact[:, :, None] - exact[:, None]).square().sum(-1)).exp()
    (slope,) = torch.autograd.grad((u.double() * (v.double() @ matrix)).sum(), exact)
    for most in (0, gaussian.STORED):
        with emulated(SMALL) as done:
            z = gaussian.TiledGaussian(x, None, u[:, 0], most=most)
            product, gradient = z.product(u[:, 0]), z.gradient(u, v)
        expected = (matrix.detach() @ u[:, 0].double()[..., None])[..., 0]
        for found in (z.first_product, product):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-5)
        assert done == ["gaussian_product", "gaussian_product", "gaussian_gradient"]
