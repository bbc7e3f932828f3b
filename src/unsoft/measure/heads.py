"""Similarity of heads. Cosines between the patterns, and between the parameters, of each pair."""

from torch import Tensor

from unsoft.measure.arguments import check_float, check_mask, computed
from unsoft.measure.rows import WeightRows, ratio, unit_rows

_BLOCK = 2**20  # numbers in a block of rows of all heads


def head_similarity(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Similarity of the attention patterns of heads: mean over rows of the cosine between their weights.

        sim_gh = mean_i  a_gi . a_hi / (|a_gi| |a_hi|)

    ``weights`` is (..., heads, queries, keys), the result (..., heads, heads).
    Rows count if both heads have mass in them.

    Answers: are heads redundant, copies of one another?

    Range: -1 (opposite) through 0 (different keys) to 1 (the same up to scale); at least 0 for non-negative
    weights. Heads that share no row with mass: 0.

    >>> import torch
    >>> head_similarity(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[-2.0, 0.0]]]))
    tensor([[ 1.,  0., -1.],
            [ 0.,  1.,  0.],
            [-1.,  0.,  1.]])
    """
    check_float("weights", weights, 3, "(..., heads, queries, keys)")
    check_mask("mask", mask, weights.shape, weights.device)
    mask = None if mask is None else mask.expand(weights.shape)
    heads, queries = weights.shape[-3:-1]
    step = max(1, _BLOCK // max(1, weights[..., :1, :].numel()))
    cosines = shared = computed(weights.new_zeros(*weights.shape[:-3], heads, heads))
    for at in range(0, queries, step):
        block = slice(at, at + step)
        rows = WeightRows(weights[..., block, :], None if mask is None else mask[..., block, :])
        more_cosines, more_shared = cosines_of(rows)
        cosines, shared = cosines + more_cosines, shared + more_shared
    return ratio(cosines, shared)


def cosines_of(rows: WeightRows) -> tuple[Tensor, Tensor]:
    """Return, for each pair of heads, the sum of cosines over rows and the number of rows they share."""
    # A sum of products over keys and rows is one product of matrices.
    unit = unit_rows(rows.values).flatten(-2)
    filled = (~rows.empty).to(unit.dtype)
    return unit @ unit.mT, filled @ filled.mT


def parameter_similarity(parameters: Tensor) -> Tensor:
    """Similarity of the parameters of heads: the cosine between them, each head's taken as one vector.

        sim_gh = w_g . w_h / (|w_g| |w_h|)

    ``parameters`` is (heads, ...), such as a query projection seen as (heads, head_dim, model_dim);
    the result is (heads, heads).

    Answers: did heads learn the same thing?

    Range: -1 to 1; a head whose parameters are all 0: 0.

    >>> import torch
    >>> parameter_similarity(torch.tensor([[3.0, 4.0], [4.0, -3.0], [6.0, 8.0]]))
    tensor([[1., 0., 1.],
            [0., 1., 0.],
            [1., 0., 1.]])
    """
    check_float("parameters", parameters, 2, "(heads, ...)")
    unit = unit_rows(computed(parameters).flatten(1))
    return unit @ unit.mT
