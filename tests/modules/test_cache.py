"""Caches: contents survive growth, reordering and restoring; wrong shapes raise."""

import copy

import pytest
import torch

import unsoft
from unsoft.engines.native.step import Step, quantised
from unsoft.modules.cache import KeyValueCache, StateCache


def tokens(count, batch=2, start=0):
    """Keys (batch, 1, count, 3) that are all different."""
    return start + torch.arange(batch * count * 3.0).view(batch, 1, count, 3)


def test_keys_and_values_survive_growth():
    cache = KeyValueCache(batch=2)
    pieces = [tokens(size, start=100 * size) for size in (1, 50, 3, 200)]
    for piece in pieces:
        keys, values = cache.append(piece, -piece)
    assert torch.equal(keys, torch.cat(pieces, 2)) and torch.equal(values, -keys)
    assert cache.length == 254 and cache.nbytes >= 2 * keys.nbytes


def test_reordering_may_change_the_batch():
    cache = KeyValueCache(batch=2)
    keys, _ = cache.append(tokens(4), tokens(4))
    cache.reorder(torch.tensor([1, 1, 0]))
    more = tokens(1, batch=3, start=1000)
    longer, _ = cache.append(more, more)
    assert torch.equal(longer, torch.cat([keys[[1, 1, 0]], more], 2))


def test_a_restored_cache_continues_from_the_snapshot():
    cache = KeyValueCache(batch=2)
    cache.append(tokens(4), tokens(4))
    before = cache.snapshot()
    cache.append(tokens(2, start=500), tokens(2))
    cache.restore(before)
    keys, _ = cache.append(tokens(1, start=900), tokens(1))
    assert torch.equal(keys, torch.cat([tokens(4), tokens(1, start=900)], 2)) and cache.length == 5


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (tokens(1, batch=3), tokens(1, batch=3), ValueError, "with a batch of 2"),
        (tokens(1)[..., :2], tokens(1), ValueError, "heads of width 3"),
        (tokens(1).double(), tokens(1), TypeError, "the cache holds torch.float32"),
        (tokens(1), tokens(2), ValueError, "batch, heads and length must match"),
    ],
)
def test_tokens_that_do_not_fit_raise(key, value, error, message):
    cache = KeyValueCache(batch=2)
    cache.append(tokens(1), tokens(1))
    with pytest.raises(error, match=message):
        cache.append(key, value)


def test_a_state_counts_tokens_and_visible_keys():
    cache = StateCache(batch=2)
    present = torch.tensor([[[True, False, True]], [[True, True, True]]])
    assert cache.count(present).tolist() == [[[1, 1, 2]], [[1, 2, 3]]]
    assert cache.count(present).tolist() == [[[3, 3, 4]], [[4, 5, 6]]]
    cache.advance(torch.arange(2.0), 3)
    cache.advance(torch.arange(2.0), 1)
    cache.reorder(torch.tensor([1, 0, 1]))
    assert cache.length == 4 and cache.batch == 3
    assert cache.state.tolist() == [1.0, 0.0, 1.0] and cache.seen.tolist() == [[6], [4], [6]]


def rounded_to_steps(x):
    """What an int8 cache holds of rows: multiples of a 127th of their largest number, in float64."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).float().double()
    return torch.where(scale > 0, (x.double() / scale).round() * scale, 0.0)


def new_tokens(count, width, dtype, heads=6, kv_heads=2):
    # Multiples of 1/8 and a largest number of 127/8: no number lies between two steps.
    query, key, value = (
        torch.randint(-100, 101, (2, h, count, width), dtype=dtype) / 8 for h in (heads, kv_heads, kv_heads)
    )
    for x in (key, value):
        x[..., 0] = 127 / 8
        x *= torch.randint(1, 5, (*x.shape[:3], 1)) / 4
    return query / 4, key, value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 64])
@pytest.mark.parametrize("name", ["softmax", "sinh", "relu2", "gpam"])
@torch.no_grad()
def test_int8_decoding_attends_to_what_is_stored(name, width, dtype):
    torch.manual_seed(0)
    layer = unsoft.mechanism(name, heads=6, head_dim=width).to(dtype)
    exact = copy.deepcopy(layer).double()
    cache, keys, values = layer.new_cache(2).quantise("int8"), [], []
    for count in (70, 1, 1, 3, 1, 60, 1):  # the first buffer has room for 140
        query, key, value = new_tokens(count, width, dtype)
        out = layer(query, key + 0.01, value - 0.01, is_causal=True, enable_gqa=True, cache=cache)
        keys.append(rounded_to_steps(key + 0.01)), values.append(rounded_to_steps(value - 0.01))
        stored = torch.cat(keys, 2), torch.cat(values, 2)
        expected = exact(query.double(), *stored, is_causal="lower_right", enable_gqa=True, engine="dense")
        assert (out - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()
        assert count > 1 or isinstance(cache.step, Step) or name == "gpam"
    assert cache.length == 137


@torch.no_grad()
def test_int8_rows_are_the_same_from_compiled_code():
    torch.manual_seed(0)
    layer = unsoft.mechanism("softmax", heads=2, head_dim=7)
    rows = torch.randn(1, 2, 12, 7) * torch.logspace(-38, 38, 12)[:, None]
    rows[0, 0, 3:6] = torch.tensor([torch.nan, torch.inf, 0.0])[:, None]
    cache = layer.new_cache(1).quantise("int8")
    for token in rows.split(1, dim=2):
        layer(torch.zeros_like(token), token, token, is_causal=True, cache=cache)
    for stored in cache.tensors:
        assert torch.equal(
            stored[:, :, :12, : 4 + 7], quantised(rows)[..., : 4 + 7]
        )  # then a byte of padding


@torch.no_grad()
def test_an_int8_cache_is_copied_reordered_and_restored():
    torch.manual_seed(0)
    layer = unsoft.mechanism("cog", heads=6, head_dim=16)
    cache = layer.new_cache(2).quantise("int8")
    layer(*new_tokens(9, 16, torch.float32), is_causal=True, enable_gqa=True, cache=cache)
    layer(*new_tokens(1, 16, torch.float32), is_causal=True, enable_gqa=True, cache=cache)
    token = new_tokens(1, 16, torch.float32)

    def next_step(held, tensors=token):
        return layer(*tensors, is_causal=True, enable_gqa=True, cache=held)

    before, copied = cache.snapshot(), copy.deepcopy(cache)
    out = next_step(cache)
    assert torch.equal(next_step(copied), out)
    cache.restore(before)
    assert cache.length == 10 and torch.equal(next_step(cache), out)
    cache.restore(before)
    cache.reorder(torch.tensor([1, 0, 1]))
    swapped = next_step(cache, [x[[1, 0, 1]] for x in token])
    assert torch.allclose(swapped, out[[1, 0, 1]], rtol=1e-5, atol=1e-6)
    assert cache.nbytes < 0.35 * 3 * cache.tensors[0].shape[2] * 2 * 2 * 16 * 4


@pytest.mark.parametrize("name", ["linear-elu1", "deltanet", "magnitude", "differential", "fox", "density"])
def test_caches_that_hold_more_than_keys_and_values_are_not_quantised(name):
    with pytest.raises(ValueError, match="argument 'dtype'.*'int8'"):
        unsoft.mechanism(name, heads=2, head_dim=4).new_cache(1).quantise("int8")


def test_wrong_uses_of_int8_caches_raise():
    layer = unsoft.nn.MultiheadAttention(8, 2, mechanism="cog", batch_first=True)
    with pytest.raises(ValueError, match="argument 'dtype' must be 'int8', not 'int4'"):
        layer.new_cache(1, dtype="int4")
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="no_grad"):
        layer(x, x, x, is_causal=True, need_weights=False, cache=layer.new_cache(1, dtype="int8"))
    plain = layer.new_cache(1)
    layer(x, x, x, is_causal=True, need_weights=False, cache=plain)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        plain.quantise("int8")
