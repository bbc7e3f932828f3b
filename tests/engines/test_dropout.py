"""Dropout: the generator against a plain transcription, the statistics, and agreement of the engines."""

import itertools
from dataclasses import replace

import pytest
import torch

from unsoft.attention import attention
from unsoft.engines import POINTWISE
from unsoft.engines.dropout import draw_seed, keep, keep_factor, row_keys

pytestmark = pytest.mark.usefixtures("one_thread")
RUN = {engine.name: engine.run for engine in POINTWISE.engines}
WORD = 2**32


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


def test_words_follow_the_definition():
    low, high, p = 0xDEADBEEF, 0xFFFFFFFE, 0.3
    heads, rows, keys = [0, 1, 77, 5000], [0, 3, 10**6], [0, 1, 2**20]
    words = row_keys(torch.tensor([low, high]), torch.tensor(heads), torch.tensor(rows))
    kept = keep(words, torch.tensor(keys), p)
    for (a, h), (b, i) in itertools.product(enumerate(heads), enumerate(rows)):
        word = mix((mix(mix((low + h * 0x9E3779B1) % WORD) ^ high) + i * 0x85EBCA77) % WORD)
        assert words[a, b] == word
        for c, j in enumerate(keys):
            assert kept[a, b, c] == (mix((word + j * 0xC2B2AE3D) % WORD) >= round(p * WORD))


def test_negative_seed_words_count_as_32_bit_words():
    a = row_keys(torch.tensor([-1, -2]), torch.arange(2), torch.arange(3))
    b = row_keys(torch.tensor([WORD - 1, WORD - 2]), torch.arange(2), torch.arange(3))
    assert torch.equal(a, b)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_fraction_and_independence(p):
    words = row_keys(torch.tensor([12345, 678]), torch.arange(8), torch.arange(128))
    kept = keep(words, torch.arange(256), p).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * sigma / kept.numel() ** 0.5
    centred = (kept - (1 - p)) / sigma
    for dim in range(3):
        together = (
            centred.narrow(dim, 0, kept.shape[dim] - 1) * centred.narrow(dim, 1, kept.shape[dim] - 1)
        ).mean()
        assert abs(together) < 5 / kept.numel() ** 0.5


def test_keep_factor_keeps_the_mean_and_survives_p_one():
    assert keep_factor(0.0) == 1.0 and keep_factor(0.75) == 4.0 and keep_factor(1.0) == 0.0


def test_seed_words_fill_32_bits():
    torch.manual_seed(0)
    words = torch.stack([draw_seed(torch.device("cpu")) for _ in range(64)])
    assert words.min() >= 0 and words.max() < WORD and words.max() > WORD // 2


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("mechanism", ["softmax", "cog", "relu2", "l2", "softpick"])
@pytest.mark.usefixtures("tiny_tiles")
def test_engines_drop_the_same_weights(mechanism, p, make_call, leaves):
    call = make_call(mechanism, dropout=p, bias=(1, 4, 7, 9), causal=2)
    g = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    results = [
        (out := RUN[name](call), *torch.autograd.grad(out, leaves(call), g, materialize_grads=True))
        for name in ("dense", "tiled")
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    if p == 1.0:
        assert all((x == 0).all() for x in results[0])


def test_mean_over_many_draws_is_the_output_without_dropout(make_call):
    draws = 2000
    call = make_call("cog", batch=1, dropout=0.4)
    many = {name: getattr(call, name).detach().expand(draws, -1, -1, -1) for name in "qkv"}
    plain = RUN["dense"](replace(call, dropout_p=0.0, seed=None))[0]
    outs = RUN["dense"](replace(call, **many))
    assert ((outs.mean(0) - plain).abs() < 5.5 * outs.std(0) / draws**0.5).all()


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_reproducible_from_torch_s_generator(engine):
    q = torch.randn(1, 2, 40, 8)
    torch.manual_seed(7)
    a, b = (attention(q, q, q, "cog", dropout_p=0.5, engine=engine) for _ in range(2))
    torch.manual_seed(7)
    again = attention(q, q, q, "cog", dropout_p=0.5, engine=engine)
    assert torch.equal(a, again) and not torch.equal(a, b)


def test_no_dropout_draws_nothing():
    q = torch.randn(1, 2, 4, 8)
    state = torch.get_rng_state()
    attention(q, q, q, "softmax")
    assert torch.equal(state, torch.get_rng_state())


def test_weights_are_returned_before_dropout():
    q = torch.randn(1, 2, 6, 8)
    _, weights = attention(q, q, q, "softmax", dropout_p=0.5, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 6))
