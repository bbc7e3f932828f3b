"""The linear families from their papers: every weight written out, in logarithms where a feature can overflow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unsoft.testing.definitions.call import WrittenCall, over, shares


def relu(call: WrittenCall, layer: Any) -> Tensor:
    """relu(q) . relu(k), over its sum."""
    return _over_sum(call, call.move(call.query.relu() @ call.spread(call.key).relu().mT))


def elu1(call: WrittenCall, layer: Any) -> Tensor:
    """elu(x) + 1 is exp(x) for negative x (Katharopoulos et al. 2020)."""
    return _from_logarithms(call, _log_elu1(call.query), _log_elu1(call.spread(call.key)))


def exponential(call: WrittenCall, layer: Any) -> Tensor:
    """sum over coordinates of exp(q + k), with q . k the logit."""
    query, key = _scaled(call)
    return _from_logarithms(call, query, key)


def taylor2(call: WrittenCall, layer: Any) -> Tensor:
    """1 + s + s^2 / 2, over its sum."""
    s = call.logits
    return _over_sum(call, 1 + s + s**2 / 2)


def identity(call: WrittenCall, layer: Any) -> Tensor:
    """s / n."""
    return call.logits * _factor(call) / call.count


def performer(call: WrittenCall, layer: Any) -> Tensor:
    """Features exp(w . x - |x|^2 / 2) for the layer's directions w (Choromanski et al. 2020); that of a query cancels in its row."""
    directions = layer.directions.to(call.query.dtype)
    query, key = _scaled(call)
    lengths = call.move(key.square().sum(-1, keepdim=True)) / 2
    return _from_logarithms(call, call.move(query @ directions.mT), call.move(key @ directions.mT) - lengths)


def cosformer(call: WrittenCall, layer: Any) -> Tensor:
    """relu(q) . relu(k) cos(pi/2 (i - j) / M), over its sum (Qin et al. 2022); beyond M positions go back and forth."""
    period = 2 * layer.max_length
    rows, keys = (torch.minimum(p % period, period - p % period) for p in (call.rows, call.keys))
    near = torch.cos(math.pi / 2 * (rows[:, None] - keys) / layer.max_length)
    return _over_sum(call, call.move(call.query.relu() @ call.spread(call.key).relu().mT * near))


def retention(call: WrittenCall, layer: Any) -> Tensor:
    """d^(i-j) s, not normalised (Sun et al. 2023)."""
    return decay(call, layer) * call.logits


def decay(call: WrittenCall, layer: Any) -> Tensor:
    """d^(i-j)."""
    distance = (call.rows[:, None] - call.keys).clamp(min=0)
    d: Tensor = layer.logit.to(call.query.dtype).sigmoid()[:, None, None]
    return d**distance * _factor(call)


def _factor(call: WrittenCall) -> Tensor:
    """A float mask multiplies weights by its exponential; what is hidden weighs nothing."""
    return torch.where(call.visible, call.bias.exp(), 0.0)


def _over_sum(call: WrittenCall, weights: Tensor) -> Tensor:
    weights = weights * _factor(call)
    return over(weights, weights.sum(-1, keepdim=True))


def _scaled(call: WrittenCall) -> tuple[Tensor, Tensor]:
    root = abs(call.scale) ** 0.5
    return call.move(call.query * math.copysign(root, call.scale)), call.move(call.spread(call.key) * root)


def _log_elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.log1p(x.relu()), x.clamp(max=0))


def _from_logarithms(call: WrittenCall, query: Tensor, key: Tensor) -> Tensor:
    """Shares of sum_f exp(query_f + key_f), a row at a time: all features of all pairs at once would not fit."""
    rows = [(query[:, :, r, None, :] + key).logsumexp(-1) for r in range(query.shape[2])]
    log = torch.stack(rows, dim=2) if rows else query.new_zeros(call.visible.shape)
    return shares(log + call.bias, call.visible)
