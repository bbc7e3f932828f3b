"""Vision-aware directions (VaLSe, Chen et al. 2025), and the relevance of a picture to its caption.

A word is visual if it is much more likely with the picture than with noise instead (log-likelihood ratio).
Its relevance goes back through the layers of the language part: A = mean over heads of (gradient x
attention), where positive; R = R + A R, from the identity (Chefer et al. 2021; VaLSe). Directions lead from a
picture without the regions that its caption depends on to a picture with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unsoft.checks import one_of
from unsoft.hf.attention import NAME
from unsoft.lab.interpret.models import hooked
from unsoft.lab.interpret.steering.directions import MLP, blocks, fingerprint
from unsoft.lab.interpret.steering.fit import PairedStates, chosen_layers, watching

ORIGINAL, WITHOUT = "original", "without"
NEGATIVES = (ORIGINAL, WITHOUT)
_NOISES = 4
"""Pictures of noise over which the ratio is averaged."""
Arguments = Mapping[str, Any]
"""One example as a processor returns it: ``input_ids`` (1, tokens), ``pixel_values``, and so on."""


@dataclass(frozen=True)
class Captioned:
    """An example: arguments of the model, and the caption (tokens,) it wrote."""

    inputs: Arguments
    caption: Tensor


@dataclass(frozen=True)
class Relevance:
    """Relevance of the picture to each token of a caption."""

    ratios: Tensor
    """(tokens,): nats by which the picture makes it more likely than noise does."""
    visual: Tensor
    """(tokens,): True if it needs the picture."""
    maps: Tensor
    """(tokens, rows, columns): contribution of each visual token; 0 where the picture is not needed."""


def vision_states(
    model: PreTrainedModel,
    examples: Sequence[Captioned],
    *,
    layers: int | str | Iterable[int | str] | None = None,
    alpha: float = 1.0,
    share: float = 0.25,
    negative: str = ORIGINAL,
) -> PairedStates:
    """Return states at the outputs of MLPs for masked pairs of pictures.

    ``.directions("pca")`` is VaLSe's vector. For each example the caption tokens that need the picture are
    found, with the regions they depend on (:func:`relevance`). The positive picture shows the ``share`` of
    regions that contributes most; the rest is masked. The negative one is the ``original``, as in the paper,
    or the picture ``without`` that share. States are taken where the visual words are predicted, and averaged
    over them. Examples without a visual word are skipped.
    """
    if not 0 < share < 1:
        raise ValueError(f"steer: argument 'share' must be between 0 and 1, not {share}")
    one_of("steer", "negative", negative, NEGATIVES)
    count = len(blocks(model))
    chosen = chosen_layers(range(count) if layers is None else layers, count)
    pairs: list[tuple[dict[int, Tensor], dict[int, Tensor]]] = []
    for example in examples:
        relevant = relevance(model, example.inputs, example.caption, alpha=alpha)
        if not bool(relevant.visual.any()):
            continue
        regions = most_relevant(relevant, share)
        shown = masked(model, example.inputs, ~regions)
        other = example.inputs if negative == ORIGINAL else masked(model, example.inputs, regions)
        up, down = (
            _states(model, inputs, example.caption, relevant.visual, chosen) for inputs in (shown, other)
        )
        pairs.append((up, down))
    if len(pairs) < 2:
        raise ValueError(
            f"steer: only {len(pairs)} of {len(examples)} captions have a word that needs its picture by more"
            f" than {alpha:g} nats; at least 2 are needed"
        )
    ups, downs = (
        {layer: torch.stack([pair[side][layer] for pair in pairs]) for layer in chosen} for side in (0, 1)
    )
    about = {"pairs": len(pairs), "alpha": alpha, "share": share, "negative": negative}
    return PairedStates(ups, downs, MLP, fingerprint(model), about)


def most_relevant(relevant: Relevance, share: float) -> Tensor:
    """Return (visual tokens,): True for the ``share`` that contributes most to the visual words together."""
    total = relevant.maps[relevant.visual].mean(0).flatten()
    count = max(1, round(share * len(total)))
    chosen = torch.zeros(len(total), dtype=torch.bool)
    chosen[total.topk(count).indices] = True
    return chosen


@torch.no_grad()
def _states(
    model: PreTrainedModel, inputs: Arguments, caption: Tensor, visual: Tensor, layers: Sequence[int]
) -> dict[int, Tensor]:
    means: dict[int, Tensor] = {}
    first = inputs["input_ids"].shape[1] - 1
    positions = first + visual.nonzero()[:, 0]

    def see(layer: int, states: Tensor) -> None:
        means[layer] = states.view(-1, states.shape[-1])[positions].mean(0).float().cpu()

    with watching(model, MLP, layers, see):
        model(**with_caption(model, inputs, caption))
    return means


def relevance(model: PreTrainedModel, inputs: Arguments, caption: Tensor, *, alpha: float = 1.0) -> Relevance:
    """Return the relevance of the picture to each token of a caption (tokens,).

    alpha
        Nats of the log-likelihood ratio above which a token counts as visual.

    Attention that all tokens share, such as that on a sink, is subtracted: the mean map of the tokens that
    are not visual.
    """
    grid = visual_grid(model, inputs)
    ratios = likelihood_ratios(model, inputs, caption)
    visual = ratios > alpha
    maps = contributions(model, inputs, caption, range(len(caption)))
    # Shares, so that tokens with steep gradients do not dominate the mean that is subtracted.
    shares = maps / maps.sum(1, keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    if bool(visual.any()) and not bool(visual.all()):
        shares = (shares - shares[~visual].mean(0)).relu()
    shares = torch.where(visual[:, None], shares, 0.0)
    return Relevance(ratios, visual, shares.view(-1, *grid))


def likelihood_ratios(model: PreTrainedModel, inputs: Arguments, caption: Tensor) -> Tensor:
    """Return (tokens,): log P(token | picture) - log P(token | noise), each after the tokens before it."""
    with_picture = log_likelihoods(model, inputs, caption)
    with_noise = [log_likelihoods(model, noise(inputs, seed), caption) for seed in range(_NOISES)]
    return with_picture - torch.stack(with_noise).mean(0)


@torch.no_grad()
def log_likelihoods(model: PreTrainedModel, inputs: Arguments, caption: Tensor) -> Tensor:
    """Return (tokens,): log P of each token of a caption after the prompt and the tokens before it."""
    return _caption_likelihoods(model(**with_caption(model, inputs, caption)).logits, caption)


def contributions(model: PreTrainedModel, inputs: Arguments, caption: Tensor, which: Sequence[int]) -> Tensor:
    """Return (tokens of ``which``, visual tokens): gradient-weighted attention back to the picture."""
    columns = visual_columns(model, inputs)
    with _eager(model), _differentiable(model), torch.enable_grad():
        result = model(**with_caption(model, inputs, caption), output_attentions=True)
        layers = result.attentions
        if not layers or any(weights is None for weights in layers):
            raise ValueError(f"steer: {type(model).__name__} does not return its attention weights")
        likely = _caption_likelihoods(result.logits, caption)
        gradients = [torch.autograd.grad(likely[token], layers, retain_graph=True) for token in which]
    prompt = inputs["input_ids"].shape[1]
    rows = []
    for token, slopes in zip(which, gradients, strict=True):
        flow = torch.eye(layers[0].shape[-1], dtype=torch.float64)
        for weights, slope in zip(layers, slopes, strict=True):
            # In float64: the product over layers multiplies relevances far below 1.
            step = (slope * weights.detach())[0].double().cpu().clamp_min(0).mean(0)
            flow = flow + step @ flow
        rows.append(flow[prompt + token - 1, columns.cpu()])  # the position that predicts the token
    return torch.stack(rows)


def _caption_likelihoods(logits: Tensor, caption: Tensor) -> Tensor:
    """Return the log-likelihood of the caption's tokens, each from the position before it."""
    ahead = logits[0, -len(caption) - 1 : -1].log_softmax(-1)
    return ahead.gather(1, caption[:, None])[:, 0]


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Use attention that returns its weights; restore the previous one afterwards."""
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
    """Give attention weights gradients even if all parameters are frozen."""
    embeddings: nn.Module = model.get_input_embeddings()

    def require(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output if output.requires_grad else output.requires_grad_()

    with hooked(embeddings.register_forward_hook(require)):
        yield


def visual_columns(model: PreTrainedModel, inputs: Arguments) -> Tensor:
    """Return the positions of the visual tokens; raise ValueError if there is no picture."""
    token = getattr(model.config, "image_token_id", None)
    if token is None or "pixel_values" not in inputs or "input_ids" not in inputs:
        lacks = "a picture (pixel_values)" if token is not None else "an image token in its config"
        raise ValueError(f"steer: {type(model).__name__} needs image and text here, and there is not {lacks}")
    ids = inputs["input_ids"]
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(
            f"steer: one example at a time: input_ids must be (1, tokens), not {tuple(ids.shape)}"
        )
    columns: Tensor = (ids[0] == token).nonzero()[:, 0]
    if len(columns) == 0:
        raise ValueError(f"steer: input_ids hold no image token ({token}), so the picture is not looked at")
    return columns


def visual_grid(model: PreTrainedModel, inputs: Arguments) -> tuple[int, int]:
    """Return rows and columns of the visual tokens, which cover the picture evenly."""
    count = len(visual_columns(model, inputs))
    if "image_grid_thw" in inputs:
        sizes = inputs["image_grid_thw"]
        merged = model.config.vision_config.spatial_merge_size
        if len(sizes) != 1 or int(sizes[0, 0]) != 1:
            raise ValueError("steer: one picture for each example, and no video")
        rows, columns = (int(size) // merged for size in sizes[0, 1:])
    else:
        rows = columns = round(count**0.5)
    if rows * columns != count or inputs["pixel_values"].dim() not in (2, 4):
        raise ValueError(
            f"steer: {count} visual tokens are no grid over one picture with pixel_values"
            f" {tuple(inputs['pixel_values'].shape)}; models that cut pictures into tiles are not supported"
        )
    return rows, columns


def masked(model: PreTrainedModel, inputs: Arguments, hidden: Tensor) -> dict[str, Any]:
    """Return the example with the regions of hidden visual tokens (bool) painted in the mean colour."""
    rows, columns = visual_grid(model, inputs)
    pixels = inputs["pixel_values"]
    if pixels.dim() == 4:
        cells = hidden.view(1, 1, rows, columns).to(pixels.dtype)
        where = torch.nn.functional.interpolate(cells, pixels.shape[-2:]) > 0.5
        changed = torch.where(where, pixels.mean((-2, -1), keepdim=True), pixels)
    else:  # patches in rows, those of one token together
        where = hidden.repeat_interleave(len(pixels) // len(hidden))[:, None]
        changed = torch.where(where, pixels.mean(0, keepdim=True), pixels)
    return {**inputs, "pixel_values": changed}


def noise(inputs: Arguments, seed: int) -> dict[str, Any]:
    """Return the example with a picture of noise that has the mean and spread of each channel."""
    pixels = inputs["pixel_values"]
    over = (-2, -1) if pixels.dim() == 4 else 0
    mean, spread = pixels.mean(over, keepdim=True), pixels.std(over, keepdim=True)
    drawn = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed)).to(pixels)
    return {**inputs, "pixel_values": mean + spread * drawn}


def with_caption(model: PreTrainedModel, inputs: Arguments, caption: Tensor) -> dict[str, Any]:
    """Return the arguments of one forward pass over prompt and caption (tokens,)."""
    ids = inputs["input_ids"]
    if len(caption) == 0 or bool((caption == model.config.image_token_id).any()):
        raise ValueError("steer: a caption must have at least one token, and no image token")
    # PaliGemma attends in both directions among tokens of type 0, so the caption gets type 1.
    suffix = int(model.config.model_type == "paligemma")
    added = {"input_ids": caption, "attention_mask": torch.ones_like(caption)}
    arguments = {"attention_mask": torch.ones_like(ids), **inputs}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.shape == ids.shape and not value.is_floating_point():
            more = added.get(name, torch.full_like(caption, suffix if name == "token_type_ids" else 0))
            arguments[name] = torch.cat([value, more[None].to(value)], 1)
    return arguments
