"""The symbols i and j may be given: every engine, forward and backward,
against the definition in plain torch."""

import pytest
import torch

import unsoft
from tests.engines.pairwise import pairwise

ROWS = unsoft.Formula("sigmoid(s)*exp(-t*(i - j))/n", params={"t": 0.1})
PEAK = unsoft.Formula(
    "exp(s - 0.1*abs(i - j) + 0.01*j - m)",
    "exp(s - 0.1*abs(i - j) + 0.01*j - m)",
    peak="s - 0.1*abs(i - j) + 0.01*j",
)


def defined(q, k, v, formula, visible, i, j, decay):
    """The formulas above, written down independently."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    i, j = i[:, None, :, None].double(), j[:, None, None].double()
    if formula is PEAK:
        weights = (logits - 0.1 * (i - j).abs() + 0.01 * j).masked_fill(~visible, -torch.inf).softmax(-1)
    else:
        weights = logits.sigmoid() * torch.exp(-decay[:, None, None] * (i - j))
        weights = torch.where(visible, weights, 0) / visible.sum(-1, keepdim=True)
    return weights @ v


def inputs(batch, heads, shared, length, keys, width, dtype=torch.float64):
    draw = torch.Generator().manual_seed(length)
    sizes = ((heads, length), (shared, keys), (shared, keys))
    return [torch.randn(batch, h, n, width, generator=draw, dtype=torch.float64).to(dtype) for h, n in sizes]


@pairwise(
    engine=["dense", "tiled", "native"],
    formula=[ROWS, PEAK],
    sizes=[(2, 4, 2, 5, 5, 8), (2, 2, 1, 1, 300, 8), (3, 4, 2, 130, 257, 64)],
    dtype=[torch.float64, torch.float32],
)
def test_given_positions_enter_outputs_and_gradients(engine, formula, sizes, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    batch, heads, _, length, keys, _ = sizes
    ours, exact = ([x.requires_grad_() for x in inputs(*sizes, dtype=d)] for d in (dtype, torch.float64))
    with torch.no_grad():
        for x, y in zip(exact, ours, strict=True):
            x.copy_(y)
    shift = torch.arange(batch)[:, None] * 3
    i, j = torch.arange(keys - length, keys) + shift, torch.arange(keys) + 2 * shift  # not those of the order
    decays = [torch.full((heads,), 0.1, dtype=d, requires_grad=True) for d in (dtype, torch.float64)]
    params = {"t": decays[0]} if formula is ROWS else None
    out = unsoft.attention(
        *ours,
        formula,
        is_causal="lower_right",
        enable_gqa=True,
        engine=engine,
        positions=(i, j),
        params=params,
    )
    visible = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    expected = defined(*exact, formula, visible, i, j, decays[1])
    slope = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (out * slope.to(dtype)).sum().backward()
    (expected * slope).sum().backward()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]
    if params:
        pairs.append((decays[0].grad, decays[1].grad))
    for actual, expected in pairs:
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("engine", ["dense", "tiled", "native"])
def test_dropout_does_not_depend_on_positions(engine):
    """Dropout depends on the order of tokens, so that all engines drop the same whatever the positions."""
    q, k, v = inputs(1, 2, 2, 7, 7, 4)
    free = unsoft.Formula("s + min(i + j, 0)")
    shifted = (torch.arange(7) + 5, torch.arange(7) + 3)
    outputs = []
    for positions in (None, shifted):
        torch.manual_seed(0)
        outputs.append(unsoft.attention(q, k, v, free, dropout_p=0.5, engine=engine, positions=positions))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


def test_positions_without_a_batch_and_default_positions():
    q, k, v = inputs(2, 2, 2, 3, 5, 4)
    order = (torch.arange(3) + 2, torch.arange(5))
    given = unsoft.attention(q, k, v, ROWS, is_causal="lower_right", positions=order)
    assert torch.equal(given, unsoft.attention(q, k, v, ROWS, is_causal="lower_right"))
    assert unsoft.attention(q, k, v, ROWS, positions=order, return_weights=True)[1].shape == (2, 2, 3, 5)


def test_compiled_calls_take_positions():
    q, k, v = inputs(2, 2, 2, 3, 3, 4, torch.float32)
    positions = (torch.tensor([[4, 5, 6], [0, 1, 2]]),) * 2

    def call(q):
        return unsoft.attention(q, k, v, ROWS, is_causal=True, positions=positions)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), call(q))


@pytest.mark.parametrize(
    ("positions", "error", "words"),
    [
        (torch.arange(3), TypeError, "a pair of tensors"),
        ((torch.arange(3), [0, 1, 2]), TypeError, "of keys must be a tensor of numbers, not list"),
        ((torch.arange(3), torch.ones(3, dtype=torch.bool)), TypeError, "not torch.bool"),
        ((torch.arange(2), torch.arange(3)), ValueError, r"of queries has shape \(2,\), .* to \(2, 3\)"),
        ((torch.arange(3), torch.zeros(3, 3)), ValueError, r"of keys has shape \(3, 3\)"),
    ],
)
@pytest.mark.parametrize("mechanism", ["softmax", ROWS], ids=["softmax", "rows"])
def test_wrong_positions_are_named(positions, error, words, mechanism):
    q, k, v = inputs(2, 2, 2, 3, 3, 4)
    with pytest.raises(error, match=words):
        unsoft.attention(q, k, v, mechanism, positions=positions)


@pytest.mark.parametrize("name", ["retention", "decay"])
def test_mechanisms_that_know_distances_refuse_others(name):
    q, k, v = inputs(2, 2, 2, 4, 4, 4)
    plain = unsoft.attention(q, k, v, name, is_causal=True)
    apart = torch.tensor([0, 1, 5, 6])
    with pytest.raises(ValueError, match="'positions' must be consecutive"):
        unsoft.attention(q, k, v, name, is_causal=True, positions=(apart, apart))
    later = torch.arange(4) + torch.tensor([[7], [0]])
    assert torch.equal(plain, unsoft.attention(q, k, v, name, is_causal=True, positions=(later, later)))
    texts = torch.tensor([0, 1, 0, 1])  # two texts that do not see each other
    mask = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    unsoft.attention(q, k, v, name, mask, is_causal=True, positions=(texts, texts))
    padding = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()[:, None, None]
    counted = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])
    unsoft.attention(q, k, v, name, padding, is_causal=True, positions=(counted, counted))


@pytest.mark.parametrize("length", [5, 150, 2300])  # within M, beyond M, and in two segments
def test_cosformer_takes_any_positions(length):
    q, k, v = inputs(2, 2, 2, length, length, 4)
    layer = unsoft.mechanism("cosformer(100)", heads=2, head_dim=4)
    places = torch.stack([torch.arange(length) + 71, torch.arange(length) * 3])
    out = layer(q, k, v, is_causal=True, positions=(places, places))
    folded = 100 - (places % 200 - 100).abs().double()
    cosine = (torch.pi / 200 * (folded[:, :, None] - folded[:, None])).cos()[:, None]
    weights = ((q.relu() @ k.relu().mT) * cosine).tril()
    total = weights.sum(-1, keepdim=True)
    expected = torch.where(total == 0, 0.0, weights / total) @ v
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    plain = layer(q, k, v, is_causal=True)
    counted = torch.arange(length)
    torch.testing.assert_close(layer(q, k, v, is_causal=True, positions=(counted, counted)), plain)
