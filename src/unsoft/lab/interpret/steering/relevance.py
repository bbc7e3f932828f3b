"""Which parts of a picture a word of the caption rests on, and whether it needs the picture at all.

A word is visual if it is much likelier with the picture than with noise in its place (log-likelihood ratio).
Its relevance goes back through the layers of the language part: A = mean over heads of (gradient x
attention), where positive; R = R + A R, from the identity (Chefer et al. 2021; VaLSe, Chen et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unsoft.hf.attention import NAME
from unsoft.lab.interpret.steering.images import Inputs, noise, visual_columns, visual_grid, with_caption

_NOISES = 4
"""Pictures of noise over which the ratio is a mean."""


@dataclass(frozen=True)
class Relevance:
    """Of each token of a caption."""

    ratios: Tensor
    """(tokens,): nats by which the picture makes it likelier than noise does."""
    visual: Tensor
    """(tokens,): does it need the picture?"""
    maps: Tensor
    """(tokens, rows, columns): what each visual token contributes; 0 where the picture is not needed."""


def relevance(model: PreTrainedModel, inputs: Inputs, caption: Tensor, *, alpha: float = 1.0) -> Relevance:
    """Relevance of the picture to each token of a caption (tokens,) that the model wrote, or was given.

    alpha
        Nats of the log-likelihood ratio above which a token counts as visual.

    What all tokens have in common, such as attention that rests on a sink, is taken off: the mean map of the
    tokens that are not visual.
    """
    grid = visual_grid(model, inputs)
    ratios = likelihood_ratios(model, inputs, caption)
    visual = ratios > alpha
    maps = contributions(model, inputs, caption, range(len(caption)))
    sizes = maps.sum(1, keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    shares = maps / sizes
    if bool(visual.any()) and not bool(visual.all()):
        shares = (shares - shares[~visual].mean(0)).relu()
    shares = torch.where(visual[:, None], shares, 0.0)
    return Relevance(ratios, visual, shares.view(-1, *grid))


def likelihood_ratios(model: PreTrainedModel, inputs: Inputs, caption: Tensor) -> Tensor:
    """(tokens,): log P(token | picture) - log P(token | noise), each after the tokens before it."""
    seen = log_likelihoods(model, inputs, caption)
    unseen = [log_likelihoods(model, noise(inputs, seed), caption) for seed in range(_NOISES)]
    return seen - torch.stack(unseen).mean(0)


@torch.no_grad()
def log_likelihoods(model: PreTrainedModel, inputs: Inputs, caption: Tensor) -> Tensor:
    """(tokens,): log P of each token of a caption after the prompt and the tokens before it."""
    return _chosen(model(**with_caption(model, inputs, caption)).logits, caption)


def contributions(model: PreTrainedModel, inputs: Inputs, caption: Tensor, which: Sequence[int]) -> Tensor:
    """(tokens of ``which``, visual tokens): gradient-weighted attention back to the picture."""
    columns = visual_columns(model, inputs)
    with _eager(model), _differentiable(model), torch.enable_grad():
        result = model(**with_caption(model, inputs, caption), output_attentions=True)
        layers = result.attentions
        if not layers or any(weights is None for weights in layers):
            raise ValueError(f"steer: {type(model).__name__} does not tell its attention weights")
        chosen = _chosen(result.logits, caption)
        gradients = [torch.autograd.grad(chosen[token], layers, retain_graph=True) for token in which]
    prompt = inputs["input_ids"].shape[1]
    found = []
    for token, slopes in zip(which, gradients, strict=True):
        flow = torch.eye(layers[0].shape[-1], dtype=torch.float64)
        for weights, slope in zip(layers, slopes, strict=True):
            step = (slope * weights.detach())[0].double().cpu().clamp_min(0).mean(0)
            flow = flow + step @ flow
        found.append(flow[prompt + token - 1, columns.cpu()])  # the position that the token is read from
    return torch.stack(found)


def _chosen(logits: Tensor, caption: Tensor) -> Tensor:
    """Log-likelihood of the caption's tokens, each read from the position before it."""
    ahead = logits[0, -len(caption) - 1 : -1].log_softmax(-1)
    return ahead.gather(1, caption[:, None])[:, 0]


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Attention that tells its weights; afterwards it is as it was."""
    if hasattr(model.config, NAME):
        raise ValueError("steer: relevance needs softmax attention; this model's mechanisms were swapped")
    config, training = model.config, model.training
    before = {"": config._attn_implementation}
    before |= {name: getattr(config, name)._attn_implementation for name in config.sub_configs}
    model.eval()
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Attention weights have gradients even where all parameters are frozen."""
    embeddings: nn.Module = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(
        lambda module, given, output: output if output.requires_grad else output.requires_grad_()
    )
    try:
        yield
    finally:
        hook.remove()
