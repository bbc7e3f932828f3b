"""Sums over rows of one layer, from which every measure of its heads follows. Rows come in blocks and are
forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Labels
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.crowds import Crowds, find_crowds
from unsoft.lab.interpret.inspection.sequence import Sequence
from unsoft.measure.erasing import deletion_of, gain_of, moved_by
from unsoft.measure.heads import cosines_of, parameter_similarity
from unsoft.measure.redundancy import attention_share_of
from unsoft.measure.row_measures import Summary, summary_of
from unsoft.measure.rows import Rows, ratio


class HeadSums:
    """``add`` every sequence of a layer, then ask for ``measures``."""

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

    def add(self, sequence: Sequence, labels: Labels[str]) -> None:
        """``labels`` are the words for the tokens of the sequence."""
        if sequence.length < 2:
            return
        crowds = find_crowds(sequence.content_keys, sequence.visible)
        gain = self._gain(sequence)
        columns = sequence.value.new_zeros(self.heads, sequence.length)
        rows_before = self.rows
        for numbers, weights, visible in sequence.row_blocks():
            rows = Rows(weights, visible)
            self.rows += len(numbers)
            self._summary += _total(summary_of(rows), 1)
            self._moved += _total(moved_by(rows, gain[:, None, : weights.shape[-1]]), 1)
            for sums, more in zip((self._cosines, self._shared), cosines_of(rows), strict=True):
                sums += _total(more)
            columns[:, : weights.shape[-1]] += (
                ratio(torch.ones_like(rows.mass), rows.mass)[:, None] @ rows.relative
            )[:, 0]
            self._add_hijack(rows, numbers, crowds)
        self._add_sinks(columns, self.rows - rows_before, labels)
        per_head = [x.repeat_interleave(sequence.per_key_head, 0) for x in (crowds.magnitude, crowds.groups)]
        self._geometry += _total(torch.stack(per_head, -1))
        self.sequences += 1
        self.keys += sequence.length

    def _gain(self, sequence: Sequence) -> Tensor:
        """(v W_O . r) / |r|^2 of each head and key; without W_O the value's own direction counts."""
        value = sequence.value.repeat_interleave(self.heads // len(sequence.value), 0)
        if self.out_proj is None or sequence.states is None:
            return gain_of(value, None, None)
        return gain_of(value, sequence.states[None], self.out_proj.to(value.dtype))

    def _add_hijack(self, rows: Rows, numbers: Tensor, crowds: Crowds) -> None:
        both = numbers[:, None] == crowds.rows
        chosen, at = both.nonzero().unbind(-1)
        if not len(chosen):
            return
        per_key_head = self.heads // len(crowds.redundant)
        keys = rows.relative.shape[-1]
        redundant = crowds.redundant[..., :keys]
        redundant = redundant if redundant.shape[1] == 1 else redundant[:, at]
        part = rows if len(chosen) == len(numbers) else _some(rows, chosen)
        share = attention_share_of(part, redundant.repeat_interleave(per_key_head, 0))
        worth = crowds.magnitude_share[:, at].repeat_interleave(per_key_head, 0)
        self._hijack += _total(torch.stack([share, worth], -1), 1)
        self.hijack_rows += len(chosen)

    def _add_sinks(self, columns: Tensor, rows: int, labels: Labels[str]) -> None:
        shares, at = columns.max(-1)
        self._sink += _total(shares)
        for head, position in enumerate(at.tolist()):
            self._sink_tokens[head][labels[position]] += rows
            self._sink_first[head] += rows * (position == 0)

    def measures(self) -> dict[str, list[float] | list[str]]:
        """Every measure by name, a number for each head; means over rows, or over sequences where rows have
        none."""
        per_row = self._summary / max(self.rows, 1)
        found: dict[str, Tensor] = dict(zip(Summary._fields, per_row.unbind(-1), strict=True))
        deleted = deletion_of(self._moved)
        amount = self._moved[:, 0] / max(self.rows, 1)
        found |= {
            "deletion_share": deleted.share,
            "deletion_strength": deleted.strength,
            "deletion_amount": amount,
        }
        attention, magnitude = (self._hijack / max(self.hijack_rows, 1)).unbind(-1)
        found |= {
            "hijack_attention": attention,
            "hijack_magnitude": magnitude,
            "hijack_excess": attention - magnitude,
        }
        sizes, groups = (self._geometry / max(self.sequences, 1)).unbind(-1)
        keys = max(self.keys / max(self.sequences, 1), 1.0)
        found |= {"magnitude": sizes, "magnitude_per_key": sizes / keys, "groups_per_key": groups / keys}
        found["sink_share"] = self._sink / max(self.rows, 1)
        similar, twins = self._closest(self.pattern_similarity())
        found |= {"pattern_similarity": similar}
        if self.out_proj is not None:
            found["parameter_similarity"] = self._closest(parameter_similarity(self.out_proj))[0]
        result: dict[str, list[Any]] = {name: values.tolist() for name, values in found.items()}
        result["pattern_twin"] = twins.tolist()
        result["sink_token"] = [self._sink_token(head) for head in range(self.heads)]
        return result

    def _sink_token(self, head: int) -> str:
        """The token that is the sink most often; "(first)" if that is a matter of place and not of the
        token."""
        [(token, often)] = self._sink_tokens[head].most_common(1) or [("", 0)]
        by_place = 2 * self._sink_first[head] > self.rows >= 2 * often
        return "(first)" if by_place else token

    def pattern_similarity(self) -> Tensor:
        """(heads, heads), the :func:`unsoft.measure.head_similarity` of all rows."""
        return ratio(self._cosines, self._shared)

    def _closest(self, similarity: Tensor) -> tuple[Tensor, Tensor]:
        """The largest similarity to another head, and which head that is (-1 for a head alone)."""
        if self.heads < 2:
            return torch.zeros(self.heads), torch.full((self.heads,), -1)
        found = similarity.double().fill_diagonal_(-torch.inf).max(-1)
        return found.values, found.indices


def _some(rows: Rows, chosen: Tensor) -> Rows:
    visible = rows.visible
    return Rows(rows.values[:, chosen], None if visible is None else visible[:, chosen])


def _total(x: Tensor, dim: int | None = None) -> Tensor:
    x = x.detach().to("cpu")
    return x.double() if dim is None else x.sum(dim, dtype=torch.float64)
