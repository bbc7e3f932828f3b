"""``inspect``: walks a model's attention with some texts and measures every head, batch by batch, layer by
layer."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unsoft.formula import Formula
from unsoft.lab.interpret.inspection.batches import Batch, batches
from unsoft.lab.interpret.inspection.depth import Depths
from unsoft.lab.interpret.inspection.head_sums import HeadSums
from unsoft.lab.interpret.inspection.inspection import Inspection
from unsoft.lab.interpret.inspection.layout import Layout, find_layout
from unsoft.lab.interpret.inspection.mechanism_card import mechanism_card
from unsoft.lab.interpret.inspection.observe import Seen, observe
from unsoft.lab.interpret.inspection.sequence import sequences
from unsoft.lab.interpret.inspection.weights import swapped_in
from unsoft.modules.pointwise import Pointwise
from unsoft.modules.registry import resolve_formula

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    """Every measure of :mod:`unsoft.measure` for each layer and head of a transformers model.

        per row: focus and sign (``measure.summary``), hijack    over rows: deletion, similarity of patterns
        per set of keys: magnitude, groups                       per depth: collapse of the residual stream

    Works on stock attention and on swapped mechanisms; changes nothing, outputs are bit-equal with and
    without it. The map of no more than a block of rows exists at a time (of one sequence and layer for
    mechanisms that are no formula).

    texts_or_batch
        A text or texts (with ``tokenizer``), token numbers (batch, length), or a dict of the model's
        arguments with its ``attention_mask``. Padding is left out of everything.
    batch_size
        Sequences that go through the model at a time.
    max_length
        Texts are cut into sequences of at most so many tokens.
    max_sequences
        At most so many sequences are looked at, the first ones.
    progress
        Called with (sequences done, all sequences).

    Means are over rows that see two keys or more. Keys are compared with each other without their rotary
    positions.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> found = inspect(LlamaForCausalLM(config), torch.randint(50, (3, 20)))
    >>> len(found.heads), len(found.depths), 1 <= found.heads[0]["effective_keys"] <= 20
    (8, 3, True)
    """
    model = model_of(model)
    for name, value in (
        ("batch_size", batch_size),
        ("max_length", max_length),
        ("max_sequences", 1 if max_sequences is None else max_sequences),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"inspect: argument '{name}' must be a whole number of at least 1, not {value!r}"
            )
    parts = batches(texts_or_batch, tokenizer, batch_size, max_length, model.device, max_sequences)
    with evaluating(model):
        run = runner(model)
        layout = find_layout(model, run, parts[0])
        walk = Walk(layout, parts[0])
        done, everything = 0, sum(len(part.kept(0)) for part in parts)
        with observe(model, walk, layout.blocks):
            for part in parts:
                walk.batch = part
                run(**part.inputs)
                walk.depths.forget()
                done += len(part.kept(0))
                if progress is not None:
                    progress(done, everything)
    tokens = sum(len(words) for part in parts for words in part.labels)
    return walk.result(getattr(model, "name_or_path", "") or type(model).__name__, everything, tokens)


class Walk:
    """The visitor that measures."""

    def __init__(self, layout: Layout, batch: Batch) -> None:
        self.layout, self.depths = layout, Depths()
        self.batch = batch
        """The one that is under way."""
        self.layers = {
            layer.number: HeadSums(layer.heads, layer.out_proj) for layer in layout.layers.values()
        }
        self.formulas: dict[str, Formula] = {}

    def attention(self, seen: Seen) -> None:
        sums = self.layers.get(seen.number)
        if sums is None:
            return
        self._note_formula(seen)
        for item, sequence in enumerate(sequences(seen, self.batch.kept(seen.query.shape[-2]))):
            sums.add(sequence, self.batch.words(item, sequence.length))

    def _note_formula(self, seen: Seen) -> None:
        swapped = swapped_in(seen.module)
        label = self.layout.layers[seen.number].mechanism
        if swapped is None:
            self.formulas[label] = resolve_formula("softmax")
        elif isinstance(mechanism := swapped.mechanism, Pointwise):
            self.formulas[label] = mechanism.formula

    def stream(self, stack: str, depth: int, states: Tensor) -> None:
        self.depths.add(stack, depth, states, self.batch.kept(states.shape[1]), self.batch.names)

    def result(self, name: str, count: int, tokens: int) -> Inspection:
        if not any(sums.rows for sums in self.layers.values()):
            raise ValueError(
                "inspect: argument 'texts_or_batch' has no sequence of two tokens or more, so no row has a"
                " choice"
            )
        heads, layers = [], []
        for number, sums in self.layers.items():
            layer = self.layout.layers[number]
            found = sums.measures()
            heads += [
                {"layer": number, "head": head} | {name: values[head] for name, values in found.items()}
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
        cards = {label: mechanism_card(formula) for label, formula in self.formulas.items()}
        return Inspection(
            name, count, tokens, heads, self.depths.records(), layers, cards, self.layout.skipped
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients; every module gets its mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def runner(model: nn.Module) -> Callable[..., Any]:
    """Calls the model without its language-model head, which no measure needs and which is wide."""
    body = getattr(model, "base_model", model)
    known = signatures.signature(body.forward).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

    def run(**inputs: Any) -> None:
        body(**{name: x for name, x in inputs.items() if open_ended or name in known})

    return run


def model_of(model: Any) -> PreTrainedModel:
    """The transformers model itself, if it can be looked at."""
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose graphs cannot be watched
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"inspect: argument 'model' must be a transformers model, not {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"inspect: {type(model).__name__} is an encoder and a decoder; give one of them, such as"
            " model.get_encoder()"
        )
    return model
