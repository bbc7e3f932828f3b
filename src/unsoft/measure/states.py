"""Collapse and decodability of states. States are (..., tokens, dim); layers can be stacked in front.

A small residual means that the tokens have collapsed. A large one does not mean that they carry information,
since noise has a residual too: ``recovery`` and ``decodability`` distinguish states that have evolved from
states that only differ.

A ``mask`` (..., tokens) is True for tokens that exist. Hidden ones change nothing, even if they are NaN.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.measure.arguments import check_broadcast, check_float, check_mask, computed, wrong_shape
from unsoft.measure.rows import ratio, unit_rows


class Collapse(NamedTuple):
    """Each field is the measure of the same name, one number for each set of states."""

    residual: Tensor
    composite_residual: Tensor
    mean_cosine: Tensor
    effective_rank: Tensor
    stable_rank: Tensor
    recovery: Tensor | None
    """None if no inputs were given."""


def collapse(
    states: Tensor, inputs: Tensor | None = None, mask: Tensor | None = None, tokens: Tensor | None = None
) -> Collapse:
    """All measures of collapse at once; pass ``inputs`` to distinguish evolution from noise.

        (|R|_F, sqrt(|R|_1 |R|_inf), mean cosine, effective rank, stable rank, recovery)    R = X - 1 mean(X)

    Answers: evolution (residual stays, recovery stays), noise (residual stays, recovery at 1/tokens) or
    collapse (residual goes to 0)?

    Range: that of each measure.

    >>> inputs = torch.eye(3)
    >>> layers = torch.stack([inputs, inputs * 0.5, torch.ones(3, 3)])
    >>> by_layer = collapse(layers, inputs)
    >>> by_layer.residual, by_layer.recovery
    (tensor([1.4142, 0.7071, 0.0000]), tensor([1.0000, 1.0000, 0.3333]))
    """
    singular_values = _States(states, mask).singular_values()
    return Collapse(
        residual=residual(states, mask),
        composite_residual=composite_residual(states, mask),
        mean_cosine=mean_cosine(states, mask),
        effective_rank=_effective_rank(singular_values),
        stable_rank=_stable_rank(singular_values),
        recovery=None if inputs is None else recovery(states, inputs, mask, tokens),
    )


def residual(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Size of the states without their mean, in the Frobenius norm.

        |X - 1 mean(X)|_F

    Answers: how far are the tokens from being all the same?

    Range: at least 0; 0 if all tokens are equal.

    >>> residual(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor(1.4142)
    """
    size: Tensor = torch.linalg.vector_norm(_States(states, mask).centred(), dim=(-2, -1))
    return size


def composite_residual(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Size of the states without their mean, in the norm of the papers on rank collapse.

        sqrt(|R|_1 |R|_inf)        R = X - 1 mean(X), |R|_1 largest column sum, |R|_inf largest row sum of |R|

    Answers: does a layer keep the bound |res(attention(X))| <= c |res(X)|^3 of Dong et al. (2021)? The papers
    take the best vector in place of the mean, so their norm is at most this.

    Range: at least 0; 0 if all tokens are equal.

    >>> composite_residual(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))        # sqrt(2 * 1)
    tensor(1.4142)
    """
    left = _States(states, mask).centred().abs()
    if not left.shape[-1] or not left.shape[-2]:
        return left.sum((-2, -1))
    square = left.sum(-2).amax(-1) * left.sum(-1).amax(-1)
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def mean_cosine(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean cosine over all pairs of different tokens.

        mean over i != j of  x_i . x_j / (|x_i| |x_j|)

    Answers: do all tokens point the same way?

    Range: -1/(tokens - 1) to 1. A state of zeros has the cosine 0 to all others; fewer than two tokens: 0.

    >>> mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))        # 0, 1, 0
    tensor(0.3333)
    """
    checked = _States(states, mask)
    unit, count = unit_rows(checked.values), checked.count
    with_itself = unit.square().sum((-2, -1))
    return ratio(unit.sum(-2).square().sum(-1) - with_itself, count * (count - 1))


def effective_rank(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """The number of equally strong directions that would have the same entropy (Roy and Vetterli, 2007).

        exp(-sum p log p)        p = singular values / their sum

    Answers: how many directions do the states use?

    Range: 1 to min(tokens, dim); states of zeros: 0.

    >>> effective_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    tensor(2.)
    """
    return _effective_rank(_States(states, mask).singular_values())


def _effective_rank(values: Tensor) -> Tensor:
    total = values.sum(-1)
    shares = ratio(values, total[..., None])
    # The clamp only keeps log and its slope finite at 0.
    logs = shares.clamp_min(torch.finfo(shares.dtype).tiny).log()
    return torch.where(total == 0, 0.0, (-(shares * logs).sum(-1)).exp())


def stable_rank(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """A rank that small singular values do not change.

        |X|_F^2 / |X|_2^2

    Answers: how many directions are about as strong as the strongest?

    Range: 1 to min(tokens, dim); states of zeros: 0.

    >>> stable_rank(torch.diag(torch.tensor([2.0, 1.0, 0.0])))
    tensor(1.2500)
    """
    return _stable_rank(_States(states, mask).singular_values())


def _stable_rank(values: Tensor) -> Tensor:
    if not values.shape[-1]:
        return values.sum(-1)
    strongest = values[..., :1]
    return ratio(values, strongest.expand_as(values)).square().sum(-1)


def recovery(
    states: Tensor, inputs: Tensor, mask: Tensor | None = None, tokens: Tensor | None = None
) -> Tensor:
    """Share of tokens whose state is nearer to their own input than to any other, both without their means.

        mean_i [ argmax_j cos(x_i - mean(X), e_j - mean(E)) = i ]

    ``inputs`` (..., tokens, dim) are usually the embeddings that entered the first layer. A tie counts as the
    share of right answers in it. With ``tokens`` (..., tokens), integer names of the tokens, any copy of the
    right token is right. Memory is one matrix tokens x tokens. Not differentiable.

    Answers: can each token still be identified among the others?

    Range: 0 to 1. If all states are equal, and on average for noise: 1/tokens (chance). No tokens: 0.

    >>> states = torch.tensor([[5.0, 1.0], [1.0, 5.0], [9.0, 9.0]])
    >>> recovery(states, inputs=torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    tensor(1.)
    """
    check_float("inputs", inputs, 2, "(..., tokens, dim)")
    checked = _States(states, mask).values
    if inputs.shape[-2:] != states.shape[-2:]:
        raise wrong_shape("the last two dimensions (tokens, dim) must match", inputs=inputs, states=states)
    check_broadcast("inputs", inputs, states.shape)
    lead, (count, dim) = states.shape[:-2], states.shape[-2:]
    sets = math.prod(lead)
    names = torch.arange(count, device=states.device) if tokens is None else tokens
    _check_tokens(names, states.shape[:-1])
    exists = torch.ones((), dtype=torch.bool, device=states.device) if mask is None else mask
    with torch.no_grad():
        one_by_one = zip(
            checked.reshape(sets, count, dim),
            computed(inputs).expand(states.shape).reshape(sets, count, dim),
            names.expand(*lead, count).reshape(sets, count),
            exists.expand(*lead, count).reshape(sets, count),
            strict=True,
        )
        shares = [_recovered(x[seen], e.to(x.dtype)[seen], name[seen]) for x, e, name, seen in one_by_one]
    return torch.stack(shares).reshape(lead) if shares else checked.new_zeros(lead)


def decodability(states: Tensor, inputs: Tensor, train: int, ridge: float = 1e-3) -> Tensor:
    """Share of the inputs' variance that a linear map explains from states it was not fitted to.

        R^2 = 1 - |E - F(X)|^2 / |E - mean|^2        on the sequences after the first ``train``

    ``states`` X and ``inputs`` E are (sequences, tokens, dim). Each state is taken with length 1. The map F
    is fitted to the first ``train`` sequences by least squares, with ``ridge`` times the mean variance on
    the diagonal.

    Answers: can the input still be decoded from the states? Noise keeps its rank and loses this.

    Range: 0 to 1; 0 if the map predicts no better than the mean, and for states that are all the same.

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
        problem = "both are (sequences, tokens, dim), of the same sequences and tokens"
        raise wrong_shape(problem, inputs=inputs, states=states)
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
    error = wanted[train:] - ((unit[train:] - middle) @ fitted + mean)
    energy = (wanted[train:] - mean).square().sum()
    explained: Tensor = (1 - error.square().sum() / energy).clamp_min(0)
    return explained.to(computed(states).dtype)


def _recovered(states: Tensor, inputs: Tensor, names: Tensor) -> Tensor:
    if not len(states):
        return states.new_zeros(())
    cosines = unit_rows(states - states.mean(0)) @ unit_rows(inputs - inputs.mean(0)).mT
    # Cosines are at most 1, so rounding errors, and with them ties, have an absolute size.
    tied = cosines >= cosines.amax(-1, keepdim=True) - 16 * torch.finfo(cosines.dtype).eps
    right = tied & (names[:, None] == names)
    return (right.sum(-1).to(states.dtype) / tied.sum(-1).clamp_min(1)).mean()


def _check_tokens(tokens: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype.is_floating_point:
        raise TypeError("measure: argument 'tokens' must be an integer tensor, the names of the tokens")
    check_broadcast("tokens", tokens, shape)


class _States:
    """Checked states (..., tokens, dim) in the dtype to compute in, 0 where hidden."""

    def __init__(self, states: Tensor, mask: Tensor | None) -> None:
        check_float("states", states, 2, "(..., tokens, dim)")
        check_mask("mask", mask, states.shape[:-1], states.device)
        self.exists = mask if mask is None else mask.expand(states.shape[:-1])[..., None]
        self.values = self._visible(computed(states))
        self.count = self.values.new_tensor(states.shape[-2])
        if self.exists is not None:
            self.count = self.exists.sum((-2, -1)).to(self.values.dtype)

    def _visible(self, x: Tensor) -> Tensor:
        return x if self.exists is None else torch.where(self.exists, x, 0.0)

    def centred(self) -> Tensor:
        """Return the states without their mean."""
        left = self.values
        for _ in range(2):  # the second time removes the rounding error of a mean that is large
            mean = left.sum(-2, keepdim=True) / self.count.clamp_min(1)[..., None, None]
            left = self._visible(left - mean)
        return left

    def singular_values(self) -> Tensor:
        """Return the singular values; NaN for states that are not finite, for which the solver raises."""
        bad = ~self.values.detach().isfinite().all(-1).all(-1)[..., None]
        states = torch.where(bad[..., None], 0.0, self.values)
        if states.dtype == torch.float64 or states.requires_grad:
            return torch.where(bad, torch.nan, torch.linalg.svdvals(states))
        # In float64 the squares of float32 are exact, so the roots of eigenvalues are as good as an SVD in
        # float32, in two thirds of its time.
        exact = (states if states.shape[-2] <= states.shape[-1] else states.mT).double()
        squares = torch.linalg.eigvalsh(exact @ exact.mT).flip(-1)
        return torch.where(bad, torch.nan, squares.clamp_min(0.0).sqrt().to(states.dtype))
