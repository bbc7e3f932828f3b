"""The causal rule and masks: tiles and counts against the definition, entry by entry."""

import itertools

import pytest
import torch

from unsoft.engines.call import NO_NEEDS, Call
from unsoft.engines.visibility import (
    count_visible,
    key_spans,
    spans_of,
    split_float_mask,
    take,
    visible_tile,
)

CPU = torch.device("cpu")
BATCH, HEADS, LENGTH, KEYS = 2, 3, 5, 7
SHAPES = list(itertools.product((1, BATCH), (1, HEADS), (1, LENGTH), (1, KEYS)))
OFFSETS = (None, 0, KEYS - LENGTH, -2, -9, 20)


def call_of(offset: int | None, spans: torch.Tensor | None = None) -> Call:
    q, k = torch.empty(BATCH, HEADS, LENGTH, 1), torch.empty(BATCH, HEADS, KEYS, 1)
    return Call(q, k, k, NO_NEEDS, torch.empty(0, HEADS), causal_offset=offset, spans=spans)


def everything_visible(mask: torch.Tensor | None, offset: int | None) -> torch.Tensor:
    seen = torch.ones(BATCH, HEADS, LENGTH, KEYS, dtype=torch.bool)
    for i, j in itertools.product(range(LENGTH), range(KEYS)):
        seen[:, :, i, j] &= offset is None or j <= i + offset
    return seen if mask is None else seen & mask


@pytest.mark.parametrize("offset", OFFSETS)
def test_counts_are_what_each_row_sees(offset):
    torch.manual_seed(0)
    for shape in (None, *SHAPES):
        mask = None if shape is None else torch.rand(shape) > 0.5
        counts = count_visible(mask, offset, LENGTH, KEYS, CPU, torch.float64)
        expected = everything_visible(mask, offset).sum(-1).clamp(min=1).double()
        assert counts.dtype == torch.float64
        assert torch.equal(counts.expand(BATCH, HEADS, LENGTH), expected), shape


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    "shape", [None, (1, 1, 1, KEYS), (BATCH, 1, LENGTH, 1), (BATCH, HEADS, LENGTH, KEYS)], ids=str
)
def test_tiles_are_parts_of_the_whole(shape, offset):
    torch.manual_seed(1)
    mask = None if shape is None else torch.rand(shape) > 0.5
    whole = everything_visible(mask, offset)
    for r, c in itertools.product((slice(0, 2), slice(2, 5)), (slice(0, 3), slice(3, 7), slice(6, 7))):
        expected = whole[..., r, c]
        for spans in (None, spans_of(LENGTH, KEYS, offset, device=CPU)):
            tile = visible_tile(call_of(offset, spans), mask, slice(None), r, c)
            seen = torch.ones_like(expected) if tile is None else tile.expand_as(expected)
            assert torch.equal(seen, expected)


def test_a_tile_before_the_diagonal_needs_no_causal_rule():
    assert visible_tile(call_of(0), None, slice(None), slice(4, 8), slice(0, 5)) is None
    assert visible_tile(call_of(0), None, slice(None), slice(4, 8), slice(0, 6)) is not None


def visible_in_spans(length, keys, *, causal, lower_right, before, window, documents, key_lengths):
    """The definition of :func:`spans_of`, one entry at a time: (batch, length, keys)."""
    seen = torch.zeros(BATCH, length, keys, dtype=torch.bool)
    for b, i in itertools.product(range(BATCH), range(length)):
        same_rows, same_keys = range(length), range(keys)
        if documents is not None:
            rows, columns = (x[b].tolist() for x in documents)
            same_rows = [x for x in same_rows if rows[x] == rows[i]]
            same_keys = [x for x in same_keys if columns[x] == rows[i]]
        own = i - same_rows[0]  # the position of the row's own key among the keys of its document
        if lower_right or not (causal or documents):
            own += len(same_keys) - len(same_rows)
        for position, j in enumerate(same_keys):
            seen[b, i, j] = (
                (not causal or position < own or (position == own and not before))
                and (window[0] is None or position >= own - window[0])
                and (window[1] is None or position <= own + window[1])
                and (key_lengths is None or j < key_lengths[b])
            )
    return seen


DOCUMENTS = (
    torch.tensor([[0, 0, 1, 1, 1, 3, 3], [0, 1, 1, 1, 2, 2, 2]]),  # of queries; no query of 2, no key of 3
    torch.tensor([[0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 2, 2]]),
)


@pytest.mark.parametrize("alignment", ["none", "upper left", "lower right"])
@pytest.mark.parametrize("packed", [False, True])
def test_spans_counts_and_spans_of_keys_against_the_definition(alignment, packed):
    sizes, windows = ((5, 7), (7, 5), (7, 7)), ((None, None), (1, None), (None, 1), (2, 0))
    lengths = (None, torch.tensor([2, 6]))
    for (length, keys), window, key_lengths in itertools.product(sizes, windows, lengths):
        causal, lower_right = alignment != "none", alignment == "lower right"
        documents = (DOCUMENTS[0][:, :length], DOCUMENTS[1][:, :keys]) if packed else None
        options = {
            "lower_right": lower_right,
            "before": causal and window == (None, 1),
            "window": window,
            "documents": documents,
            "key_lengths": key_lengths,
        }
        offset = (keys - length if lower_right else 0) if causal else None
        spans = spans_of(length, keys, offset, device=CPU, **options).expand(BATCH, -1, -1)
        seen = visible_in_spans(length, keys, causal=causal, **options)
        i, j = torch.arange(length), torch.arange(keys)
        assert torch.equal((j >= spans[..., :1]) & (j < spans[..., 1:]), seen), options
        by_key = key_spans(spans, keys)
        assert torch.equal((i >= by_key[..., :1]) & (i < by_key[..., 1:]), seen.mT), options
        mask = torch.rand(BATCH, HEADS, length, keys, generator=torch.Generator().manual_seed(0)) > 0.5
        for own in (None, mask, mask[..., :1]):
            counts = count_visible(own, offset, length, keys, CPU, torch.float64, spans)
            expected = (seen[:, None] if own is None else seen[:, None] & own).sum(-1)
            assert torch.equal(counts, expected.clamp(min=1).double()), options


def test_take_leaves_broadcast_dimensions():
    x = torch.arange(7.0).view(1, 7)
    assert torch.equal(take(x, slice(3, 5), slice(2, 4)), torch.tensor([[2.0, 3.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_minus_infinity_and_the_lowest_number_mean_masked(dtype):
    lowest = torch.finfo(dtype).min
    mask = torch.tensor([0.0, -torch.inf, lowest, lowest / 2, torch.nan, torch.inf], dtype=dtype)
    visible, bias = split_float_mask(mask, torch.float64)
    assert visible.tolist() == [True, False, False, True, True, True]
    assert bias.dtype == torch.float64
    assert bias[:4].tolist() == [0.0, 0.0, 0.0, lowest / 2]
    assert bias[4].isnan() and bias[5] == torch.inf


def test_masked_entries_of_a_float_mask_get_gradient_zero():
    mask = torch.tensor([0.5, -torch.inf], requires_grad=True)
    _, bias = split_float_mask(mask, torch.float32)
    bias.square().sum().backward()
    assert mask.grad.tolist() == [1.0, 0.0]
