"""Heads that repel each other: the heads of an attention layer as particles of a posterior (An et al. 2020,
arXiv 2009.09364).

Only the gradient changes, between backward and the optimizer's step; models and inference stay what they are.

A head is a contiguous block of rows of the query, key or value projection, each matrix a system of particles
of its own. (The published ELECTRA code reshapes the matrix so that its "heads" are interleaved columns; that
is not repeated here.) With grouped queries, keys and values have fewer heads, and so fewer particles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsoft.hf.architecture import attention_modules
from unsoft.lab.tasks.draw import generator as seeded
from unsoft.lab.training.checks import check_number
from unsoft.lab.training.particles import check_kind, descent

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
        # A head of queries may have more rows than its width: Qwen3-Next has those of a gate beside them.
        key_heads = len(_weight(parts[names[1]])) // found.layer_spec.head_dim
        for name, heads in zip(names, (found.layer_spec.heads, key_heads, key_heads), strict=True):
            yield f"{found.name}.{name}", _weight(parts[name]), heads


def _weight(linear: nn.Module) -> nn.Parameter:
    assert isinstance(linear.weight, nn.Parameter)
    return linear.weight


@torch.no_grad()
def repulse(
    model: PreTrainedModel,
    alpha: float = 0.1,
    kind: str = "svgd",
    *,
    temperature: float = 1e-9,
    step_size: float = 1e-3,
    generator: torch.Generator | None = None,
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
    generator
        Of the noise; torch's own unless given. Processes that train copies of one model (DDP) need
        generators of the same seed for "spos", or their copies drift apart.

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
    matrices = head_matrices(model)
    if all(weight.grad is None for _, weight, _ in matrices):
        raise ValueError(
            "repulse: no projection to queries, keys or values has a gradient; call it after"
            " loss.backward(), on a model in which one of them is trained"
        )
    _change(matrices, alpha, kind, temperature, step_size, generator)


def _check(kind: str, **numbers: float) -> None:
    check_kind(kind)
    for name, value in numbers.items():
        check_number("repulse", name, value)


def _change(
    matrices: list[tuple[str, nn.Parameter, int]],
    alpha: float,
    kind: str,
    temperature: float,
    step_size: float,
    generator: torch.Generator | None,
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
            generator=generator,
        )
        weight.grad.copy_(changed.reshape(weight.shape))


class Repulsion(TrainerCallback):
    """The same for transformers' Trainer: ``Trainer(model, ..., callbacks=[Repulsion(alpha=0.1)])``.

    Trainer calls it after it has clipped the gradients, so the push is measured against clipped gradients;
    they are clipped once more after it. With gradient accumulation it is called once for each step of the
    optimizer. The noise of "spos" has the step size of the schedule; it comes from Trainer's seed and the
    number of the step, so it is the same in all processes and after resuming.
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
        if not any(weight.requires_grad for _, weight, _ in self.matrices):
            raise ValueError(
                "repulse: no projection to queries, keys or values is trained, so no head can be pushed"
            )

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
        step_size, device = optimizer.param_groups[0]["lr"], self.matrices[0][1].device
        noise = seeded(args.seed, "repulsion", state.global_step, device=device)
        _change(self.matrices, self.alpha, self.kind, self.temperature, step_size, noise)
        if args.max_grad_norm and args.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
