"""Choosing between numbers by their bits: exact, branch-free, several times faster than torch.where on a CPU.

A bit mask is an integer tensor of the width of the numbers, -1 (all bits) to keep and 0 to drop. Unlike a
product with 0 and 1 it drops NaN and Inf too.

>>> x = torch.tensor([1.0, torch.nan, 3.0])
>>> keep_(x, bit_mask(torch.tensor([True, False, True]), torch.float32))
tensor([1., 0., 3.])
"""

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The same memory as integers."""
    return x.view(_INTEGERS[x.dtype])


def bit_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of a bool tensor, for numbers of ``dtype``."""
    return keep.to(_INTEGERS[dtype]).neg_()


def keep_(x: Tensor, mask: Tensor) -> Tensor:
    """Replaces what the mask drops by 0, in place."""
    bits(x).bitwise_and_(mask)
    return x


def keep_or_fill_(x: Tensor, mask: Tensor, filler: Tensor) -> Tensor:
    """Replaces what the mask drops by the number in ``filler`` (zero-dimensional), in place."""
    bits(x).bitwise_and_(mask).bitwise_or_(~mask & bits(filler))
    return x


def flags_to_mask_(flags: Tensor) -> Tensor:
    """Turns 1.0 and 0.0, which comparisons write into a float tensor, into a mask in the same memory."""
    # 1.0 is a positive integer bit pattern and 0.0 is 0: after negation the sign bit alone tells them apart.
    mask = bits(flags)
    return mask.neg_().bitwise_right_shift_(8 * mask.element_size() - 1)
