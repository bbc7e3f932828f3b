"""Linear attention and Gaussian matrices compiled for real, and their PTX for sm_80 and sm_90 executed."""

from functools import partial
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tests.engines.triton.compiled.ahead import TARGETS  # noqa: E402
from tests.engines.triton.compiled.emulate import emulated  # noqa: E402
from tests.engines.triton.compiled.families import (  # noqa: E402
    FAMILIES,
    WIDTHS,
    committed,
    compiled,
    gaussian_kernels,
    linear_kernels,
    rows,
)
from tests.engines.triton.linear_definition import (  # noqa: E402
    errors,
    example,
    logarithmic_example,
    logarithms_written_out,
)
from tests.engines.triton.parity import LIMIT  # noqa: E402
from tests.engines.triton.targets import SHARED_KIB  # noqa: E402
from unsoft.engines.triton import gaussian, logarithms, recurrence  # noqa: E402
from unsoft.engines.triton.launch import TileSizes  # noqa: E402

pytestmark = pytest.mark.gpu_check
SMALL = TileSizes(32, 32, 2, 1)
KERNELS = {
    "decay, TF32": ["state", "chunk", "state", "state", *["chunk"] * 3, "decay"],
    "float32": ["state", "chunk", "state", "state", *["chunk"] * 3],
    "logarithms, TF32": [
        "pairs",
        *["state", "chunk", "state", "state", *["chunk"] * 3],
        *["pair_gradients"] * 2,
    ],
    "Gaussian": [
        *["gaussian_product", "gaussian_product", "gaussian_gradient"] * 2,
        *["gaussian_product", "gating", "gating"],
    ],
}
"""Kernels that a forward and a backward pass start."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spilling(target, family):
    """Compare with the committed table."""
    actual = rows(target, 64, family)
    assert actual == committed()[target, 64, family]
    fits(actual)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "width", "family"), committed())
def test_every_line_of_the_table(target, width, family):
    assert rows(target, width, family) == committed()[target, width, family]


def test_the_table_is_complete_and_nothing_is_spilled_in_a_loop():
    assert set(committed()) == set(product(TARGETS, WIDTHS, FAMILIES))
    fits([row for part in committed().values() for row in part])


def fits(lines):
    """Shared memory suffices, matrices are multiplied by matrix instructions, and nothing is spilled where it
    would cost time."""
    for row in lines:
        assert int(row["shared"]) <= SHARED_KIB[row["target"]] << 10, row
        assert not int(row["in_loops"]), row
        by_pairs = row["kernel"].startswith(("pair", "gaussian_product", "gating"))
        assert bool(int(row["products"])) != by_pairs, row
        assert not (by_pairs and int(row["spilled"])), row


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_started(family):
    assert [made.name for made in FAMILIES[family]("sm_80", 64)] == KERNELS[family]


@pytest.mark.parametrize("options", [{"width": 80, "causal": False}, {"dtype": torch.float64}], ids=str)
def test_other_calls_of_linear_attention_compile(options):
    options = {"width": 64, "decays": False} | options
    for made, used in compiled(linear_kernels("sm_80", **options), "sm_80"):
        assert used.shared <= used.shared_limit, made.name


def test_gaussian_matrices_in_float64_compile_without_spilling():
    for made, used in compiled(gaussian_kernels("sm_80", width=64, dtype=torch.float64), "sm_80"):
        assert used.shared <= used.shared_limit and not used.spilled, made.name


@pytest.fixture
def small(monkeypatch):
    for kind in recurrence.SIZES:
        monkeypatch.setitem(recurrence.SIZES, kind, SMALL)
    monkeypatch.setitem(gaussian.SIZES, False, SMALL)
    monkeypatch.setattr(gaussian, "GRADIENT_SIZES", SMALL)
    monkeypatch.setattr(logarithms, "SIZES", TileSizes(16, 4, 2, 1))


@pytest.mark.parametrize(("rough", "target"), [(True, "sm_80"), (False, "sm_80"), (False, "sm_90")])
def test_linear_attention_is_executed(rough, target, small):
    """In TF32, and in three products of it; the latter with a decay and a state before."""
    run, shape = partial(recurrence.recurrence, rough=rough), {"batch": 1, "width": 40, "value_width": 24}
    given = example(length=40, decays=not rough, state=not rough, dtype=torch.float32, **shape)
    with emulated(SMALL, target) as done:
        off = errors(run, given, torch.float32, causal=True, normalise=True)
    assert max(off) < LIMIT[torch.float16 if rough else torch.float32], [f"{x:.1e}" for x in off]
    assert done == KERNELS["float32"] + ["decay"] * (not rough)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_linear_attention_by_logarithms_is_executed(target, small):
    shape = {"batch": 1, "length": 24, "width": 10, "value_width": 24, "state": True, "size": 20.0}
    given = logarithmic_example(dtype=torch.float32, **shape)
    options = {"causal": True, "normalise": True, "logarithmic": True}
    with emulated(SMALL, target) as done:
        off = errors(recurrence.recurrence, given, torch.float32, logarithms_written_out, **options)
    assert max(off) < LIMIT[torch.float32], [f"{x:.1e}" for x in off]
    assert sorted(done) == sorted(KERNELS["logarithms, TF32"])


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_gaussian_matrices_are_executed(target, small):
    torch.manual_seed(0)
    x, u, v = torch.randn(1, 40, 5) / 2, torch.randn(1, 3, 40), torch.randn(1, 3, 40)
    exact = x.double().requires_grad_()
    matrix = (-(exact[:, :, None] - exact[:, None]).square().sum(-1)).exp()
    (slope,) = torch.autograd.grad((u.double() * (v.double() @ matrix)).sum(), exact)
    for most in (0, gaussian.STORED):
        with emulated(SMALL, target) as done:
            z = gaussian.TiledGaussian(x, None, u[:, 0], most=most)
            product, gradient = z.product(u[:, 0]), z.gradient(u, v)
        expected = (matrix.detach() @ u[:, 0].double()[..., None])[..., 0]
        for actual in (z.first_product, product):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-5)
        assert done == ["gaussian_product", "gaussian_product", "gaussian_gradient"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_gates_on_values_are_executed(target):
    torch.manual_seed(0)
    value, gate, grad = torch.randn(1, 2, 70, 40), torch.rand(1, 2, 70), torch.randn(1, 2, 70, 40)
    with emulated(SMALL, target) as done:
        out = gaussian.gated_values(value, gate)
        d_value, d_gate = gaussian.gated_gradients(grad, value, gate)
    torch.testing.assert_close(out, value * gate[..., None])
    torch.testing.assert_close(d_value, grad * gate[..., None])
    torch.testing.assert_close(d_gate, (grad * value).sum(-1), rtol=1e-5, atol=1e-5)
    assert done == ["gating", "gating"]
