"""Zero queries, padded rows and other places where a slope could be 0 times infinity:
every engine against plain torch."""

import pytest
import torch

import unsoft
from tests.engines.pairwise import pairwise
from unsoft import Formula

ENGINES = ("dense", "tiled", "native")


def inputs(length=130, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, length, 8, generator=generator, dtype=dtype) for _ in range(3))
    q[:, :, 3], k[:, :, 7] = 0.0, 0.0
    return [x.requires_grad_() for x in (q, k, v)]


def gradients(out, leaves):
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("power", [1.0, 1.5, 3.0])
def test_a_learned_exponent_survives_a_zero_query(engine, power):
    q, k, v = inputs()
    p = torch.full((2,), power, dtype=torch.float64, requires_grad=True)
    s = q @ k.mT / 8**0.5
    expected = gradients((s.sign() * s.abs() ** p[:, None, None] / 130) @ v, (q, k, v, p))
    formula = Formula("sign(s)*abs(s)**p/n", params={"p": 1.0})
    out = unsoft.attention(q, k, v, formula, engine=engine, params={"p": p})
    for actual, true in zip(gradients(out, (q, k, v, p)), expected, strict=True):
        torch.testing.assert_close(actual, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_infinitely_steep_formula_has_finite_gradients_at_zero(engine):
    q, k, v = inputs(dtype=torch.float32)
    p = torch.full((2,), 0.5, requires_grad=True)
    formula = Formula("sign(s)*abs(s)**p", "abs(s)**p", params={"p": 0.5})
    out = unsoft.attention(q, k, v, formula, engine=engine, params={"p": p})
    assert all(x.isfinite().all() for x in gradients(out, (q, k, v, p)))


@pytest.mark.filterwarnings("error::unsoft.errors.CompilerWarning")
@pytest.mark.parametrize(
    "text", ["where(n > 50, s, 2*s)/n", "where(p > 0.5, s, p)/n", "where(i < 3, s, s*s)/n"]
)
def test_comparisons_of_row_quantities_compile(text):
    q, k, v = inputs()
    formula = Formula(text, params={"p": 0.25} if "p" in text else None)
    for causal in (False, True):
        dense, native = (
            unsoft.attention(q, k, v, formula, is_causal=causal, engine=e) for e in ("dense", "native")
        )
        torch.testing.assert_close(native, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-41), (torch.float64, 1e-311)])
def test_a_normaliser_whose_inverse_overflows_counts_as_zero(dtype, size, engine):
    q = torch.ones(1, 1, 1, 1, dtype=dtype, requires_grad=True)
    k = (size * torch.tensor([1.0, -2.0, 3.0, 0.0], dtype=dtype)).view(1, 1, 4, 1).requires_grad_()
    v = torch.eye(4, dtype=dtype).view(1, 1, 4, 4).requires_grad_()
    out = unsoft.attention(q, k, v, "softpick", scale=1.0, engine=engine)
    assert (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


UNDEFINED = Formula(
    "tanh(s)*sqrt(p*c_i)",
    "abs(s) + 0.25",
    norm="sqrt(z)*log(1 + p*c_i)",
    offset_mass="sqrt(p*c_i)",
    params={"p": 1.0},
    fields={"c": "query"},
)


@pairwise(engine=ENGINES, mask=["bool", "float", "causal"], length=[6, 70])
def test_a_row_that_sees_nothing_is_zero_where_the_formula_is_undefined(engine, mask, length):
    """Rows 0 .. 2 see nothing, and there every part of the formula is the root or logarithm of a negative."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (
        torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64)
        for n in (length, length - 3, length - 3)
    )
    c = torch.full((1, 2, length), 0.5, dtype=torch.float64)
    c[:, :, :3] = -2.0
    p = torch.tensor([1.0, 1.5], dtype=torch.float64)
    entries = torch.randn(1, 2, length, length - 3, generator=generator, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, c, p, entries)]
    seen = torch.ones(length, length - 3, dtype=torch.bool).tril(-3)

    def run(engine, first):
        given = {"bool": seen, "float": torch.where(seen, entries, -torch.inf)}
        options = (
            {"attn_mask": given[mask][..., first:, :]} if mask in given else {"is_causal": "lower_right"}
        )
        fields = {"c": c[:, :, first:]}
        return unsoft.attention(
            q[:, :, first:], k, v, UNDEFINED, engine=engine, params={"p": p}, fields=fields, **options
        )

    out, expected = run(engine, 0), run("dense", 3)
    assert (out[:, :, :3] == 0).all()
    torch.testing.assert_close(out[:, :, 3:], expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    alone = torch.autograd.grad(expected, leaves, grad[:, :, 3:], materialize_grads=True)
    for actual, true in zip(
        torch.autograd.grad(out, leaves, grad, materialize_grads=True), alone, strict=True
    ):
        torch.testing.assert_close(actual, true, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(run(engine, 0), out, rtol=0, atol=0)
        torch.testing.assert_close(run(engine, length - 1), out[:, :, -1:], rtol=1e-12, atol=1e-12)
