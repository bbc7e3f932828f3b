"""The causal rule and masks: tiles and counts against the definition, entry by entry."""

import itertools

import pytest
import torch

from unsoft.engines.call import NO_NEEDS, Call
from unsoft.engines.visibility import count_visible, spans_of, split_float_mask, take, visible_tile

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
@pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
def test_counts_are_what_each_row_sees(shape, offset):
    torch.manual_seed(0)
    mask = None if shape is None else torch.rand(shape) > 0.5
    counts = count_visible(mask, offset, LENGTH, KEYS, CPU, torch.float64)
    expected = everything_visible(mask, offset).sum(-1).clamp(min=1).double()
    assert counts.dtype == torch.float64
    torch.testing.assert_close(counts.expand(BATCH, HEADS, LENGTH), expected, rtol=0, atol=0)


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


def test_counts_in_spans_are_what_each_row_sees():
    mask = torch.rand(BATCH, HEADS, LENGTH, KEYS, generator=torch.Generator().manual_seed(0)) > 0.5
    spans = spans_of(LENGTH, KEYS, 1, window=(2, None), key_lengths=torch.tensor([2, 6]), device=CPU)
    tile = visible_tile(call_of(1, spans), mask, slice(None), slice(0, LENGTH), slice(0, KEYS))
    counts = count_visible(mask, 1, LENGTH, KEYS, CPU, torch.float64, spans)
    assert torch.equal(counts, tile.sum(-1).clamp(min=1).double())


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
