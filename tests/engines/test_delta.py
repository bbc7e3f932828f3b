"""The delta rule in chunks, compiled and in torch, against the recurrence written out in numpy."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import unsoft
from unsoft.engines.linear.delta import compiled_delta, delta_attention

WAYS = {"native": compiled_delta, "tiled": delta_attention}
NAMES = ["deltanet", "gated-deltanet", "kda"]


def recurrence(q, k, v, b, g, state):
    """As in the papers, one head: numpy arrays (T, D), (T, Dv), (T,), (T, 1 or D) and (D, Dv)."""
    outs = []
    for t in range(len(q)):
        state = np.exp(g[t])[:, None] * state
        state = state + b[t] * np.outer(k[t], v[t] - state.T @ k[t])
        outs.append(state.T @ q[t])
    return np.stack(outs), state


def drawn(length, width, gates, dtype=torch.float32, values=9, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(1, 2, length, *shape, generator=generator, dtype=torch.float64)

    q, k = (normalize(random(width), dim=-1) for _ in range(2))
    g = -0.3 * random(gates).abs() if gates else None
    inputs = (
        q,
        k,
        random(values),
        random().sigmoid(),
        g,
        random(values)[:, :, :1].expand(-1, -1, width, -1) / 3,
    )
    return [None if x is None else x.to(dtype) for x in inputs]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("per_channel", [None, False, True])
@pytest.mark.parametrize(("length", "width"), [(129, 64), (257, 96), (1000, 20), (3, 256)])
def test_chunks_are_the_recurrence(way, per_channel, length, width):
    gates = 0 if per_channel is None else width if per_channel else 1
    given = drawn(length, width, gates)
    out, after = WAYS[way](*given)
    q, k, v, b, g, state = (None if x is None else x[0, 1].double().numpy() for x in given)
    expected, last = recurrence(q, k, v, b, np.zeros((length, 1)) if g is None else g, state)
    np.testing.assert_allclose(out[0, 1], expected, atol=3e-6)
    np.testing.assert_allclose(after[0, 1], last, atol=3e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gates", [0, 1, 8])
def test_gradients_are_those_of_small_differences(way, gates):
    given = [x for x in drawn(70, 8, gates, torch.float64) if x is not None]
    variables = [x.clone().requires_grad_() for x in given]
    generator = torch.Generator().manual_seed(7)
    up_out, up_state = (torch.randn(1, 2, n, 9, generator=generator, dtype=torch.float64) for n in (70, 8))

    def loss():
        q, k, v, b, *g, state = variables
        out, after = WAYS[way](q, k, v, b, g[0] if g else None, state)
        return (out * up_out).sum() + (after * up_state).sum()

    gradients = torch.autograd.grad(loss(), variables)
    with torch.no_grad():
        for x, gradient in zip(variables, gradients, strict=True):
            move = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            values = []
            for step in (1e-6, -1e-6):
                x += step * move
                values.append(loss())
                x -= step * move
            assert float((gradient * move).sum()) == pytest.approx(
                float(values[0] - values[1]) / 2e-6, rel=1e-6
            )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("gates", "log_decay"), [(1, -300.0), (16, -5.0)])
def test_the_strongest_decay_stays_finite_in_float32(way, gates, log_decay):
    q, k, v, b, g, state = drawn(100, 16, gates)
    variables = [q, k, v, b, torch.full_like(g, log_decay)]
    variables = [x.requires_grad_() for x in variables]
    out, _ = WAYS[way](*variables, state)
    results = [out, *torch.autograd.grad(out.sum(), variables)]
    assert all(bool(x.isfinite().all()) for x in results)


@pytest.mark.parametrize("way", WAYS)
def test_equal_keys_that_are_overwritten_give_the_last_value(way):
    q, _, v, b, _, _ = drawn(300, 16, 0)
    k = torch.zeros_like(q)
    k[..., 3] = 1.0
    out, _ = WAYS[way](k, k, v, torch.ones_like(b), None, None)
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing_and_the_cache_is_the_state(name):
    module = unsoft.mechanism(name, heads=4, head_dim=16)
    q = torch.randn(2, 4, 150, 16)
    k, v = torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    mask[1, ..., :9] = False
    whole = module(q, k, v, mask, is_causal=True, enable_gqa=True)
    alone = module(*(x[1:, :, 9:] for x in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(whole[1:, :, 9:], alone, atol=1e-5, rtol=1e-4)
    cache, pieces, sizes = module.new_cache(2), [], set()
    with torch.no_grad():
        for start, end in ((0, 1), (1, 100), (100, 101), (101, 150)):
            part = [x[:, :, start:end] for x in (q, k, v)]
            pieces.append(module(*part, mask[..., :end], cache=cache, enable_gqa=True))
            sizes.add(cache.nbytes)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, atol=1e-5, rtol=1e-4)
    assert len(sizes) == 1
    narrow = module(*(x.bfloat16() for x in (q, k, v)), mask, is_causal=True, enable_gqa=True)
    assert narrow.dtype == torch.bfloat16 and (narrow - whole).norm() < 0.02 * whole.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": False}, "argument 'is_causal': this mechanism looks back only"),
        ({"attn_mask": torch.randn(9, 9)}, "argument 'attn_mask': the delta rule has no weight"),
        ({"attn_mask": torch.eye(9, dtype=torch.bool)}, "argument 'attn_mask': .* one state for all rows"),
        ({"dropout_p": 0.1}, "argument 'dropout_p'"),
        ({"engine": "sdpa"}, "argument 'engine': 'sdpa' does not support"),
        ({"engine": "fast"}, "unknown name 'fast'"),
    ],
)
def test_what_the_rule_cannot_do_is_refused(options, message):
    x = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=message):
        unsoft.mechanism("deltanet", heads=2, head_dim=4)(x, x, x, **{"is_causal": True} | options)


@pytest.mark.parametrize("name", NAMES)
def test_gates_come_from_the_hidden_state_where_it_is_given(name):
    torch.manual_seed(0)
    module = unsoft.mechanism(name, heads=2, head_dim=4, hidden_dim=6)
    x, hidden = torch.randn(1, 2, 20, 4), torch.randn(1, 20, 6)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    one, other = (module(x, x, x, is_causal=True, hidden=h) for h in (hidden, -hidden))
    assert (one - other).abs().max() > 1e-2
    with pytest.raises(ValueError, match="'hidden' is missing"):
        module(x, x, x, is_causal=True)
