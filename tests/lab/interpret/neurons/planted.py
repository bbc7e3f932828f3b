"""Small language models in which it is known what some neurons do, and the same without them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, WORDS, NEURONS, NULL = 32, 1500, 240, 2
HIDDEN, CONSTANT, UNUSED, FREQUENT = 28, 30, 31, 27
"""Dimensions of the stream: hardly seen by the unembedding; not at all, and always large; not at all,
and always 0; seen as word frequency."""
NULL_NEURON, DECOY, FREQUENCY_NEURON = 7, 8, 9


def counts() -> Tensor:
    """One word is everywhere, the others occur from never to a few thousand times: as in a real vocabulary,
    frequent words are too few to matter for the direction of their logarithms."""
    result = torch.rand(WORDS, generator=torch.Generator().manual_seed(0)).mul(8).exp().round() - 1
    result[0] = 1e6
    return result


def text(seed: int = 0) -> Tensor:
    """Sequences of words."""
    return torch.randint(WORDS, (4, 80), generator=torch.Generator().manual_seed(seed))


def random_model(seed: int = 0) -> LlamaForCausalLM:
    """Nothing is planted; weights are large enough for predictions to differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=NEURONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def planted_model(seed: int = 0) -> LlamaForCausalLM:
    """With a neuron that acts through the norm, a decoy that is as invisible but does not,
    and one along frequency."""
    model = random_model(seed)
    words = model.lm_head.weight
    words[:, HIDDEN:CONSTANT] *= 0.05
    words[:, CONSTANT:] *= 1e-3
    logs = counts().add(1).log()
    words[:, FREQUENT] = (logs - logs.mean()) / (logs - logs.mean()).norm() * words.norm(dim=0).median()
    model.model.embed_tokens.weight[:, CONSTANT] = 4.0
    kept = [FREQUENT, *range(HIDDEN, WIDTH)]
    model.model.embed_tokens.weight[:, [FREQUENT, UNUSED]] = 0.0
    for block in model.model.layers:  # nothing else writes where the planted neurons do
        block.mlp.down_proj.weight[kept] = 0.0
        block.self_attn.o_proj.weight[kept] = 0.0
    down = model.model.layers[-1].mlp.down_proj.weight
    size = down.norm(dim=0).median()
    down[:, [NULL_NEURON, DECOY, FREQUENCY_NEURON]] = 0.0
    # Both hide 95 % of their length from the unembedding. One changes the stream's length in first order,
    # since the stream is long there, and shows the rest where it hardly counts; the other does neither.
    down[CONSTANT, NULL_NEURON], down[HIDDEN, NULL_NEURON] = 0.95 * size, 0.3122 * size
    down[UNUSED, DECOY], down[0, DECOY] = 0.95 * size, 0.3122 * size
    down[FREQUENT, FREQUENCY_NEURON] = size
    return model
