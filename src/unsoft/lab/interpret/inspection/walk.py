"""``inspect``: run a model on some texts and measure every head, batch by batch, layer by layer.

Rows of attention come in blocks and are not kept: every measure of a head follows from sums over rows. For
stock attention the kernel computes the statistics of rows and keys (``return_stats`` of
:func:`unsoft.attention`).
Crowds are groups of near-duplicate keys: the groups of :func:`unsoft.measure.key_groups` with the worth of
:func:`unsoft.measure.hijack`, both at their default resolution t = 1. They are computed once per key head,
not for each row and query head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsoft import measure
from unsoft.checks import whole_number
from unsoft.lab.interpret.inspection.observe import Layout, find_layout, observe
from unsoft.lab.interpret.inspection.result import Inspection
from unsoft.lab.interpret.inspection.sequence import AttendedSequence, AttentionCall, VisibleKeys, sequences
from unsoft.lab.interpret.models import InputBatch, batches, body_runner, evaluating, name_of, single_stack
from unsoft.magnitude import weighting
from unsoft.magnitude.gaussian import inverse_factor
from unsoft.magnitude.points import checked_points
from unsoft.measure.erasing import deletion_of, gain_of, moved_by
from unsoft.measure.heads import cosines_of, parameter_similarity
from unsoft.measure.redundancy import components, magnitude_share_of, redundant_keys
from unsoft.measure.row_measures import Summary, summary_of
from unsoft.measure.rows import WeightRows, ratio
from unsoft.measure.states import Collapse
from unsoft.statistics import RowStatistics

_EPS = 1e-2
"""Ridge of the systems for magnitude: exact duplicates would make them singular."""
_NEAR = 0.5
"""Smallest similarity of near-duplicates, as in :func:`unsoft.measure.key_groups`."""
_NUMBERS = 2**23
"""Size of the matrices of similarities that are processed together: 32 MB each."""
_SAMPLED_ROWS = 4
"""Rows whose sets of keys are solved one by one where the mask is neither full nor causal."""


def inspect(
    model: nn.Module,
    texts_or_batch: Any,
    *,
    tokenizer: Any = None,
    batch_size: int = 4,
    max_length: int = 512,
    max_sequences: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Compute every measure of :mod:`unsoft.measure` for each layer and head of a transformers model.

        per row: focus and sign (``measure.summary``), hijack    over rows: deletion, similarity of patterns
        per set of keys: magnitude, groups                       per depth: collapse of the residual stream

    Works on stock attention and on swapped mechanisms. Inspection is read-only: outputs are bit-equal with
    and without it. Only a block of rows of the attention map exists at a time (one sequence and layer for
    mechanisms that are not a formula).

    texts_or_batch
        A text or texts (with ``tokenizer``), token ids (batch, length), or a dict of the model's arguments
        with its ``attention_mask``. Padding is ignored.
    batch_size
        Number of sequences per forward pass.
    max_length
        Texts are cut into sequences of at most this many tokens.
    max_sequences
        Inspect only the first sequences, at most this many.
    progress
        Called with (sequences done, all sequences).

    Means are over rows that see two or more keys. Keys are compared without their rotary positions.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> inspection = inspect(LlamaForCausalLM(config), torch.randint(50, (3, 20)))
    >>> len(inspection.heads), len(inspection.depths), 1 <= inspection.heads[0]["effective_keys"] <= 20
    (8, 3, True)
    """
    model = single_stack(model)
    whole_number("inspect", "batch_size", batch_size)
    whole_number("inspect", "max_length", max_length)
    if max_sequences is not None:
        whole_number("inspect", "max_sequences", max_sequences)
    parts = batches(texts_or_batch, tokenizer, batch_size, max_length, model.device, max_sequences)
    done, total = 0, sum(map(len, parts))
    with evaluating(model):
        measurer = HeadMeasurer(find_layout(model, parts[0]), parts[0])
        run = body_runner(model)
        with observe(model, measurer.attention, measurer.layout.blocks, measurer.stream):
            for part in parts:
                measurer.batch = part
                run(**part.inputs)
                done += len(part)
                if progress is not None:
                    progress(done, total)
    tokens = sum(len(labels) for part in parts for labels in part.labels)
    return measurer.result(name_of(model), total, tokens)


class HeadMeasurer:
    """Measures of every head and depth, from the calls and streams of forward passes."""

    def __init__(self, layout: Layout, batch: InputBatch) -> None:
        self.layout = layout
        self.batch = batch
        """The current batch."""
        self.layers = {
            layer.number: HeadSums(layer.heads, layer.out_proj) for layer in layout.layers.values()
        }
        self.inputs: dict[str, Tensor] = {}
        """States before the first block, by stack."""
        self.collapse: dict[tuple[str, int], list[Tensor]] = {}
        """Collapse of the residual stream by stack and depth, one entry per sequence."""

    def attention(self, call: AttentionCall) -> None:
        sums = self.layers.get(call.number)
        if sums is None:
            return
        for item, sequence in enumerate(sequences(call, self.batch.real_positions(call.query.shape[-2]))):
            sums.add(sequence, self.batch.labels_of(item, sequence.length))

    def stream(self, stack: str, depth: int, states: Tensor) -> None:
        """Measure the collapse of states (batch, length, width): how alike tokens become with depth."""
        if depth == 0:
            self.inputs[stack] = states
        ids = self.batch.inputs.get("input_ids")
        if ids is not None and ids.shape != states.shape[:-1]:
            ids = None
        for item, kept in enumerate(self.batch.real_positions(states.shape[1])):
            tokens = None if ids is None else ids[item][kept]
            inputs = self.inputs[stack][item][kept]
            collapse = measure.collapse(states[item][kept], inputs, tokens=tokens)
            values = torch.stack([x.double().cpu() for x in collapse if x is not None])
            self.collapse.setdefault((stack, depth), []).append(values)

    def result(self, name: str, count: int, tokens: int) -> Inspection:
        if not any(sums.rows for sums in self.layers.values()):
            raise ValueError(
                "inspect: argument 'texts_or_batch' has no sequence of two tokens or more, so no row has a"
                " choice"
            )
        heads: list[dict[str, Any]] = []
        layers: list[dict[str, Any]] = []
        for number, sums in self.layers.items():
            layer, measures = self.layout.layers[number], sums.measures()
            heads += [
                {"layer": number, "head": head} | {name: values[head] for name, values in measures.items()}
                for head in range(sums.heads)
            ]
            about = {"layer": number, "name": layer.name, "mechanism": layer.mechanism}
            rows = {"rows": sums.rows, "hijack_rows": sums.hijack_rows}
            rows["through_out_proj"] = layer.out_proj is not None
            layers.append(about | rows | {"pattern_similarity": sums.pattern_similarity().tolist()})
        depths = [
            {"stack": stack, "depth": depth}
            | dict(zip(Collapse._fields, (sum(values, torch.zeros(())) / len(values)).tolist(), strict=True))
            for (stack, depth), values in sorted(self.collapse.items())
        ]
        return Inspection(name, count, tokens, heads, depths, layers, self.layout.skipped)


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
    every = torch.arange(n, device=keys.device)
    if visible.kind == "causal":
        heads = max(1, _NUMBERS // n**2)  # at a time
        parts = zip(*(_causal_crowds(part) for part in keys.split(heads)), strict=True)
        groups, magnitude, redundant, share = (torch.cat(part) for part in parts)
        return Crowds(groups, magnitude, every, redundant, share)
    labels = measure.key_groups(keys)
    groups = (labels == every).sum(-1)
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


def _causal_crowds(keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return groups, magnitude, redundant keys and magnitude share for rows that see the keys up to theirs.

    With M and y of :mod:`unsoft.magnitude.prefix`, row i gives key j the weight of y_r M_rj over r <= i. A
    key counts from the row ``second`` on, where the second key of its group arrives. So the sum over
    redundant keys grows in row i by y_i M_ij over keys that count, and by the weights that keys had before
    if they begin to count.
    """
    system = checked_points(keys, 1.0, None, "inspect").system(_EPS).to_working_dtype()
    similar = system.matrix()
    labels = components(similar > _NEAR)
    every = torch.arange(labels.shape[-1], device=keys.device)
    second = _second_members(labels)
    unique = every[:, None] < second[:, None, :]
    factor = inverse_factor(similar, system.engine)
    y = factor.sum(-1)
    whole = y[:, None] @ factor
    factor.masked_fill_(unique, 0.0)
    before = (whole - y[:, None] @ factor)[:, 0]
    grown = nn.functional.pad(y * factor.sum(-1), (0, 1)).scatter_add_(-1, second, before)
    magnitude = y.square().cumsum(-1)
    share = grown[:, :-1].cumsum(-1) / magnitude
    groups = (labels == every).sum(-1)
    return groups, magnitude[:, -1].to(keys.dtype), ~unique, share.to(keys.dtype)


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
        rows_before, stats = self.rows, sequence.statistics()
        if stats is None:
            columns = self._add_weights(sequence, gain, crowds)
        else:
            columns = self._add_softmax(sequence, stats, gain, crowds)
        self._add_sinks(columns, self.rows - rows_before, labels)
        per_head = [x.repeat_interleave(sequence.per_key_head, 0) for x in (crowds.magnitude, crowds.groups)]
        self._geometry += _total(torch.stack(per_head, -1))
        self.sequences += 1
        self.keys += sequence.length

    def _add_weights(self, sequence: AttendedSequence, gain: Tensor, crowds: Crowds) -> Tensor:
        """Add all rows from their weights, of any mechanism; return what each key receives (heads, n)."""
        columns = sequence.value.new_zeros(self.heads, sequence.length)
        for numbers, weights, visible in sequence.row_blocks():
            rows = WeightRows(weights, visible)
            self.rows += len(numbers)
            self._summary += _total(summary_of(rows), 1)
            self._moved += _total(moved_by(rows, gain[:, None, : weights.shape[-1]]), 1)
            for sums, more in zip((self._cosines, self._shared), cosines_of(rows), strict=True):
                sums += _total(more)
            per_mass = ratio(torch.ones_like(rows.mass), rows.mass)[:, None]
            columns[:, : weights.shape[-1]] += (per_mass @ rows.relative)[:, 0]
            self._add_hijack(rows.relative, rows.mass, numbers, crowds)
        return columns

    def _add_softmax(
        self, sequence: AttendedSequence, stats: RowStatistics, gain: Tensor, crowds: Crowds
    ) -> Tensor:
        """Do the same for weights that are positive and sum to 1, where most follows from ``stats``.

        Similarity of patterns, distance to uniform and hijack still need the weights, but few passes over
        them.
        """
        table = sequence.visible.table
        counts = sequence.key.new_full((sequence.length,), sequence.length)
        alone = counts.new_zeros(sequence.length)
        if table is not None:
            counts = table[0].sum(-1).to(counts.dtype)
            alone = (table[0] & (counts == 1)[:, None]).sum(0).to(counts.dtype)
        participation = counts * stats.sparsity.square()
        lengths = participation.sqrt()  # 1 / |a|, since |a|^2 = 1 / participation if the sum is 1
        distances = torch.zeros_like(stats.entropy)
        positive = torch.zeros_like(stats.received)
        chosen = torch.zeros_like(counts, dtype=torch.bool)
        for numbers, weights, visible in sequence.row_blocks():
            keys, count = weights.shape[-1], counts[numbers]
            chosen[numbers] = True
            # The sum of max(a - 1/n, 0): weights of hidden keys are 0.
            distances[:, numbers] = weights.clamp_min(1 / count[:, None]).sum(-1) - keys / count
            if int(weights.count_nonzero()) == self.heads * int(count.sum()):
                positive[:, :keys] += len(numbers) if visible is None else visible[0].sum(0)
            else:  # some weights are too small for their dtype
                positive[:, :keys] += (weights > 0).sum(1)
            self._add_hijack(weights, torch.ones_like(weights[..., 0]), numbers, crowds)
            unit = weights.mul_(lengths[:, numbers, None]).flatten(1)
            self._cosines += _total(unit @ unit.mT)
        rows = int(chosen.sum())
        self.rows += rows
        self._shared += rows
        summary = Summary(
            sparsity=stats.sparsity,
            entropy=stats.entropy,
            effective_keys=stats.entropy.exp(),
            participation=participation,
            top_mass=stats.top_weight,
            sink_mass=stats.first_share,
            distance_to_uniform=distances,
            negative_share=stats.negative_share,
            row_sum=stats.row_sum,
            cancellation=torch.zeros_like(stats.row_sum),
        )
        self._summary += _total(torch.stack(summary, -1)[:, chosen], 1)
        columns = stats.received - alone  # rows that see one key have no choice
        removed = gain.clamp(max=0).neg()
        moved = (columns * removed, columns * gain.abs(), positive * (gain < 0))
        self._moved += _total(torch.stack(moved, -1), 1)
        return columns

    def _gain(self, sequence: AttendedSequence) -> Tensor:
        """Return (v W_O . r) / |r|^2 of each head and key; without W_O, along the value's own direction."""
        value = sequence.values_by_head()
        if self.out_proj is None or sequence.states is None:
            return gain_of(value, None, None)
        return gain_of(value, sequence.states[None], self.out_proj.to(value.dtype))

    def _add_hijack(self, sizes: Tensor, mass: Tensor, numbers: Tensor, crowds: Crowds) -> None:
        """Add rows ``numbers`` from their sizes (heads, rows, keys) and the sums of these."""
        chosen = at = numbers
        if len(crowds.rows) < crowds.redundant.shape[-1]:
            chosen, at = (numbers[:, None] == crowds.rows).nonzero().unbind(-1)
            sizes, mass = sizes[:, chosen], mass[:, chosen]
        per_key_head = self.heads // len(crowds.redundant)
        redundant = crowds.redundant[..., : sizes.shape[-1]]
        redundant = (redundant if redundant.shape[1] == 1 else redundant[:, at]).to(sizes.dtype)
        by_key_head = sizes.unflatten(0, (-1, per_key_head))
        share = ratio((by_key_head * redundant[:, None]).sum(-1).flatten(0, 1), mass)
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
