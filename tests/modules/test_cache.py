"""Caches: contents survive growth, reordering and restoring; wrong shapes raise."""

import pytest
import torch

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
