"""Can the input still be read from the states? Held-out linear decoding tells evolution from noise."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.measure.arguments import check_float, computed
from unsoft.measure.rows import unit_rows

__all__ = ["decodability"]


def decodability(states: Tensor, inputs: Tensor, train: int, ridge: float = 1e-3) -> Tensor:
    """Share of the inputs' variance that a linear map finds in states it was not fitted to.

        R^2 = 1 - |E - F(X)|^2 / |E - mean|^2        on the sequences after the first ``train``

    ``states`` X and ``inputs`` E are (sequences, tokens, dim). Each state is taken with length 1. The map F
    is fitted to the first ``train`` sequences by least squares, with ``ridge`` times the mean variance on
    the diagonal.

    Answers: is what came in still there, whatever a layer has turned it into? States that only differ, as
    noise does, keep their rank and lose this.

    Range: 0 to 1; 0 for what a mean would guess as well, and for states that are all the same.

    >>> inputs = torch.randn(8, 32, 4, generator=torch.Generator().manual_seed(0))
    >>> turned = inputs[..., [2, 0, 3, 1]]
    >>> bool(decodability(turned, inputs, train=6) > 0.7)
    True
    >>> decodability(torch.ones(8, 32, 4), inputs, train=6)
    tensor(0.)
    """
    for name, x in (("states", states), ("inputs", inputs)):
        check_float(name, x, 3, "(sequences, tokens, dim)")
    if states.shape[:2] != inputs.shape[:2] or states.dim() != 3:
        raise ValueError(
            f"measure: argument 'inputs' has shape {tuple(inputs.shape)}, 'states' {tuple(states.shape)};"
            f" both are"
            " (sequences, tokens, dim), of the same sequences and tokens"
        )
    if not 0 < train < len(states):
        raise ValueError(
            f"measure: argument 'train' is {train}; of {len(states)} sequences some must be left"
        )
    unit, wanted = unit_rows(computed(states)).double(), computed(inputs).double()
    x, e = unit[:train].flatten(0, 1), wanted[:train].flatten(0, 1)
    middle, mean = x.mean(0), e.mean(0)
    gram = (x - middle).mT @ (x - middle)
    if not gram.any():
        return computed(states).new_zeros(())
    more = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    fitted = torch.linalg.solve(gram + more, (x - middle).mT @ (e - mean))
    left = wanted[train:] - ((unit[train:] - middle) @ fitted + mean)
    energy = (wanted[train:] - mean).square().sum()
    found: Tensor = (1 - left.square().sum() / energy).clamp_min(0)
    return found.to(computed(states).dtype)
