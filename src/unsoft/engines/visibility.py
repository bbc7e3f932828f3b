"""Visibility: the causal rule and the mask of a call, for the whole call or for one tile of it.

A key j is visible to the query row i if the causal rule allows it (j <= i + offset) and the mask allows it.
With ``L`` queries and ``S`` keys the two usual alignments of the causal rule are

    upper_left, offset 0            lower_right, offset S - L
        keys 0 1 2 3 4                  keys 0 1 2 3 4
    row 0    x . . . .              row 0    x x x . .
    row 1    x x . . .              row 1    x x x x .
    row 2    x x x . .              row 2    x x x x x
"""

import torch
from torch import Tensor


def split_float_mask(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split an additive mask into (visible, bias). -inf and the lowest finite number of its dtype mask.

    Masked entries get the bias 0, so that nothing infinite ever reaches the arithmetic.

    >>> split_float_mask(torch.tensor([0.5, float("-inf"), torch.finfo(torch.float32).min]), torch.float32)
    (tensor([ True, False, False]), tensor([0.5000, 0.0000, 0.0000]))
    """
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden, torch.where(hidden, 0.0, mask).to(dtype)


def causal_tile(rows: slice, keys: slice, offset: int, device: torch.device) -> Tensor:
    """Return the bool tile (rows, keys) of the causal rule.

    >>> causal_tile(slice(0, 2), slice(0, 3), 1, torch.device("cpu"))
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """
    i = torch.arange(rows.start, rows.stop, device=device)
    j = torch.arange(keys.start, keys.stop, device=device)
    return j <= i[:, None] + offset


def visible_tile(
    visible: Tensor | None, offset: int | None, rows: slice, keys: slice, device: torch.device
) -> Tensor | None:
    """Return the visible entries of one tile, broadcastable to (B, H, rows, keys); None = all are visible."""
    tile = None if visible is None else take(visible, rows, keys)
    # The last row sees the most, the first row the least: only tiles that the diagonal cuts need the causal
    # rule.
    if offset is None or keys.stop - 1 <= rows.start + offset:
        return tile
    causal = causal_tile(rows, keys, offset, device)
    return causal if tile is None else tile & causal


def take(broadcast: Tensor, rows: slice, keys: slice) -> Tensor:
    """Return the tile (rows, keys) of a tensor whose last two dimensions may be 1: the same everywhere."""
    rows = rows if broadcast.shape[-2] != 1 else slice(0, 1)
    keys = keys if broadcast.shape[-1] != 1 else slice(0, 1)
    return broadcast[..., rows, keys]


def count_visible(
    visible: Tensor | None,
    offset: int | None,
    length: int,
    keys: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return how many keys each row sees (B|1, H|1, L); at least 1, so that formulas may divide by it.

    A row that sees nothing outputs zero whatever its count, so 1 changes no result.

    >>> count_visible(None, 0, 3, 2, torch.device("cpu"), torch.float32)
    tensor([[[1., 2., 2.]]])
    """
    if visible is None and offset is None:
        return torch.full((1, 1, length), max(keys, 1), dtype=dtype, device=device)
    if visible is None and offset is not None:
        last = torch.arange(offset + 1, offset + 1 + length, dtype=dtype, device=device)
        return last.clamp_(1, max(keys, 1)).view(1, 1, length)
    assert visible is not None
    if offset is None:
        # A mask with one column is the same for every key.
        counts = visible.sum(-1) * (keys if visible.shape[-1] == 1 else 1)
        return counts.expand(*visible.shape[:2], length).clamp(min=1).to(dtype)
    last = torch.arange(offset + 1, offset + 1 + length, device=device).clamp_(0, keys)
    if visible.shape[-1] == 1:
        counts = visible[..., 0] * last
    elif visible.shape[-2] == 1:
        counts = torch.nn.functional.pad(visible[:, :, 0].cumsum(-1), (1, 0))[..., last]
    else:
        counts = visible.tril(offset).sum(-1)
    return counts.clamp(min=1).to(dtype)
