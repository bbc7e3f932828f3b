"""``scan``: every neuron of a layer, ablated, measured, tested against neurons like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.neurons.details import neuron_details
from unsoft.lab.interpret.neurons.effects import Question, ablate
from unsoft.lab.interpret.neurons.frequency import check_words, count_words, unigram
from unsoft.lab.interpret.neurons.induction import induction_check
from unsoft.lab.interpret.neurons.layers import ablate_layer, choose_neurons
from unsoft.lab.interpret.neurons.parts import check_layer, find_parts, is_last
from unsoft.lab.interpret.neurons.readout import read_out
from unsoft.lab.interpret.neurons.records import neuron_records
from unsoft.lab.interpret.neurons.result import Scan
from unsoft.lab.interpret.neurons.roles import ROLES
from unsoft.lab.interpret.neurons.statistics import BLOCK, ROUNDS
from unsoft.lab.interpret.neurons.stream import read_stream, read_text
from unsoft.lab.interpret.neurons.weights import read_weights

Progress = Callable[[str, int, int], None]


@torch.no_grad()
def scan(
    model: Any,
    text: str | Tensor,
    *,
    tokenizer: Any = None,
    layer: int | None = None,
    tokens: int = 4096,
    length: int = 256,
    null: int | None = None,
    counts: Tensor | None = None,
    candidates: int = 16,
    seed: int = 0,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> Scan:
    """Which neurons of a language model regulate its confidence,
    through the final norm or through word frequency?

    text
        A text (with ``tokenizer``), or token numbers (sequences, length).
    layer
        The last one unless given. There all neurons are looked at, analytically. In another layer the model
        itself runs with neurons ablated, so only ``candidates`` for each role are, with controls.
    tokens, length
        How many tokens are looked at, in sequences of which length.
    null
        Directions of the effective null space; 1 % of the width unless given.
    counts
        How often each word occurs, (words,); counted in the text unless given.
    progress
        Called with (what, how much is done, how much there is).

    The model is only watched; in another layer it also runs with neurons ablated,
    and is as before afterwards.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> found = scan(LlamaForCausalLM(config), torch.randint(50, (4, 30)))
    >>> len(found.neurons), found.layer, 0 <= found.neurons[0]["rho"] <= 1
    (24, 1, True)
    """
    for name, value in (
        ("tokens", tokens),
        ("length", length),
        ("candidates", candidates),
        ("batch_size", batch_size),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"neurons: argument '{name}' must be a whole number of at least 1, not {value!r}"
            )

    def tell(what: str) -> Callable[[int, int], None]:
        def step(done: int, total: int) -> None:
            if progress is not None:
                progress(what, done, total)

        return step

    parts = find_parts(model)
    model = getattr(model, "_orig_mod", model)
    number = check_layer(layer, parts)
    readout = read_out(model, parts.norm, parts.head)
    cut = read_text(text, tokenizer, length, tokens)
    words = len(readout.unembedding)
    frequency = unigram(count_words(cut.everything, words) if counts is None else check_words(counts, words))
    stream = read_stream(model, parts, readout, cut, number, tokens, batch_size, tell("reading the text"))
    weights = read_weights(readout, frequency, parts.writes(number), null)
    if is_last(number, parts):
        chosen = torch.arange(len(weights.norm))
        question = Question(stream.residual, stream.target, parts.writes(number), stream.deviations())
        effects = ablate(readout, frequency, question, progress=tell("ablating neurons"))
    else:
        chosen = choose_neurons(weights, stream.activations, candidates, seed)
        effects = ablate_layer(
            model, parts, readout, frequency, cut, stream, number, chosen, tell("ablating neurons")
        )
    records, controls = neuron_records(number, chosen, weights, stream.activations[:, chosen], effects, seed)
    shown = {record["neuron"] for role in ROLES for record in role.ranked(records)[:candidates]}
    shown |= {record["neuron"] for role in ROLES for record in role.candidates(records)[:candidates]}
    details: dict[int, Any] = {}
    induction: list[dict[str, Any]] = []
    if is_last(number, parts):
        details = neuron_details(readout, frequency, parts, stream, cut, sorted(shown), tokenizer)
        induction = induction_check(
            model, parts, readout, frequency, cut, records, controls["mediated"], seed
        )
    settings = {
        "tokens": len(stream.target),
        "sequences": len(cut.sequences),
        "length": cut.sequences.shape[1],
        "null": weights.null,
        "width": parts.writes(number).shape[1],
        "words": words,
        "counted": frequency.counted,
        "controls": controls["mediated"].shape[1],
        "block": BLOCK,
        "rounds": ROUNDS,
        "seed": seed,
        "norm": "LayerNorm" if readout.norm.centred else "RMSNorm",
        "style": parts.style,
        "softcap": readout.softcap,
    }
    return Scan(
        getattr(model, "name_or_path", "") or type(model).__name__,
        number,
        len(parts.blocks),
        settings,
        records,
        weights.spectrum.tolist(),
        induction,
        details,
    )
