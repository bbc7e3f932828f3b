"""Sums over the rows of one layer, from which every measure of its heads follows.

Rows come in blocks and are not kept. Crowds are groups of near-duplicate keys: the groups of
:func:`unsoft.measure.key_groups` with the worth of :func:`unsoft.measure.hijack`, both at their default
resolution t = 1. They are computed once per key head, not for each row and query head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.sequence import AttendedSequence, VisibleKeys
from unsoft.magnitude import prefix_weighting, weighting
from unsoft.measure import key_groups
from unsoft.measure.erasing import deletion_of, gain_of, moved_by
from unsoft.measure.heads import cosines_of, parameter_similarity
from unsoft.measure.redundancy import attention_share_of, magnitude_share_of, redundant_keys
from unsoft.measure.row_measures import Summary, summary_of
from unsoft.measure.rows import WeightRows, ratio

_EPS = 1e-2
_SAMPLED_ROWS = 4
"""Rows whose sets of keys are solved one by one where the mask is neither full nor causal."""


@dataclass(frozen=True)
class Crowds:
    """Groups of near-duplicates among the keys (key heads, n, dim) of one sequence."""

    groups: Tensor
    """(key heads,): number of groups."""
    magnitude: Tensor
    """(key heads,): effective number of all n keys."""
    rows: Tensor
    """Numbers of the rows that are compared."""
    redundant: Tensor
    """Bool (key heads, rows or 1, n): keys in a group of which the row sees two or more."""
    magnitude_share: Tensor
    """(key heads, rows): share of the redundant groups in the magnitude."""


def find_crowds(keys: Tensor, visible: VisibleKeys) -> Crowds:
    """Group near-duplicate keys and compute what the groups are worth.

    >>> keys = torch.tensor([[[9.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])  # one unique, three clones
    >>> crowds = find_crowds(keys, VisibleKeys("full", None))
    >>> crowds.groups, crowds.redundant[0, 0]
    (tensor([2]), tensor([False,  True,  True,  True]))
    """
    n = keys.shape[-2]
    labels = key_groups(keys)
    every = torch.arange(n, device=keys.device)
    groups = (labels == every).sum(-1)
    if visible.kind == "causal" and visible.table is not None:
        # A group becomes redundant when its second key arrives.
        redundant = every[:, None] >= _second_members(labels)[:, None, :]
        shares, magnitudes = [], []
        for head, points in enumerate(keys):  # one head at a time: the weights of all prefixes are n x n
            prefixes = prefix_weighting(points, eps=_EPS)
            shares.append(magnitude_share_of(prefixes.weights, visible.table[0], redundant[head]))
            magnitudes.append(prefixes.magnitude[-1])
        return Crowds(groups, torch.stack(magnitudes), every, redundant, torch.stack(shares))
    whole = weighting(keys, eps=_EPS)
    if visible.table is None:
        redundant = redundant_keys(labels, None)[:, None]
        share = magnitude_share_of(whole.weights[:, None], None, redundant)
        return Crowds(groups, whole.magnitude, every, redundant, share.expand(-1, n))
    table = visible.table[0]
    choice = (table.sum(-1) > 1).nonzero()[:, 0]
    rows = choice[torch.linspace(0, max(len(choice) - 1, 0), min(_SAMPLED_ROWS, len(choice))).long()]
    seen = table[rows].expand(len(keys), -1, -1)
    redundant = redundant_keys(labels[:, None].expand(-1, len(rows), -1), seen)
    worth = weighting(keys[:, None].expand(-1, len(rows), -1, -1), eps=_EPS, mask=seen).weights
    return Crowds(groups, whole.magnitude, rows, redundant, magnitude_share_of(worth, seen, redundant))


def _second_members(groups: Tensor) -> Tensor:
    """Return for each key the position of the second member of its group; n if there is none.

    >>> _second_members(torch.tensor([[0, 1, 0, 0]]))
    tensor([[2, 4, 2, 2]])
    """
    n = groups.shape[-1]
    positions = torch.arange(n, device=groups.device).expand_as(groups)
    followers = torch.where(positions == groups, n, positions)  # a group is numbered by its first member
    return torch.full_like(groups, n).scatter_reduce(-1, groups, followers, "amin").gather(-1, groups)


class HeadSums:
    """Sums of one layer: ``add`` every sequence, then call ``measures``."""

    def __init__(self, heads: int, out_proj: Tensor | None) -> None:
        self.out_proj = out_proj
        self.heads = heads
        self.rows = self.hijack_rows = self.sequences = self.keys = 0
        self._summary = torch.zeros(heads, len(Summary._fields), dtype=torch.float64)
        self._moved = torch.zeros(heads, 3, dtype=torch.float64)
        self._hijack = torch.zeros(heads, 2, dtype=torch.float64)
        self._cosines, self._shared = torch.zeros(2, heads, heads, dtype=torch.float64)
        self._geometry = torch.zeros(heads, 2, dtype=torch.float64)
        self._sink = torch.zeros(heads, dtype=torch.float64)
        self._sink_tokens: list[Counter[str]] = [Counter() for _ in range(heads)]
        self._sink_first = [0] * heads

    def add(self, sequence: AttendedSequence, labels: Sequence[str]) -> None:
        """Add a sequence; ``labels`` are the texts of its tokens."""
        if sequence.length < 2:
            return
        crowds = find_crowds(sequence.content_keys, sequence.visible)
        gain = self._gain(sequence)
        columns = sequence.value.new_zeros(self.heads, sequence.length)
        rows_before = self.rows
        for numbers, weights, visible in sequence.row_blocks():
            rows = WeightRows(weights, visible)
            self.rows += len(numbers)
            self._summary += _total(summary_of(rows), 1)
            self._moved += _total(moved_by(rows, gain[:, None, : weights.shape[-1]]), 1)
            for sums, more in zip((self._cosines, self._shared), cosines_of(rows), strict=True):
                sums += _total(more)
            per_mass = ratio(torch.ones_like(rows.mass), rows.mass)[:, None]
            columns[:, : weights.shape[-1]] += (per_mass @ rows.relative)[:, 0]
            self._add_hijack(rows, numbers, crowds)
        self._add_sinks(columns, self.rows - rows_before, labels)
        per_head = [x.repeat_interleave(sequence.per_key_head, 0) for x in (crowds.magnitude, crowds.groups)]
        self._geometry += _total(torch.stack(per_head, -1))
        self.sequences += 1
        self.keys += sequence.length

    def _gain(self, sequence: AttendedSequence) -> Tensor:
        """Return (v W_O . r) / |r|^2 of each head and key; without W_O, along the value's own direction."""
        value = sequence.values_by_head()
        if self.out_proj is None or sequence.states is None:
            return gain_of(value, None, None)
        return gain_of(value, sequence.states[None], self.out_proj.to(value.dtype))

    def _add_hijack(self, rows: WeightRows, numbers: Tensor, crowds: Crowds) -> None:
        chosen, at = (numbers[:, None] == crowds.rows).nonzero().unbind(-1)
        if not len(chosen):
            return
        per_key_head = self.heads // len(crowds.redundant)
        redundant = crowds.redundant[..., : rows.relative.shape[-1]]
        redundant = redundant if redundant.shape[1] == 1 else redundant[:, at]
        if len(chosen) != len(numbers):
            visible = None if rows.visible is None else rows.visible[:, chosen]
            rows = WeightRows(rows.values[:, chosen], visible)
        share = attention_share_of(rows, redundant.repeat_interleave(per_key_head, 0))
        worth = crowds.magnitude_share[:, at].repeat_interleave(per_key_head, 0)
        self._hijack += _total(torch.stack([share, worth], -1), 1)
        self.hijack_rows += len(chosen)

    def _add_sinks(self, columns: Tensor, rows: int, labels: Sequence[str]) -> None:
        shares, at = columns.max(-1)
        self._sink += _total(shares)
        for head, position in enumerate(at.tolist()):
            self._sink_tokens[head][labels[position]] += rows
            self._sink_first[head] += rows * (position == 0)

    def measures(self) -> dict[str, list[float] | list[str]]:
        """Return every measure with one number per head: means over rows, or over sequences."""
        rows, sequences = max(self.rows, 1), max(self.sequences, 1)
        deleted = deletion_of(self._moved)
        attention, magnitude = (self._hijack / max(self.hijack_rows, 1)).unbind(-1)
        sizes, groups = (self._geometry / sequences).unbind(-1)
        keys = max(self.keys / sequences, 1.0)
        similar, twins = self._closest(self.pattern_similarity())
        tensors: dict[str, Tensor] = {
            **dict(zip(Summary._fields, (self._summary / rows).unbind(-1), strict=True)),
            "deletion_share": deleted.share,
            "deletion_strength": deleted.strength,
            "deletion_amount": self._moved[:, 0] / rows,
            "hijack_attention": attention,
            "hijack_magnitude": magnitude,
            "hijack_excess": attention - magnitude,
            "magnitude": sizes,
            "magnitude_per_key": sizes / keys,
            "groups_per_key": groups / keys,
            "sink_share": self._sink / rows,
            "pattern_similarity": similar,
        }
        if self.out_proj is not None:
            tensors["parameter_similarity"] = self._closest(parameter_similarity(self.out_proj))[0]
        result: dict[str, list[Any]] = {name: values.tolist() for name, values in tensors.items()}
        result["pattern_twin"] = twins.tolist()
        result["sink_token"] = [self._sink_token(head) for head in range(self.heads)]
        return result

    def _sink_token(self, head: int) -> str:
        """Return the most frequent sink; "(first)" if the sink depends on the position and not the token."""
        [(token, often)] = self._sink_tokens[head].most_common(1) or [("", 0)]
        by_position = 2 * self._sink_first[head] > self.rows >= 2 * often
        return "(first)" if by_position else token

    def pattern_similarity(self) -> Tensor:
        """Return (heads, heads), the :func:`unsoft.measure.head_similarity` of all rows."""
        return ratio(self._cosines, self._shared)

    def _closest(self, similarity: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest similarity to another head, and that head's number (-1 for a single one)."""
        if self.heads < 2:
            return torch.zeros(self.heads), torch.full((self.heads,), -1)
        closest = similarity.double().fill_diagonal_(-torch.inf).max(-1)
        return closest.values, closest.indices


def _total(x: Tensor, dim: int | None = None) -> Tensor:
    x = x.detach().to("cpu")
    return x.double() if dim is None else x.sum(dim, dtype=torch.float64)
