"""The native engine where its code takes different paths: few rows, widths, heads, threads, layouts."""

from dataclasses import replace

import pytest
import torch

import unsoft
from tests.engines.pairwise import pairwise
from unsoft.engines.native import binding
from unsoft.mechanisms import resolve
from unsoft.testing.case import LAYOUTS, MASKS, Case
from unsoft.testing.check import Check

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OWN = unsoft.Formula(
    weight="tanh(b*s)*exp(abs(s) - m)",
    mass="(1 + c*j)*exp(abs(s) - m)",
    peak="abs(s)",
    offset_mass="exp(-m)*c",
    params={"b": 0.5, "c": 0.2},
)
PLAIN = ["softmax", "cog", "relu2", OWN]
MECHANISMS = [pytest.param(m, id=m if isinstance(m, str) else "own") for m in PLAIN]


@pytest.fixture(autouse=True)
def number_of_threads(request):
    """One thread, or as many as the test asks for."""
    before = torch.get_num_threads()
    torch.set_num_threads(
        request.node.callspec.params.get("threads", 1) if hasattr(request.node, "callspec") else 1
    )
    yield
    torch.set_num_threads(before)


def check(mechanism, case, dtype=torch.float32):
    measures = list(Check(resolve(mechanism), "native").against_dense(case, dtype))
    assert measures
    for measure in measures:
        assert measure.ok, str(measure)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("length", range(1, 10))
def test_few_rows(mechanism, length):
    """Few rows take a path of their own."""
    check(mechanism, Case(length, 133, 16, 24, 2, 4, 2, causal="lower_right", mask="additive per key"))


@pairwise(
    mechanism=PLAIN,
    width=[(1, 1), (7, 80), (80, 7), (128, 128), (256, 256), (15, 17), (33, 2)],
    length=[3, 37],
)
def test_widths(mechanism, width, length):
    check(mechanism, Case(length, 41, *width, 1, 2, 1, causal=True))


@pairwise(mechanism=PLAIN, heads=[(3, 3), (6, 3), (5, 1), (1, 1), (9, 3)], length=[2, 70], threads=[1, 2])
def test_heads_and_threads(mechanism, heads, length, threads):
    """Key heads that do not divide among the threads; gradients of shared key heads are summed over
    queries."""
    check(mechanism, Case(length, 75, 8, 8, 1, *heads, causal="lower_right"))


@pairwise(dtype=DTYPES, layout=list(LAYOUTS), length=[2, 40])
def test_layouts(layout, dtype, length):
    check("cog", Case(length, 33, 12, 10, 3, 4, 2, layout=layout, mask="bool"), dtype)


@pairwise(dtype=DTYPES, mask=list(MASKS), mechanism=["cog", OWN])
def test_masks_and_dtypes(mechanism, mask, dtype):
    """Also the gradients of float masks in their own shapes, and of parameters."""
    check(
        mechanism,
        Case(35, 70, 16, 8, 2, 4, 2, mask=mask, causal="lower_right" if mask == "none" else False),
        dtype,
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (1, 4, 1, 1), (2, 1, 9, 1), (1, 1, 9, 70), (2, 4, 1, 70), (2, 4, 9, 70), (70,), (9, 1)],
    ids=str,
)
def test_gradient_of_broadcast_masks(mechanism, shape):
    case = Case(9, 70, 8, 8, 2, 4, 2, mask="additive")
    subject = Check(resolve(mechanism), "native")
    inputs = subject.draw(case)
    full = inputs.leaves["mask"]
    mask = full[tuple(slice(0, size) for size in (1,) * (4 - len(shape)) + shape)].reshape(shape)
    inputs = inputs.with_leaves(mask=mask)
    results = subject.run(inputs, torch.float32)
    assert results["mask"].shape == shape
    reference, sizes = subject.reference(inputs, shape), subject.sizes(inputs, shape)
    for measure in subject.compare(str(shape), results, reference, sizes, torch.float32):
        assert measure.ok, str(measure)


@pairwise(mechanism=PLAIN, length=[1, 5, 70], p=[0.1, 1.0])
def test_dropout(mechanism, length, p):
    check(mechanism, Case(length, 75, 8, 8, 2, 4, 2, mask="bool", dropout=p))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    "kind", [{"causal": "lower_right"}, {"mask": "padding"}, {"length": 3, "spread": 8.0}], ids=str
)
def test_long_rows(mechanism, kind):
    """Several blocks of keys and rows, ragged ends, float32 sums over many keys."""
    check(mechanism, replace(Case(140, 900, 32, 24, 1, 2, 1), **kind))


@pytest.mark.parametrize("threads", [1, 2])
def test_same_threads_same_bits_and_other_threads_within_the_gate(threads):
    subject = Check(resolve("cog"), "native")
    inputs = subject.draw(Case(130, 140, 16, 16, 1, 3, 3, causal=True))
    first, second = subject.run(inputs, torch.float32), subject.run(inputs, torch.float32)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.set_num_threads(3 - threads)
    other = subject.run(inputs, torch.float32)
    for measure in subject.compare("other threads", other, first, subject.sizes(inputs, 0), torch.float32):
        assert measure.ok, str(measure)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_only_where_wanted(dtype):
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=dtype) for _ in range(3))
    for wanted in (q, k, v):
        x = wanted.clone().requires_grad_()
        arguments = [x if y is wanted else y for y in (q, k, v)]
        out = unsoft.attention(*arguments, "cog", engine="native")
        dense = unsoft.attention(*(y.double() for y in arguments), "cog", engine="dense")
        (grad,), (expected,) = (torch.autograd.grad(o.sum(), x) for o in (out, dense))
        assert grad.dtype == dtype
        assert torch.allclose(grad.double(), expected.double(), atol=2e-2 if dtype in DTYPES[2:] else 1e-4)


def test_grad_out_of_any_layout():
    q, k, v = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3))
    out = unsoft.attention(q, k, v, "softmax1", engine="native")
    upstream = torch.randn(2, 9, 2, 8).transpose(1, 2)
    strided = torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
    plain = torch.autograd.grad(out, (q, k, v), upstream.contiguous(), retain_graph=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(strided, plain, strict=True))
    summed = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)  # an expanded gradient, strides 0
    plain = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(summed, plain, strict=True))


@pairwise(
    dtype=[torch.float32, torch.bfloat16],
    mechanism=["softmax", "relu2", "l2"],
    length=[1, 3, 70],
    mask=["bool", "float", "causal"],
)
def test_what_no_row_sees_is_not_computed_again(mask, length, mechanism, dtype, monkeypatch):
    """The unused end of a cache is often uninitialised: NaN there must cost nothing and change no bit."""

    def never(*unused):
        raise AssertionError("computed again by the tiled engine")

    monkeypatch.setattr(binding.tiled, "forward", never)
    monkeypatch.setattr(binding.tiled, "backward", never)
    generator = torch.Generator().manual_seed(4)
    keys, used = 600, 500
    q, k, v = (torch.randn(1, h, n, 24, generator=generator) for h, n in ((4, length), (2, keys), (2, keys)))
    seen = torch.rand(1, 1, length, keys, generator=generator) < 0.8
    seen[..., used:] = seen[..., 7] = False
    bias = torch.where(seen, torch.randn(seen.shape, generator=generator), -torch.inf)
    options = {"attn_mask": bias if mask == "float" else seen, "enable_gqa": True}
    options |= {"is_causal": "lower_right"} if mask == "causal" else {}
    k[:, :, used:], v[:, :, used:] = 0.0, 0.0
    k[:, :, 7], v[:, :, 7] = 0.0, 0.0
    garbage = k.clone(), v.clone()
    garbage[0][:, :, used:], garbage[1][:, :, used:] = torch.nan, torch.inf
    garbage[0][:, :, 7], garbage[1][:, :, 7, 3] = -torch.inf, torch.nan
    results = []
    for keys_and_values in ((k, v), garbage):
        leaves = [x.to(dtype).requires_grad_() for x in (q, *keys_and_values)]
        out = unsoft.attention(*leaves, mechanism, engine="native", **options)
        with torch.no_grad():
            alone = unsoft.attention(*leaves, mechanism, engine="native", **options)
        grad = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        results.append((out.detach(), alone, *torch.autograd.grad(out, leaves, grad)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("mechanism", ["softmax", "relu2", "l2"])
@pytest.mark.parametrize("length", [2, 70])
def test_nan_that_some_rows_see_is_what_it_is_in_dense(length, mechanism):
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, n, 24, generator=generator, dtype=torch.float64) for n in (length, 120, 120))
    seen = torch.rand(1, 1, length, 120, generator=generator) < 0.8
    seen[..., 9] = False
    k[:, :, 7, 0], k[:, :, 9], v[:, :, 11, 3], k[:, 1, 110, 2] = torch.inf, torch.nan, torch.nan, torch.nan
    results = []
    for engine in ("dense", "native"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = unsoft.attention(*leaves, mechanism, attn_mask=seen, engine=engine)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for dense, native in zip(*results, strict=True):
        torch.testing.assert_close(native, dense, equal_nan=True, rtol=1e-10, atol=1e-12)
