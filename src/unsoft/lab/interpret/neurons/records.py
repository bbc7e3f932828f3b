"""Figures of every neuron from what was measured at every token: means, intervals, tests against controls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.neurons.effects import Effects
from unsoft.lab.interpret.neurons.roles import TOP
from unsoft.lab.interpret.neurons.statistics import (
    CONTROLS,
    Bootstrap,
    Interval,
    above_controls,
    matched_controls,
)
from unsoft.lab.interpret.neurons.weights import Weights


def neuron_records(
    layer: int, numbers: Tensor, weights: Weights, activations: Tensor, effects: Effects, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """A record for each neuron, and the controls (neurons, count) of each role as places in the list.

    ``numbers`` (neurons,) are those of the neurons that ``activations`` and ``effects`` are about;
    ``weights`` are about all of the layer.
    """
    bootstrap = Bootstrap(len(activations), seed)
    spread = activations.std(0)
    features = likeness(weights.norm[numbers], activations)
    figures: dict[str, Tensor] = {
        "norm": weights.norm[numbers],
        "rho": weights.rho[numbers],
        "rho_place": place_of(weights.rho)[numbers],
        **{f"rho_{size}": values[numbers] for size, values in weights.sweep.items()},
        "logit_variance": weights.logit_variance[numbers],
        "frequency_cosine": weights.frequency_cosine[numbers],
        "frequency_cosine_place": place_of(weights.frequency_cosine)[numbers],
        "mean_activation": activations.mean(0),
        "spread": spread,
    }
    for name, values in {
        "total": effects.loss.abs(),
        "direct": effects.loss_frozen.abs(),
        "entropy_total": effects.entropy.abs(),
        "entropy_frozen": effects.entropy_frozen.abs(),
        "entropy_shift": effects.entropy,
        "entropy_shift_frozen": effects.entropy_frozen,
        "loss_shift": effects.loss,
        "changed": effects.changed,
        "changed_frozen": effects.changed_frozen,
        "kl_total": effects.kl.abs(),
        "kl_held": effects.kl_held.abs(),
        "kl_shift": effects.kl,
        "loss_held": effects.loss_held.abs(),
    }.items():
        _put(figures, name, bootstrap.mean(values))
    controls: dict[str, Tensor] = {}
    for name, static, total, closed in (
        ("mediated", "rho", effects.loss, effects.loss_frozen),
        ("entropy_mediated", "rho", effects.entropy, effects.entropy_frozen),
        ("frequency", "frequency_cosine", effects.kl, effects.kl_held),
    ):
        ordinary = figures[f"{static}_place"] >= TOP  # controls are not what weights make candidates
        controls[name] = matched_controls(features, ordinary, _count(int(ordinary.sum())), seed)
        share = bootstrap.share(closed.abs(), total.abs())
        _put(figures, f"{name}_share", share)
        _put(figures, f"{name}_effect", bootstrap.mean(total.abs() - closed.abs()))
        test = above_controls(share, controls[name])
        figures |= {f"{name}_control": test.control, f"{name}_control_spread": test.spread}
        figures |= {f"{name}_score": test.score, f"{name}_p": test.p, f"{name}_q": test.q}
    columns = {name: values.tolist() for name, values in figures.items()}
    records = [
        {"layer": layer, "neuron": int(number)} | {name: values[place] for name, values in columns.items()}
        for place, number in enumerate(numbers)
    ]
    return records, controls


def _count(eligible: int) -> int:
    """How many controls each neuron has: fewer where there are few to draw from."""
    return max(2, min(CONTROLS, eligible // 4))


def likeness(norm: Tensor, activations: Tensor) -> Tensor:
    """(neurons, 3): what controls are matched in, length of the output weights,
    mean and spread of activations."""
    return torch.stack(
        [norm.clamp_min(1e-12).log(), activations.mean(0), activations.std(0).clamp_min(1e-12).log()], 1
    )


def place_of(static: Tensor) -> Tensor:
    """Where each neuron stands in its layer: 0 for the largest absolute value, towards 1 for the smallest.

    >>> place_of(torch.tensor([0.1, -0.5, 0.2, 0.0]))
    tensor([0.5000, 0.0000, 0.2500, 0.7500])
    """
    return static.abs().argsort(descending=True).argsort() / len(static)


def _put(figures: dict[str, Tensor], name: str, found: Interval) -> None:
    figures |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
