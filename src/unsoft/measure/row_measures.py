"""Focus and sign of the rows of attention weights.

Here n is the number of keys that a row sees and p_j = |a_j| / sum |a|. Measures of focus use the sizes |a|,
so they apply to signed and unnormalised weights too. A row without mass (all weights 0) prefers no key: it
counts as flat, like the limit of c, c, ..., c for c to 0, and has no share of mass anywhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.measure.rows import WeightRows, measure_rows, ratio


class Summary(NamedTuple):
    """Each field is the measure of the same name with its default arguments, one number for each row."""

    sparsity: Tensor
    entropy: Tensor
    effective_keys: Tensor
    participation: Tensor
    top_mass: Tensor
    sink_mass: Tensor
    distance_to_uniform: Tensor
    negative_share: Tensor
    row_sum: Tensor
    cancellation: Tensor


def sparsity(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Flatness of a row, independent of its scale: small if few keys have most of the weight.

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
    return measure_rows(lambda rows: rows.entropy, weights, mask)


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
    whole_number("measure", "k", k)
    return measure_rows(lambda rows: top_mass_of(rows, k), weights, mask)


def sink_mass(weights: Tensor, mask: Tensor | None = None, sinks: int = 1) -> Tensor:
    """Share of the first ``sinks`` keys of the sequence, where softmax puts attention that it does not need.

        sum over j < sinks of |a_j| / sum |a|

    Answers: is the first token an attention sink?

    Range: 0 to 1. Rows without mass: 0. A hidden sink holds nothing.

    >>> sink_mass(torch.tensor([0.6, -0.3, 0.1]))
    tensor(0.6000)
    """
    whole_number("measure", "sinks", sinks)
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


def negative_share(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the mass that is negative.

        sum of |a| over a < 0 / sum |a|

    Answers: how much of the row subtracts?

    Range: 0 (softmax, always) to 1. Rows without mass: 0.

    >>> negative_share(torch.tensor([0.5, -0.25, -0.25]))
    tensor(0.5000)
    """
    return measure_rows(negative_share_of, weights, mask)


def row_sum(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of the weights.

        sum a

    Answers: does the row average (1), attend to nothing (0) or point away (below 0)?

    Range: any number; rows that see nothing: 0. Unlike the others it depends on the scale of the row.

    >>> row_sum(torch.tensor([0.5, -0.25, 0.0]))
    tensor(0.2500)
    """
    return measure_rows(row_sum_of, weights, mask)


def cancellation(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Fraction of the mass that positive and negative weights cancel.

        1 - |sum a| / sum |a|

    Answers: does the row compare keys with each other rather than collect them?

    Range: 0 (one sign) to 1 (both signs balance). Rows without mass: 0, nothing is cancelled.

    >>> cancellation(torch.tensor([[0.5, -0.5], [0.5, 0.5]]))
    tensor([1., 0.])
    """
    return measure_rows(cancellation_of, weights, mask)


def summary(weights: Tensor, mask: Tensor | None = None) -> Summary:
    """All measures of focus and sign at once, faster than one after the other.

        (S, H, exp(H), ..., 1 - |sum a| / sum |a|)

    Answers: what do the rows of this head look like?

    Range: that of each measure.

    >>> rows = summary(torch.tensor([[0.5, -0.5, 0.0, 0.0]]))
    >>> rows.effective_keys, rows.cancellation
    (tensor([2.]), tensor([1.]))
    """
    return Summary(*measure_rows(summary_of, weights, mask).unbind(-1))


def summary_of(rows: WeightRows) -> Tensor:
    """Return the fields of :class:`Summary`, side by side (..., fields)."""
    fields = Summary(
        sparsity=sparsity_of(rows),
        entropy=rows.entropy,
        effective_keys=effective_keys_of(rows),
        participation=participation_of(rows),
        top_mass=top_mass_of(rows),
        sink_mass=sink_mass_of(rows),
        distance_to_uniform=distance_to_uniform_of(rows),
        negative_share=negative_share_of(rows),
        row_sum=row_sum_of(rows),
        cancellation=cancellation_of(rows),
    )
    return torch.stack(fields, -1)


def sparsity_of(rows: WeightRows) -> Tensor:
    spread = torch.where(rows.empty, 1.0, rows.count * rows.energy).sqrt()
    return torch.where(rows.empty, 1.0, rows.mass / spread)


def effective_keys_of(rows: WeightRows) -> Tensor:
    return torch.where(rows.count == 0, 0.0, rows.entropy.exp())


def participation_of(rows: WeightRows) -> Tensor:
    return ratio(rows.mass.square(), rows.energy, otherwise=rows.count)


def top_mass_of(rows: WeightRows, k: int = 1) -> Tensor:
    return rows.per_mass(largest_sum(rows.relative, k))


def sink_mass_of(rows: WeightRows, sinks: int = 1) -> Tensor:
    return rows.per_mass(rows.relative[..., :sinks].sum(-1))


def distance_to_uniform_of(rows: WeightRows) -> Tensor:
    # Deviations above and below the mean have equal sums; hidden keys, at 0, are not above it.
    mean = rows.mass / rows.count.clamp_min(1)
    return rows.per_mass((rows.relative - mean[..., None]).relu().sum(-1))


def negative_share_of(rows: WeightRows) -> Tensor:
    return rows.per_mass(rows.negative)


def row_sum_of(rows: WeightRows) -> Tensor:
    return rows.values.sum(-1)


def cancellation_of(rows: WeightRows) -> Tensor:
    return 1 - rows.per_mass(rows.signed.sum(-1).abs(), otherwise=1.0)


def largest_sum(sizes: Tensor, k: int) -> Tensor:
    """Return the sum of the k largest numbers of each row.

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
