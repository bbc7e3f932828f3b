"""Fit directions to contrastive pairs: mean difference, first principal direction, logistic probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.checks import one_of
from unsoft.hf.recipe import select_all
from unsoft.lab.interpret.models import hooked
from unsoft.lab.interpret.steering.directions import (
    BLOCK,
    SITES,
    Directions,
    blocks,
    fingerprint,
    modules_at,
    states_of,
)

LAST, MEAN = "last", "mean"
POOLS = (LAST, MEAN)
METHODS = ("mean", "pca", "probe")
_PENALTY = 1.0
"""Weight of the probe's L2 penalty, half the squared length, on states scaled to unit spread."""


@dataclass(frozen=True)
class PairedStates:
    """States of both sides of pairs, by layer (pairs, width)."""

    positive: Mapping[int, Tensor]
    negative: Mapping[int, Tensor]
    site: str
    model: str
    """Fingerprint of the model."""
    about: Mapping[str, Any]

    def directions(self, method: str = "mean") -> Directions:
        """Return the directions from negative to positive."""
        one_of("steer", "method", method, METHODS)
        vectors = {layer: direction(up, self.negative[layer], method) for layer, up in self.positive.items()}
        if same := [layer for layer, vector in vectors.items() if not bool(vector.any())]:
            raise ValueError(
                f"steer: the two kinds of examples have the same states on the mean at layer {same[0]}, so"
                " there is no direction"
            )
        return Directions(vectors, self.site, method, self.model, self.about)

    def shuffled(self, seed: int, method: str = "mean") -> Directions:
        """Return directions fitted to shuffled labels, as a negative control.

        Half of the pairs exchange their sides. That would not change a principal direction, since a
        difference and its opposite have the same one; for it, all states get new labels and new partners.
        """
        generator = torch.Generator().manual_seed(seed)
        count = len(next(iter(self.positive.values())))
        if method == "pca":
            order = torch.randperm(2 * count, generator=generator)
        else:
            turned = torch.zeros(count, dtype=torch.bool)
            turned[torch.randperm(count, generator=generator)[: count // 2]] = True
            pairs = torch.arange(count)
            order = torch.cat([pairs + count * turned, pairs + count * ~turned])
        mixed = {layer: torch.cat([up, self.negative[layer]])[order] for layer, up in self.positive.items()}
        positive = {layer: states[:count] for layer, states in mixed.items()}
        negative = {layer: states[count:] for layer, states in mixed.items()}
        return replace(self, positive=positive, negative=negative).directions(method)


def paired_states(
    model: PreTrainedModel,
    positive: Sequence[str],
    negative: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    layers: int | str | Iterable[int | str] | None = None,
    site: str = BLOCK,
    pool: str = LAST,
) -> PairedStates:
    """Return the states of texts with a property and of texts without it, pair by pair; see :func:`fit`."""
    check_pairs(positive, negative)
    one_of("steer", "site", site, SITES)
    one_of("steer", "pool", pool, POOLS)
    chosen = chosen_layers(layers, len(blocks(model)))
    up, down = (
        text_states(model, texts, tokenizer, site=site, layers=chosen, pool=pool)
        for texts in (positive, negative)
    )
    return PairedStates(up, down, site, fingerprint(model), {"pairs": len(positive), "pool": pool})


def fit(
    model: PreTrainedModel,
    positive: Sequence[str],
    negative: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    method: str = "mean",
    layers: int | str | Iterable[int | str] | None = None,
    site: str = BLOCK,
    pool: str = LAST,
) -> Directions:
    """Fit directions from texts without a property (``negative``) to texts with it (``positive``), paired.

    method
        "mean" difference; "pca", the first principal direction of the differences (VaLSe, Chen et al. 2025);
        "probe", the weights of a logistic regression.
    layers
        Numbers and ranges such as 3, "4-7", "8-"; by default the middle third of the stack.
    site
        What is read and later steered: the output of a "block", or of its "mlp".
    pool
        The state of a text's "last" token, or the "mean" over its tokens.

    The length of every direction is the mean distance between the two kinds of states along it, so that a
    strength of 1 means the same for all methods.
    """
    one_of("steer", "method", method, METHODS)
    states = paired_states(model, positive, negative, tokenizer, layers=layers, site=site, pool=pool)
    return states.directions(method)


def direction(positive: Tensor, negative: Tensor, method: str) -> Tensor:
    """Return one vector (width,) from states (pairs, width), with the length of the gap between the means.

    >>> up, down = torch.tensor([[2.0, 0.0], [4.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> direction(up, down, "mean"), direction(up, down, "pca")
    (tensor([3., 0.]), tensor([3., 0.]))
    """
    up, down = positive.double(), negative.double()
    gap: Tensor = (up - down).mean(0)
    if method == "mean":
        unit = gap
    elif method == "pca":
        unit = torch.linalg.svd(up - down, full_matrices=False).Vh[0]
    else:
        unit = _probe(up, down)
    unit = unit / unit.norm().clamp_min(torch.finfo(torch.float64).tiny)
    # The projection of the gap also fixes the sign, which a principal direction does not have.
    vector: Tensor = (unit * (unit @ gap)).float()
    return vector


def _probe(up: Tensor, down: Tensor) -> Tensor:
    """Return the weights of a logistic regression with an L2 penalty.

    They lie in the span of the centred states, so the problem is solved in that small space.
    """
    # Unit spread, so that the penalty means the same for every layer: states grow with depth.
    states = torch.cat([up, down])
    centred = states - states.mean(0)
    centred = centred / centred.square().mean().sqrt().clamp_min(1e-30)
    labels = torch.cat([torch.ones(len(up)), torch.zeros(len(down))]).double()
    basis = torch.linalg.svd(centred, full_matrices=False).Vh
    inside = centred @ basis.mT
    weights = torch.zeros(len(basis), dtype=torch.float64, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, requires_grad=True)
    tolerances: dict[str, Any] = {"tolerance_grad": 1e-10, "tolerance_change": 1e-15}
    solver = torch.optim.LBFGS([weights, offset], max_iter=1000, line_search_fn="strong_wolfe", **tolerances)

    def loss() -> Tensor:
        solver.zero_grad()
        logits = inside @ weights + offset
        total = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        total = total + _PENALTY * weights.square().sum() / 2
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
    vector: Tensor = weights.detach() @ basis
    return vector


@contextmanager
def watching(
    model: PreTrainedModel, site: str, layers: Iterable[int], see: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call ``see`` with layer and states (batch, tokens, width) in every forward pass; change nothing."""
    modules = modules_at(model, site)

    def watch(layer: int, module: object, inputs: object, output: Any) -> None:
        see(layer, states_of(output))

    with hooked(*(modules[layer].register_forward_hook(partial(watch, layer)) for layer in layers)):
        yield


@torch.no_grad()
def text_states(
    model: PreTrainedModel,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    site: str,
    layers: Sequence[int],
    pool: str = LAST,
) -> dict[int, Tensor]:
    """Return for each layer (texts, width) in float32: the state of the last token, or the mean over all.

    Each text goes through the model alone, so that no padding can change a number.
    """
    pooled: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def see(layer: int, states: Tensor) -> None:
        state = states[0, -1] if pool == LAST else states[0].mean(0)
        pooled[layer].append(state.float().cpu())

    with watching(model, site, layers, see):
        for text in texts:
            model(**encoded(text, tokenizer, model))
    return {layer: torch.stack(states) for layer, states in pooled.items()}


def encoded(text: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Mapping[str, Any]:
    """Return a text as the model's arguments; raise ValueError if it has no token."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"].to(model.device)
    if ids.shape[1] == 0:
        raise ValueError(f"steer: the text {text!r} has no token")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chosen_layers(layers: int | str | Iterable[int | str] | None, count: int) -> list[int]:
    """Return the selected layers in order, by default the middle third.

    >>> chosen_layers(None, 30) == list(range(10, 20)), chosen_layers([0, "28-"], 30)
    (True, [0, 28, 29])
    """
    if layers is None:
        return list(range(count // 3, max(count // 3 + 1, count - count // 3)))
    chosen = sorted(select_all([layers] if isinstance(layers, (int, str)) else layers, count))
    if not chosen:
        raise ValueError("steer: argument 'layers' names no layer")
    return chosen


def check_pairs(positive: Sequence[object], negative: Sequence[object]) -> None:
    """Raise ValueError unless there are equally many of both kinds, at least two."""
    if len(positive) != len(negative):
        raise ValueError(
            f"steer: pairs need as many positive examples as negative ones, not {len(positive)} and"
            f" {len(negative)}"
        )
    if len(positive) < 2:
        raise ValueError(f"steer: at least 2 pairs are needed, not {len(positive)}")
