"""Measures of rows against their definitions, written out in plain Python for one row at a time."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from unsoft import measure
from unsoft.measure import rows as rows_module

INF, NAN = math.inf, math.nan


def shares(row):
    total = math.fsum(map(abs, row))
    return [abs(a) / total for a in row] if total else []


def top(row, k):
    return math.fsum(sorted(shares(row))[-k:])


# Of a row (a list of the visible weights): its value. Rows without mass are listed in NO_MASS.
DEFINITIONS = {
    "sparsity": lambda row: (
        math.fsum(map(abs, row)) / len(row) / math.sqrt(math.fsum(a * a for a in row) / len(row))
    ),
    "entropy": lambda row: -math.fsum(p * math.log(p) for p in shares(row) if p),
    "effective_keys": lambda row: math.exp(-math.fsum(p * math.log(p) for p in shares(row) if p)),
    "participation": lambda row: 1 / math.fsum(p * p for p in shares(row)),
    "top_mass": lambda row: top(row, 1),
    "distance_to_uniform": lambda row: math.fsum(abs(p - 1 / len(row)) for p in shares(row)) / 2,
    "negative_share": lambda row: math.fsum(p for p, a in zip(shares(row), row, strict=True) if a < 0),
    "row_sum": math.fsum,
    "cancellation": lambda row: 1 - abs(math.fsum(row)) / math.fsum(map(abs, row)),
}
NO_MASS = {  # name: (value of a row that sees n zeros, value of a row that sees nothing)
    "sparsity": (lambda n: 1.0, 1.0),
    "entropy": (math.log, 0.0),
    "effective_keys": (float, 0.0),
    "participation": (float, 0.0),
    "top_mass": (lambda n: 0.0, 0.0),
    "sink_mass": (lambda n: 0.0, 0.0),
    "distance_to_uniform": (lambda n: 0.0, 0.0),
    "negative_share": (lambda n: 0.0, 0.0),
    "row_sum": (lambda n: 0.0, 0.0),
    "cancellation": (lambda n: 0.0, 0.0),
}
SCALE_FREE = sorted(set(NO_MASS) - {"row_sum"})


def call(name, *arguments):
    return getattr(measure, name)(*arguments)


def reference(name, weights, mask):
    """The definition, row by row, in float64."""
    visible = torch.ones(weights.shape, dtype=torch.bool) if mask is None else mask.expand(weights.shape)
    out = torch.empty(weights.shape[:-1], dtype=torch.float64)
    for at in itertools.product(*map(range, weights.shape[:-1])):
        seen = weights[at].double()[visible[at]].tolist()
        if name == "sink_mass":
            first = abs(weights[at][0].item()) if visible[at][0] else 0.0
            total = math.fsum(map(abs, seen))
            out[at] = first / total if total else 0.0
        elif not any(seen):
            out[at] = NO_MASS[name][0](len(seen)) if seen else NO_MASS[name][1]
        else:
            out[at] = DEFINITIONS[name](seen)
    return out


def random_weights(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return weights * (torch.rand(*shape, generator=generator) > 0.2)  # some exact zeros


def masks(shape):
    generator = torch.Generator().manual_seed(1)
    some = torch.rand(shape, generator=generator) > 0.4
    some[..., 1, :] = False  # a row that sees nothing
    return {
        "none": None,
        "some": some,
        "causal": torch.ones(shape[-2:], dtype=torch.bool).tril(),
        "padding": torch.tensor([True] * (shape[-1] - 2) + [False] * 2),
        "rows": torch.tensor([[True], [False]] + [[True]] * (shape[-2] - 2)),
        "nothing": torch.zeros(1, dtype=torch.bool),
    }


SHAPE = (2, 3, 5, 7)


@pytest.mark.parametrize("kind", masks(SHAPE))
@pytest.mark.parametrize("name", NO_MASS)
def test_definition(name, kind):
    weights, mask = random_weights(*SHAPE), masks(SHAPE)[kind]
    weights[0, 1, 2] = 0  # a row without mass
    result = call(name, weights, mask)
    assert result.shape == SHAPE[:-1] and result.dtype == torch.float64
    torch.testing.assert_close(result, reference(name, weights, mask), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", NO_MASS)
def test_one_row_alone(name):
    row = random_weights(6)
    torch.testing.assert_close(call(name, row), reference(name, row, None), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("block", [1, 7, 20, 40, 100, 1000])
@pytest.mark.parametrize("name", NO_MASS)
def test_blocks_make_no_difference(monkeypatch, name, block):
    """1: a row is larger than a block; 20: some rows; 40: one matrix; 100: some of the inner ones; 1000:
    all."""
    weights, mask = random_weights(*SHAPE), masks(SHAPE)["some"]
    expected = reference(name, weights, mask)
    monkeypatch.setattr(rows_module, "BLOCK", block)
    torch.testing.assert_close(call(name, weights, mask), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", NO_MASS)
def test_strided_and_expanded_weights(name):
    weights = random_weights(5, 7, 3, 2).permute(3, 2, 0, 1)
    torch.testing.assert_close(call(name, weights), reference(name, weights, None), rtol=1e-13, atol=1e-14)
    shared = random_weights(1, 7).expand(4, 7)
    torch.testing.assert_close(call(name, shared), reference(name, shared, None), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 16, 99, 100, 101])
@pytest.mark.parametrize("keys", [1, 2, 17, 100])
def test_top_mass_sorts(k, keys):
    weights = random_weights(4, keys, seed=k)
    weights[:, 0] = 2.0
    weights[0] = weights[0].abs().clamp(max=0.3) + 0.1  # ties
    expected = torch.tensor([top(row, k) for row in weights.tolist()], dtype=torch.float64)
    torch.testing.assert_close(measure.top_mass(weights, k=k), expected, rtol=1e-13, atol=0)


def test_sinks():
    weights = torch.tensor([0.5, -0.25, 0.125, 0.125])
    assert measure.sink_mass(weights, sinks=2) == 0.75
    assert measure.sink_mass(weights, sinks=9) == 1
    assert measure.sink_mass(weights, torch.tensor([False, True, True, True]), sinks=2) == 0.5


@pytest.mark.parametrize("n", [1, 10, 300])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_sparsity_of_linear_decay(n, decay):
    """The closed form of https://spaces.ac.cn/archives/9889."""
    row = decay ** torch.arange(n, dtype=torch.float64)
    expected = math.sqrt((1 - decay**n) / (n * (1 - decay)) * (1 + decay) / (1 + decay**n))
    assert measure.sparsity(row).item() == pytest.approx(expected, rel=1e-12)


def test_extremes_are_reached():
    one_hot, flat, n = torch.eye(9)[3] * -5, torch.full((9,), 0.3), 9
    for name, sharp, even in [
        ("sparsity", 1 / 3, 1),
        ("entropy", 0, math.log(n)),
        ("effective_keys", 1, n),
        ("participation", 1, n),
        ("top_mass", 1, 1 / n),
        ("distance_to_uniform", 1 - 1 / n, 0),
    ]:
        assert call(name, one_hot).item() == pytest.approx(sharp, rel=1e-6, abs=1e-6)
        assert call(name, flat).item() == pytest.approx(even, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 3e37])
@pytest.mark.parametrize("name", SCALE_FREE)
def test_scale_does_not_matter(name, scale):
    """Squares of these overflow or vanish in float32. 1e-42 is subnormal: three digits are left."""
    weights = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.5, 0.5, -4.0, 1.0]])
    tolerance = 5e-3 if scale == 1e-42 else 1e-6
    torch.testing.assert_close(
        call(name, weights * scale), call(name, weights), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NO_MASS)
def test_half_precision_is_summed_in_float32(name, dtype):
    weights = random_weights(3, 4000, dtype=dtype) * 100  # in float16 sums and squares would overflow
    result = call(name, weights)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, reference(name, weights, None).float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NO_MASS)
def test_no_keys_and_no_rows(name):
    assert torch.equal(call(name, torch.zeros(2, 3, 0)), torch.full((2, 3), NO_MASS[name][1]))
    assert call(name, torch.zeros(2, 0, 4)).shape == (2, 0)
    assert call(name, torch.zeros(0, 3, 4)).shape == (0, 3)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", NO_MASS)
def test_not_finite_stays_in_its_row(name, bad):
    weights = random_weights(4, 6)
    changed = weights.clone()
    changed[1, 2] = bad
    result, clean = call(name, changed), call(name, weights)
    assert not result[1].isfinite() if name == "row_sum" else result[1].isnan()
    for row in (0, 2, 3):
        assert result[row] == clean[row]


@pytest.mark.parametrize("name", NO_MASS)
def test_hidden_entries_change_nothing(name):
    weights, mask = random_weights(4, 6), masks((4, 6))["some"]
    changed = torch.where(mask, weights, NAN).requires_grad_()
    result = call(name, changed, mask)
    assert torch.equal(result, call(name, torch.where(mask, weights, 7.0), mask))
    result.sum().backward()
    assert changed.grad.isfinite().all() and (changed.grad[~mask] == 0).all()


@pytest.mark.parametrize("name", NO_MASS)
def test_gradient(name):
    weights = torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()
    mask = torch.tensor([[True] * 5, [True, False, True, True, True], [False] * 5])
    assert torch.autograd.gradcheck(lambda w: call(name, w, mask), weights)


@pytest.mark.parametrize("name", NO_MASS)
def test_gradient_without_mass_is_finite(name):
    weights = torch.zeros(2, 5, requires_grad=True)
    mask = torch.tensor([[True] * 5, [False] * 5])
    call(name, weights, mask).sum().backward()
    assert torch.equal(weights.grad, torch.tensor([[1.0] * 5, [0.0] * 5]) * (name == "row_sum"))


def test_gradient_through_exact_zeros_is_finite():
    """Where the weight is 0, p log p has an infinite slope."""
    weights = torch.tensor([0.0, 0.5, -0.5, 0.0], requires_grad=True)
    measure.entropy(weights).backward()
    assert weights.grad.isfinite().all()


def test_summary_is_all_of_them():
    weights, mask = random_weights(*SHAPE), masks(SHAPE)["some"]
    looked = measure.summary(weights, mask)
    assert set(looked._fields) == set(NO_MASS)
    for name in looked._fields:
        assert torch.equal(getattr(looked, name), call(name, weights, mask))


def test_vmap():
    weights = random_weights(4, 3, 5)
    assert torch.equal(torch.func.vmap(measure.entropy)(weights), measure.entropy(weights))


@pytest.mark.parametrize("name", [*NO_MASS, "summary"])
@pytest.mark.parametrize(
    ("weights", "mask", "error", "message"),
    [
        ([1.0], None, TypeError, "'weights' must be a tensor .* not list"),
        (
            torch.ones(2, 2, dtype=torch.int64),
            None,
            TypeError,
            r"'weights' has dtype torch.int64; .*weights.float\(\)",
        ),
        (torch.ones(2, 2, dtype=torch.bool), None, TypeError, "'weights' has dtype torch.bool"),
        (torch.ones(2, 2, dtype=torch.complex64), None, TypeError, "'weights' has dtype torch.complex64"),
        (torch.tensor(1.0), None, ValueError, r"'weights' has shape \(\); expected \(..., queries, keys\)"),
        (torch.ones(2, 2), [True], TypeError, "'mask' must be a bool tensor or None, not list"),
        (torch.ones(2, 2), torch.ones(2, 2), TypeError, "'mask' has dtype torch.float32; use bool"),
        (torch.ones(2, 2), torch.ones(2, 2).long(), TypeError, "'mask' has dtype torch.int64; use bool"),
        (torch.ones(2, 2), torch.ones(3, 2).bool(), ValueError, r"'mask' has shape \(3, 2\), .* \(2, 2\)"),
        (torch.ones(2, 2), torch.ones(1, 2, 2).bool(), ValueError, r"'mask' has shape \(1, 2, 2\)"),
        (torch.ones(2, 2), torch.ones(2, 2, device="meta").bool(), ValueError, "'mask' is on device meta"),
    ],
)
def test_invalid_arguments_raise(name, weights, mask, error, message):
    with pytest.raises(error, match=message):
        call(name, weights, mask)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_invalid_counts_raise(value, error):
    with pytest.raises(error, match="'k'"):
        measure.top_mass(torch.ones(2), k=value)
    with pytest.raises(error, match="'sinks'"):
        measure.sink_mass(torch.ones(2), sinks=value)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation allocates."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        given = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return out


HEADS, LENGTH = 32, 512
LARGE = torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
HALF = LARGE.bfloat16()
VALUES = torch.randn(HEADS, LENGTH, 16, generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WALKS = {
    **{name: lambda name=name: call(name, LARGE, CAUSAL) for name in [*NO_MASS, "summary"]},
    "top_mass, k": lambda: measure.top_mass(LARGE, k=7),
    "half": lambda: measure.entropy(HALF),
    "deletion": lambda: measure.deletion(LARGE, VALUES, VALUES, mask=CAUSAL),
    "head_similarity": lambda: measure.head_similarity(LARGE, CAUSAL),
    "hijack": lambda: measure.hijack(LARGE, VALUES, CAUSAL, magnitude_weights=torch.ones(HEADS, LENGTH)),
}


@pytest.mark.parametrize("name", WALKS)
def test_no_copy_of_the_weights_is_made(name):
    with Largest() as largest:
        WALKS[name]()
    assert 0 < largest.bytes <= LARGE.numel() * 4 // 4


def test_a_copy_would_be_detected():
    with Largest() as largest:
        LARGE.transpose(0, 1).abs()
    assert largest.bytes == LARGE.numel() * 4


NUMBERS = st.floats(-1e3, 1e3, allow_nan=False, width=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_ranges_and_order(row, random):
    """Every value lies in the range that its docstring promises, and most do not depend on the order of the
    keys."""
    weights, n = torch.tensor(row, dtype=torch.float64), len(row)
    looked, slack = measure.summary(weights), 1e-12
    low = {"sparsity": n**-0.5, "effective_keys": 1, "participation": 1}
    high = {
        "sparsity": 1,
        "entropy": math.log(n),
        "effective_keys": n,
        "participation": n,
        "distance_to_uniform": 1 - 1 / n,
    }
    for name in SCALE_FREE:
        value = getattr(looked, name).item()
        assert low.get(name, 0) - slack * n <= value <= high.get(name, 1) + slack * n, name
    random.shuffle(row)
    shuffled = measure.summary(torch.tensor(row, dtype=torch.float64))
    for name in set(SCALE_FREE) - {"sink_mass"}:
        torch.testing.assert_close(getattr(shuffled, name), getattr(looked, name), rtol=1e-9, atol=1e-9)
