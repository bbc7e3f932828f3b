"""Rows of finite length: from which length on the results for infinitely many keys apply."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.theory.arguments import Mechanism, Numbers, Params, read_at_least, read_dim, read_logits
from unsoft.theory.weight import Weight, formula_of, limit_spread

_AT_ONCE = 2**20  # logits


class Empirical(NamedTuple):
    """Mean over random rows, and its standard error."""

    mean: float
    error: float


def row_sparsity(log_size: Tensor) -> Tensor:
    """Return mean|a| / sqrt(mean a^2) of rows given as log|a|: at least 1/sqrt(n), or 0 for a row of zeros.

    >>> row_sparsity(torch.tensor([0.0, -math.inf, -math.inf, -math.inf]))
    tensor(0.5000)
    """
    top = log_size.amax(-1, keepdim=True)
    size = (log_size - torch.where(top == -math.inf, 0.0, top)).exp()  # the largest is 1, unless all are 0
    return torch.where(top.squeeze(-1) == -math.inf, 0.0, size.mean(-1) / size.square().mean(-1).sqrt())


def empirical_sparsity(
    mechanism: Mechanism,
    beta: float,
    gamma: float,
    length: int,
    *,
    rows: int = 256,
    dim: int | None = None,
    seed: int = 0,
    n: float | None = None,
    params: Params = None,
) -> Empirical:
    """Return the mean S of random rows of ``length`` keys whose logits are N(beta, gamma^2).

    With ``dim`` they come from keys on a sphere of that many dimensions, as in :func:`sparsity`.
    A formula that depends on n gets n = length by default.

    >>> empirical_sparsity("identity", 0.0, 1.0, 4096, rows=64).mean      # sqrt(2/pi) = 0.798
    0.79...
    """
    mean, spread = read_logits(beta, gamma)
    for name, count in (("rows", rows), ("length", length)):
        whole_number("empirical_sparsity", name, count)
    if mean.ndim:
        raise ValueError("beta, gamma: expected one number each")
    weight = Weight(formula_of(mechanism), n=length if n is None else n, params=params)
    noise = _noise(rows, length, read_dim(dim), seed)
    values = torch.cat([row_sparsity(weight.log_size(mean + spread * e)) for e in noise])
    return Empirical(float(values.mean()), float(values.std(unbiased=False) / math.sqrt(rows)))


def length_correction(
    mechanism: Mechanism, beta: Numbers, gamma: Numbers, *, n: float | None = None, params: Params = None
) -> Tensor:
    """Return the c of E S_n = S (1 + c/n + O(1/n^2)): rows much longer than |c| behave like infinite ones.

    c = 3/8 (M4 / M2^2 - 1) - 1/2 (M3 / (M1 M2) - 1), with M_p = E|f(s)|^p, by Taylor expansion of S_n in its
    two means. For softmax it grows as 3/8 exp(4 gamma^2): see :func:`widest_spread`.

    >>> length_correction("identity", 0.0, 1.0)                 # 3/8 (3 - 1) - 1/2 (2 - 1)
    tensor(0.2500, dtype=torch.float64)
    """
    mean, spread = read_logits(beta, gamma)
    spread = torch.where(spread == 0, limit_spread(mean), spread)
    weight = Weight(formula_of(mechanism), n=n, params=params)
    one, two, three, four = weight.log_moments(mean, spread, (1, 2, 3, 4), None)
    return 3 / 8 * torch.expm1(four - 2 * two) - torch.expm1(three - one - two) / 2


def widest_spread(length: Numbers) -> Tensor:
    """Return sqrt(log(n) / 2), the gamma up to which n keys can show softmax's S = exp(-gamma^2 / 2).

    E exp(2 s) comes from logits near beta + 2 gamma^2, but the largest of n logits is near beta + gamma
    sqrt(2 log n). Once the second is the smaller one, a row no longer holds the keys that make the sum, and S
    falls more slowly, towards its bound 1/sqrt(n).

    >>> widest_spread(1024)
    tensor(1.8616, dtype=torch.float64)
    """
    return (read_at_least("length", length, 1.0).log() / 2).sqrt()


def _noise(rows: int, length: int, dim: int | None, seed: int) -> Iterator[Tensor]:
    """Yield the standard logits of all rows, some rows at a time."""
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _AT_ONCE // length)
    for start in range(0, rows, step):
        shape = (min(step, rows - start), length)
        e = torch.randn(shape, generator=generator, dtype=torch.float64)
        if dim is not None:  # the other dim - 1 squared coordinates of a Gaussian point, as a gamma variable
            degrees = torch.full(shape, (dim - 1) / 2, dtype=torch.float64)
            others = 2 * torch._standard_gamma(degrees, generator)
            e = math.sqrt(dim) * e / (e.square() + others).sqrt()
        yield e
