"""Rows of attention weights, processed in blocks that fit the cache.

A weight tensor may be as large as memory allows, so nothing here makes a second one: each block of rows is
measured completely before the next. Sums of squares and logarithms are taken of ``relative`` sizes, so that a
measure that does not depend on the scale of a row does not overflow or underflow with it either.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsoft.measure.arguments import check_float, check_mask, computed

BLOCK = 2**18  # numbers in a block; several blocks of float32 fit a second-level cache


class WeightRows:
    """A block of rows (..., keys). Quantities that several measures need are computed on first use.

    ``relative`` sizes are |a| / peak, where the peak is the largest |a| of a row.
    """

    def __init__(self, weights: Tensor, visible: Tensor | None) -> None:
        weights = computed(weights)
        self.values = weights if visible is None else torch.where(visible, weights, 0.0)
        """The weights, 0 where hidden."""
        self.visible = visible

    @cached_property
    def sizes(self) -> Tensor:
        """|a|."""
        return self.values.abs()

    @cached_property
    def peak(self) -> Tensor:
        """The largest |a| of each row (..., 1); 1 in rows without mass.

        A constant for autograd: no measure that divides by it depends on the scale of the row.
        """
        if not self.sizes.shape[-1]:
            return self.sizes.new_ones(*self.sizes.shape[:-1], 1)
        peak = self.sizes.detach().amax(-1, keepdim=True)
        return torch.where(peak == 0, 1.0, peak)

    @cached_property
    def relative(self) -> Tensor:
        """|a| / peak."""
        return self.sizes / self.peak

    @cached_property
    def signed(self) -> Tensor:
        """a / peak."""
        return self.values / self.peak

    @cached_property
    def mass(self) -> Tensor:
        """Sum of relative sizes: at least 1, or 0 in rows without mass."""
        return self.relative.sum(-1)

    @cached_property
    def energy(self) -> Tensor:
        """Sum of squares of relative sizes: at least 1, or 0 in rows without mass."""
        length: Tensor = torch.linalg.vector_norm(self.relative, dim=-1)  # squares are not written down
        return length.square()

    @cached_property
    def log_sum(self) -> Tensor:
        """Sum of r log r over relative sizes r."""
        # The clamp only keeps log and its slope finite at 0, where size * log is 0 anyway.
        logs = self.relative.clamp_min(torch.finfo(self.relative.dtype).tiny).log()
        return (logs * self.relative).sum(-1)

    @cached_property
    def negative(self) -> Tensor:
        """Sum of relative sizes over negative weights."""
        return -self.signed.clamp(max=0).sum(-1)

    @cached_property
    def first(self) -> Tensor:
        """Relative size of the first key of the sequence."""
        return self.relative[..., :1].sum(-1)

    @cached_property
    def count(self) -> Tensor:
        """Number of keys that each row sees."""
        if self.visible is None:
            return self.values.new_tensor(self.values.shape[-1])
        return self.visible.sum(-1).to(self.values.dtype)

    @cached_property
    def empty(self) -> Tensor:
        """True for rows without mass: all visible weights are 0, or nothing is visible."""
        return self.mass == 0

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the sizes, in nats."""
        mean_log = self.per_mass(self.log_sum)
        return torch.where(self.empty, self.count.clamp_min(1), self.mass).log() - mean_log

    def per_mass(self, part: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
        """Return ``part`` (in units of the peak) over the mass; ``otherwise`` in rows without mass."""
        return ratio(part, self.mass, otherwise)


def ratio(part: Tensor, whole: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
    """Return part / whole, and ``otherwise`` where the whole is 0; gradients are finite there too.

    >>> ratio(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    return torch.where(whole == 0, otherwise, part / torch.where(whole == 0, 1.0, whole))


def unit_rows(rows: Tensor) -> Tensor:
    """Return the rows scaled to length 1; rows of zeros stay zeros.

    >>> unit_rows(torch.tensor([[3.0, -4.0], [0.0, 0.0]]))
    tensor([[ 0.6000, -0.8000],
            [ 0.0000,  0.0000]])
    """
    block = WeightRows(rows, None)
    return block.signed / torch.where(block.empty, 1.0, block.energy).sqrt()[..., None]


def measure_rows(function: Callable[[WeightRows], Tensor], weights: Any, mask: Any) -> Tensor:
    """Return ``function`` of the rows of ``weights`` (..., keys), checked; ``mask`` is True where visible."""
    check_float("weights", weights, 1, "(..., queries, keys)")
    check_mask("mask", mask, weights.shape, weights.device)
    return over_rows(lambda block, visible: function(WeightRows(block, visible)), weights, mask)


def over_rows(function: Callable[..., Tensor], weights: Tensor, *beside: Tensor | None) -> Tensor:
    """Return ``function(block, *beside)`` of blocks of rows, concatenated.

    ``beside`` are tensors that broadcast to ``weights``, or None; they are split alike, never copied. The
    result of ``function`` begins with the dimensions of its block except the last.

    >>> scale = torch.tensor([[1.0], [2.0]])
    >>> over_rows(lambda block, scale: (block * scale).sum(-1), torch.ones(2, 3), scale)
    tensor([3., 6.])
    """
    return _walk(function, weights, [None if x is None else x.expand(weights.shape) for x in beside])


def _walk(function: Callable[..., Tensor], weights: Tensor, beside: list[Tensor | None]) -> Tensor:
    shape, size = weights.shape, weights.numel()
    if size <= BLOCK or len(shape) == 1:
        return function(weights, *beside)
    inner = size // shape[0]
    if inner > BLOCK and len(shape) > 2:
        parts = ((weights[at], [x if x is None else x[at] for x in beside]) for at in range(shape[0]))
        return torch.stack([_walk(function, *part) for part in parts])
    step = max(1, BLOCK // inner)
    cuts = [slice(at, at + step) for at in range(0, shape[0], step)]
    return torch.cat([function(weights[cut], *(x if x is None else x[cut] for x in beside)) for cut in cuts])
