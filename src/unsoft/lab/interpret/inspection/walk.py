"""``inspect``: run a model on some texts and measure every head, batch by batch, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from unsoft import measure
from unsoft.checks import whole_number
from unsoft.formula import Formula
from unsoft.lab.interpret.inspection.head_sums import HeadSums
from unsoft.lab.interpret.inspection.observe import Layout, find_layout, observe
from unsoft.lab.interpret.inspection.result import Inspection
from unsoft.lab.interpret.inspection.sequence import AttentionCall, sequences, swapped_in
from unsoft.lab.interpret.models import InputBatch, batches, body_runner, evaluating, name_of, single_stack
from unsoft.measure.states import Collapse
from unsoft.modules.pointwise import Pointwise
from unsoft.modules.registry import resolve_formula

CLONES = (1, 10, 100)
LOGITS = (-4.0, 0.0, 4.0)
_OTHERS = 63


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
        self.formulas: dict[str, Formula] = {}
        self.inputs: dict[str, Tensor] = {}
        """States before the first block, by stack."""
        self.collapse: dict[tuple[str, int], list[Tensor]] = {}
        """Collapse of the residual stream by stack and depth, one entry per sequence."""

    def attention(self, call: AttentionCall) -> None:
        sums = self.layers.get(call.number)
        if sums is None:
            return
        label, swapped = self.layout.layers[call.number].mechanism, swapped_in(call.module)
        if swapped is None:
            self.formulas[label] = resolve_formula("softmax")
        elif isinstance(mechanism := swapped.mechanism, Pointwise):
            self.formulas[label] = mechanism.formula
        for item, sequence in enumerate(sequences(call, self.batch.real_positions(call.query.shape[-2]))):
            sums.add(sequence, self.batch.labels_of(item, sequence.length))

    def stream(self, stack: str, depth: int, states: Tensor) -> None:
        """Measure the collapse of states (batch, length, width): do tokens become the same with depth?"""
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
        heads, layers = [], []
        for number, sums in self.layers.items():
            layer, measures = self.layout.layers[number], sums.measures()
            heads += [
                {"layer": number, "head": head} | {name: values[head] for name, values in measures.items()}
                for head in range(sums.heads)
            ]
            layers.append(
                {
                    "layer": number,
                    "name": layer.name,
                    "mechanism": layer.mechanism,
                    "rows": sums.rows,
                    "hijack_rows": sums.hijack_rows,
                    "through_out_proj": layer.out_proj is not None,
                    "pattern_similarity": sums.pattern_similarity().tolist(),
                }
            )
        depths = [
            {"stack": stack, "depth": depth}
            | dict(zip(Collapse._fields, (sum(values) / len(values)).tolist(), strict=True))
            for (stack, depth), values in sorted(self.collapse.items())
        ]
        cards = {label: mechanism_card(formula) for label, formula in self.formulas.items()}
        return Inspection(name, count, tokens, heads, depths, layers, cards, self.layout.skipped)


@lru_cache(maxsize=16)  # a quarter of a second each
def mechanism_card(formula: Formula) -> dict[str, Any]:
    """Return unique share, discrimination and gradient of a formula, for 64 keys whose other logits are 0.

    >>> card = mechanism_card(resolve_formula("softmax"))
    >>> round(card["unique_share"]["10"], 4)                # 20 / 30
    0.6667
    """
    shares = measure.unique_share(formula, CLONES).tolist()
    discrimination = measure.discrimination(formula)
    slopes = measure.gradient(formula, torch.tensor(LOGITS), torch.zeros(_OTHERS))
    return {
        "unique_share": {str(count): share for count, share in zip(CLONES, shares, strict=True)},
        "discrimination": {"auc": discrimination.auc, "gap": discrimination.gap},
        "gradient": {
            field: {f"{logit:g}": value for logit, value in zip(LOGITS, values.tolist(), strict=True)}
            for field, values in slopes._asdict().items()
        },
    }
