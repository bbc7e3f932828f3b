"""Heads that repel each other: the heads of an attention layer as particles of a posterior (An et al. 2020,
arXiv 2009.09364).

Only the gradient changes, between backward and the optimizer's step; models and inference stay what they are.

A head is a contiguous block of rows of the query, key or value projection, each matrix a system of particles
of its own. (The published ELECTRA code reshapes the matrix so that its "heads" are interleaved columns; that
is not repeated here.) With grouped queries, keys and values have fewer heads, and so fewer particles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsoft.hf.architecture import attention_modules
from unsoft.training.particles import KINDS, descent

_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)


def head_matrices(model: PreTrainedModel) -> list[tuple[str, nn.Parameter, int]]:
    """Every projection to queries, keys and values: its name, its weight (heads * width, inputs),
    and the number of its heads.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    >>> [(name.rpartition(".")[2], heads) for name, _, heads in head_matrices(LlamaForCausalLM(config))]
    [('q_proj', 4), ('k_proj', 2), ('v_proj', 2)]
    """
    found = list(_matrices(model))
    if all(heads == 1 for _, _, heads in found):
        raise ValueError(
            f"repulse: the layers of {type(model).__name__} have one head each, and no other to repel"
        )
    return found


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, int]]:
    for found in attention_modules(model):
        parts = dict(found.module.named_children())
        names = next(
            (names for names in _NAMES if all(isinstance(parts.get(n), nn.Linear) for n in names)), None
        )
        if names is None:
            raise ValueError(
                f"repulse: {type(found.module).__name__} has no separate linear maps to queries, keys and"
                " values"
            )
        for name in names:
            weight = parts[name].weight
            assert isinstance(weight, nn.Parameter)
            yield f"{found.name}.{name}", weight, len(weight) // found.layer_spec.head_dim


@torch.no_grad()
def repulse(
    model: PreTrainedModel,
    alpha: float = 0.1,
    kind: str = "svgd",
    *,
    temperature: float = 1e-9,
    step_size: float = 1e-3,
) -> None:
    """Changes the gradients of a model's heads in place; call it between ``loss.backward()`` and
    ``optimizer.step()``.

    alpha
        Strength of the push.
    kind
        "svgd": heads share their gradients by how close they are, and push each other. "spos": the same with
        noise, which keeps heads spread where many dimensions let them collapse. "repel": every head keeps its
        own gradient, and is pushed.
    temperature, step_size
        Of the noise of "spos": its own gradient counts ``temperature``; the step size is the learning rate.
        Under Adam, which rescales gradients, this is no exact sampler.

    Distances are float32 whatever the model's dtype. Heads that are exactly alike are pushed in random
    directions.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=4)
    >>> model, words = LlamaForCausalLM(config), torch.arange(9)[None]
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(words, labels=words).loss.backward()
    >>> repulse(model, alpha=0.01, kind="repel")
    >>> optimizer.step()
    """
    _check(kind, alpha=alpha, temperature=temperature, step_size=step_size)
    _change(head_matrices(model), alpha, kind, temperature, step_size)


def _check(kind: str, **numbers: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"repulse: argument 'kind' must be one of {', '.join(KINDS)}, not {kind!r}")
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"repulse: argument {name!r} must be a number of at least 0, not {value}")


def _change(
    matrices: list[tuple[str, nn.Parameter, int]],
    alpha: float,
    kind: str,
    temperature: float,
    step_size: float,
) -> None:
    for _, weight, heads in matrices:
        if weight.grad is None:
            continue
        places = weight.detach().float().reshape(heads, -1)
        changed = descent(
            places,
            weight.grad.float().reshape(heads, -1),
            kind,
            alpha=alpha,
            temperature=temperature,
            step_size=max(step_size, 1e-12),  # a schedule may end at 0
        )
        weight.grad.copy_(changed.reshape(weight.shape))


class Repulsion(TrainerCallback):
    """The same for transformers' Trainer: ``Trainer(model, ..., callbacks=[Repulsion(alpha=0.1)])``.

    Trainer calls it after it has clipped the gradients, so the push is measured against clipped gradients;
    they are clipped once more after it. The noise of "spos" has the step size of the schedule.
    """

    def __init__(self, alpha: float = 0.1, kind: str = "svgd", *, temperature: float = 1e-9) -> None:
        _check(kind, alpha=alpha, temperature=temperature)
        self.alpha, self.kind, self.temperature = alpha, kind, temperature
        self.matrices: list[tuple[str, nn.Parameter, int]] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Finds the heads once."""
        self.matrices = head_matrices(model)

    @torch.no_grad()
    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Changes the gradients of the heads."""
        _change(self.matrices, self.alpha, self.kind, self.temperature, optimizer.param_groups[0]["lr"])
        if args.max_grad_norm and args.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
