"""Directions from contrastive pairs: mean difference, first principal direction, logistic probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.hf.recipe import select_all
from unsoft.lab.interpret.steering.directions import Directions
from unsoft.lab.interpret.steering.fingerprint import fingerprint
from unsoft.lab.interpret.steering.places import BLOCK, blocks, check_site
from unsoft.lab.interpret.steering.states import LAST, POOLS, text_states

_PENALTY = 1.0
"""Of the probe: half the squared length of its weights, on states scaled to unit spread."""


@dataclass(frozen=True)
class PairedStates:
    """States of both sides of pairs, by layer (pairs, width): what directions are found from."""

    positive: Mapping[int, Tensor]
    negative: Mapping[int, Tensor]
    site: str
    model: str
    """The fingerprint of the model they are of."""
    about: Mapping[str, Any]

    def directions(self, method: str = "mean") -> Directions:
        """From negative to positive."""
        check_method(method)
        vectors = {layer: direction(up, self.negative[layer], method) for layer, up in self.positive.items()}
        if same := [layer for layer, vector in vectors.items() if not bool(vector.any())]:
            raise ValueError(
                f"steer: the two kinds of examples have the same states on the mean at layer {same[0]}, so"
                " there is no direction"
            )
        return Directions(vectors, self.site, method, self.model, self.about)

    def shuffled(self, seed: int, method: str = "mean") -> Directions:
        """Directions found after labels were exchanged by chance: what the labels are worth.

        Half of the pairs exchange their sides. A principal direction would not notice, since differences and
        their opposites have the same one; for it, all states get new labels and new partners.
        """
        generator = torch.Generator().manual_seed(seed)
        count = len(next(iter(self.positive.values())))
        if method in SIGNLESS:
            order = torch.randperm(2 * count, generator=generator)
        else:
            turned = torch.zeros(count, dtype=torch.bool)
            turned[torch.randperm(count, generator=generator)[: count // 2]] = True
            places = torch.arange(count)
            order = torch.cat([places + count * turned, places + count * ~turned])
        mixed = {layer: torch.cat([up, self.negative[layer]])[order] for layer, up in self.positive.items()}
        ups, downs = (
            {layer: part[side] for layer, part in mixed.items()}
            for side in (slice(count), slice(count, None))
        )
        return replace(self, positive=ups, negative=downs).directions(method)


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
    """States of texts with a property and of texts without it, pair by pair; see :func:`fit`."""
    check_pairs(positive, negative)
    check_site(site)
    if pool not in POOLS:
        raise ValueError(f"steer: argument 'pool' must be one of {', '.join(POOLS)}, not {pool!r}")
    wanted = chosen_layers(layers, len(blocks(model)))
    options: dict[str, Any] = {"site": site, "layers": wanted, "pool": pool}
    ups = text_states(model, positive, tokenizer, **options)
    downs = text_states(model, negative, tokenizer, **options)
    return PairedStates(ups, downs, site, fingerprint(model), {"pairs": len(positive), "pool": pool})


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
    """Directions from texts without a property (``negative``) to texts with it (``positive``), pair by pair.

    method
        "mean" difference; "pca", the first principal direction of the differences (VaLSe, Chen et al. 2025);
        "probe", the weights of a logistic regression.
    layers
        Numbers and ranges such as 3, "4-7", "8-"; the middle third of the stack unless told otherwise.
    site
        What is looked at and later steered: what leaves a "block", or its "mlp".
    pool
        The state of a text's "last" token, or the "mean" over its tokens.

    Every direction is as long as the two kinds of states are apart along it, on the mean, so that a strength
    of 1 means the same for all methods.
    """
    check_method(method)
    states = paired_states(model, positive, negative, tokenizer, layers=layers, site=site, pool=pool)
    return states.directions(method)


def direction(positive: Tensor, negative: Tensor, method: str) -> Tensor:
    """One vector (width,) from states (pairs, width), as long as the two means are apart along it.

    >>> up, down = torch.tensor([[2.0, 0.0], [4.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> direction(up, down, "mean"), direction(up, down, "pca")
    (tensor([3., 0.]), tensor([3., 0.]))
    """
    up, down = positive.double(), negative.double()
    gap = (up - down).mean(0)
    way: Tensor = METHODS[method](up, down)
    way = way / way.norm().clamp_min(torch.finfo(torch.float64).tiny)
    found: Tensor = (way * (way @ gap)).float()  # turned round where it would point from positive to negative
    return found


def _mean(up: Tensor, down: Tensor) -> Tensor:
    gap: Tensor = (up - down).mean(0)
    return gap


def _principal(up: Tensor, down: Tensor) -> Tensor:
    first: Tensor = torch.linalg.svd(up - down, full_matrices=False).Vh[0]
    return first


def _probe(up: Tensor, down: Tensor) -> Tensor:
    """Weights of a logistic regression with an L2 penalty. They lie in the span of the centred states, so the
    problem is solved there, which is small."""
    states = torch.cat([up, down])
    centred = states - states.mean(0)
    centred = centred / centred.square().mean().sqrt().clamp_min(1e-30)
    labels = torch.cat([torch.ones(len(up)), torch.zeros(len(down))]).double()
    basis = torch.linalg.svd(centred, full_matrices=False).Vh
    inside = centred @ basis.mT
    weights = torch.zeros(len(basis), dtype=torch.float64, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weights, offset],
        max_iter=1000,
        tolerance_grad=1e-10,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        logits = inside @ weights + offset
        total = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        total = total + _PENALTY * weights.square().sum() / 2
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
    way: Tensor = weights.detach() @ basis
    return way


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "pca": _principal,
    "probe": _probe,
}


SIGNLESS = ("pca",)
"""Methods that find the same line whichever side of a pair is which."""


def chosen_layers(layers: int | str | Iterable[int | str] | None, count: int) -> list[int]:
    """Layers in order; the middle third if none are named.

    >>> chosen_layers(None, 30) == list(range(10, 20)), chosen_layers([0, "28-"], 30)
    (True, [0, 28, 29])
    """
    if layers is None:
        return list(range(count // 3, max(count // 3 + 1, count - count // 3)))
    found = sorted(select_all([layers] if isinstance(layers, (int, str)) else layers, count))
    if not found:
        raise ValueError("steer: argument 'layers' names no layer")
    return found


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"steer: argument 'method' must be one of {', '.join(METHODS)}, not {method!r}")


def check_pairs(positive: Sequence[object], negative: Sequence[object]) -> None:
    """As many of the one kind as of the other, at least two."""
    if len(positive) != len(negative):
        raise ValueError(
            f"steer: pairs need as many positive examples as negative ones, not {len(positive)} and"
            f" {len(negative)}"
        )
    if len(positive) < 2:
        raise ValueError(f"steer: at least 2 pairs are needed, not {len(positive)}")
