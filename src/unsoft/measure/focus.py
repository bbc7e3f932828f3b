"""Can it focus? Seven answers, all of the sizes |a|, so that signed and unnormalised weights have them too.

n is the number of keys that a row sees and p_j = |a_j| / sum |a|. A row without mass (all weights 0) prefers
no key: it counts as flat, like the limit of c, c, ..., c for c to 0, and has no share of mass anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.measure.arguments import check_count
from unsoft.measure.rows import Rows, measure_rows, ratio, row_measure

__all__ = [
    "distance_to_uniform",
    "effective_keys",
    "entropy",
    "participation",
    "sink_mass",
    "sparsity",
    "top_mass",
]


def sparsity(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """How flat a row is, without regard to its scale: small means that few keys hold the weight.

        S = mean |a| / sqrt(mean a^2)        means over the n visible keys

    Answers: can it focus? (Su Jianlin, 2023, https://spaces.ac.cn/archives/9889)

    Range: 1/sqrt(n) (one key has all) to 1 (all sizes equal). Rows without mass: 1, they are flat.

    >>> sparsity(torch.tensor([[0.0, 3.0, 0.0, 0.0], [0.5, -0.5, 0.5, -0.5]]))
    tensor([0.5000, 1.0000])
    """
    return measure_rows(sparsity_of, weights, mask)


def entropy(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy of the sizes, in nats.

        H = -sum p log p

    Answers: how undecided is the row?

    Range: 0 (one key) to log n (all sizes equal). Rows without mass: log n; rows that see nothing: 0.

    >>> entropy(torch.tensor([[0.5, -0.5, 0.0], [1.0, 0.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return measure_rows(entropy_of, weights, mask)


def effective_keys(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """The number of equally strong keys that would have the same entropy.

        exp(H)

    Answers: how many keys does the row really use?

    Range: 1 (one key) to n (all sizes equal). Rows without mass: n; rows that see nothing: 0.

    >>> effective_keys(torch.tensor([0.5, -0.5, 0.0]))
    tensor(2.)
    """
    return measure_rows(effective_keys_of, weights, mask)


def participation(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """The participation ratio: a count of keys in which strong ones matter more than in the effective keys.

        (sum |a|)^2 / sum a^2  =  n S^2

    Answers: how many keys carry the bulk of the weight?

    Range: 1 (one key) to n (all sizes equal). Rows without mass: n; rows that see nothing: 0.

    >>> participation(torch.tensor([3.0, 1.0, 0.0]))
    tensor(1.6000)
    """
    return measure_rows(participation_of, weights, mask)


def top_mass(weights: Tensor, mask: Tensor | None = None, k: int = 1) -> Tensor:
    """Share of the k largest sizes.

        sum of the k largest |a| / sum |a|

    Answers: how much would be kept if only k keys were?

    Range: min(k/n, 1) (all sizes equal) to 1. Rows without mass: 0.

    >>> top_mass(torch.tensor([0.1, -0.6, 0.3]), k=2)
    tensor(0.9000)
    """
    check_count("k", k, 1)
    return measure_rows(lambda rows: top_mass_of(rows, k), weights, mask)


def sink_mass(weights: Tensor, mask: Tensor | None = None, sinks: int = 1) -> Tensor:
    """Share of the first ``sinks`` keys of the sequence, where softmax parks attention that it does not need.

        sum over j < sinks of |a_j| / sum |a|

    Answers: is the first token an attention sink?

    Range: 0 to 1. Rows without mass: 0. A hidden sink holds nothing.

    >>> sink_mass(torch.tensor([0.6, -0.3, 0.1]))
    tensor(0.6000)
    """
    check_count("sinks", sinks, 1)
    return measure_rows(lambda rows: sink_mass_of(rows, sinks), weights, mask)


def distance_to_uniform(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Total variation distance between the sizes and the uniform row.

        1/2 sum |p - 1/n|

    Answers: what share of the mass would have to move to make the row flat?

    Range: 0 (all sizes equal) to 1 - 1/n (one key). Rows without mass: 0.

    >>> distance_to_uniform(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor(0.7500)
    """
    return measure_rows(distance_to_uniform_of, weights, mask)


@row_measure
def sparsity_of(rows: Rows) -> Tensor:
    spread = torch.where(rows.empty, 1.0, rows.count * rows.energy).sqrt()
    return torch.where(rows.empty, 1.0, rows.mass / spread)


@row_measure
def entropy_of(rows: Rows) -> Tensor:
    return rows.entropy


@row_measure
def effective_keys_of(rows: Rows) -> Tensor:
    return torch.where(rows.count == 0, 0.0, rows.entropy.exp())


@row_measure
def participation_of(rows: Rows) -> Tensor:
    return ratio(rows.mass.square(), rows.energy, otherwise=rows.count)


@row_measure
def top_mass_of(rows: Rows, k: int = 1) -> Tensor:
    return rows.per_mass(largest_sum(rows.relative, k))


@row_measure
def sink_mass_of(rows: Rows, sinks: int = 1) -> Tensor:
    return rows.per_mass(rows.relative[..., :sinks].sum(-1))


@row_measure
def distance_to_uniform_of(rows: Rows) -> Tensor:
    # What lies above the mean weighs as much as what lies below; hidden keys, at 0, are not above.
    mean = rows.mass / rows.count.clamp_min(1)
    return rows.per_mass((rows.relative - mean[..., None]).relu().sum(-1))


def largest_sum(sizes: Tensor, k: int) -> Tensor:
    """Sum of the k largest numbers of each row.

    The k largest of a row lie in those k columns of its (height, width) arrangement that have the largest
    maxima, so only k * height of them are sorted, not the whole row.

    >>> largest_sum(torch.tensor([4.0, 1.0, 5.0]), 2)
    tensor(9.)
    """
    keys = sizes.shape[-1]
    if k >= keys:
        return sizes.sum(-1)
    if k == 1:
        return sizes.amax(-1)
    height = max(1, round((keys / k) ** 0.5))
    width = keys // height
    if height == 1 or width <= k:
        return sizes.topk(k, sorted=False).values.sum(-1)
    table = sizes[..., : height * width].unflatten(-1, (height, width))
    columns = table.amax(-2).topk(k, sorted=False).indices
    candidates = table.gather(-1, columns[..., None, :].expand(*columns.shape[:-1], height, k)).flatten(-2)
    candidates = torch.cat([candidates, sizes[..., height * width :]], -1)
    return candidates.topk(k, sorted=False).values.sum(-1)
