"""Repulsion between heads: the heads of an attention layer as particles of a posterior (An et al. 2020, arXiv
2009.09364).

Only the gradient changes, between backward and the optimizer's step; models and inference do not.

Particles are the rows of ``positions`` (particles, size), ``gradients`` those of the potential U = -log p at
each, and K a Gaussian kernel:

    svgd    g_i = 1/M sum_j (K_ij G_j - alpha K_ij (x_i - x_j) / h^2)               (Liu and Wang 2016)
    spos    the same + T G_i - sqrt(2 T / step) noise                 (Zhang et al. 2020, their 1 / beta is T)
    repel   G_i - alpha/M sum_j K_ij (x_i - x_j) / h^2: each particle's own gradient, and the push

A step of gradient descent along g_i with the given step size is the published update.

A head is a contiguous block of rows of the query, key or value projection, each matrix a system of particles
of its own. (The published ELECTRA code reshapes the matrix so that its "heads" are interleaved columns; that
is not repeated here.) With grouped queries, keys and values have fewer heads, and so fewer particles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from unsoft.checks import one_of
from unsoft.hf.architecture import attention_modules
from unsoft.lab.tasks.draw import generator as seeded
from unsoft.lab.training.spec import REPULSIONS, check_not_negative

HeadMatrix = tuple[str, nn.Parameter, int]
"""Name and weight of a projection, and the number of its heads."""
_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)


def head_matrices(model: PreTrainedModel) -> list[HeadMatrix]:
    """Return every projection to queries, keys and values: its name, its weight (heads * width, inputs), and
    the number of its heads.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    >>> [(name.rpartition(".")[2], heads) for name, _, heads in head_matrices(LlamaForCausalLM(config))]
    [('q_proj', 4), ('k_proj', 2), ('v_proj', 2)]
    """
    matrices = []
    for attention in attention_modules(model):
        parts = dict(attention.module.named_children())
        names = next(
            (names for names in _NAMES if all(isinstance(parts.get(n), nn.Linear) for n in names)), None
        )
        if names is None:
            raise ValueError(
                f"repulse: {type(attention.module).__name__} has no separate linear maps to queries, keys and"
                " values"
            )
        # A head of queries may have more rows than its width: in Qwen3-Next they include those of a gate.
        key_heads = len(_weight(parts[names[1]])) // attention.layer_spec.head_dim
        for name, heads in zip(names, (attention.layer_spec.heads, key_heads, key_heads), strict=True):
            matrices.append((f"{attention.name}.{name}", _weight(parts[name]), heads))
    if all(heads == 1 for _, _, heads in matrices):
        raise ValueError(
            f"repulse: the layers of {type(model).__name__} have one head each, and no other to repel"
        )
    return matrices


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
    """Change the gradients of a model's heads in place; call it between ``loss.backward()`` and
    ``optimizer.step()``.

    alpha
        Strength of the push.
    kind
        "svgd": heads share their gradients by how close they are, and push each other. "spos": the same with
        noise, which keeps heads spread where many dimensions let them collapse. "repel": every head keeps its
        own gradient, and is pushed.
    temperature, step_size
        Parameters of the noise of "spos": a head's own gradient has the weight ``temperature``; the step size
        is the learning rate. Under Adam, which rescales gradients, this is no exact sampler.
    generator
        Random generator of the noise; torch's default if None. Processes that train copies of one model (DDP)
        need generators of the same seed for "spos", or their copies drift apart.

    Distances are float32 whatever the model's dtype. Heads that are exactly alike are pushed in random
    directions.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=4)
    >>> model, tokens = LlamaForCausalLM(config), torch.arange(9)[None]
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(tokens, labels=tokens).loss.backward()
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
    _change(matrices, kind, generator, alpha=alpha, temperature=temperature, step_size=step_size)


def _check(kind: str, **numbers: float) -> None:
    one_of("repulse", "kind", kind, REPULSIONS)
    for name, value in numbers.items():
        check_not_negative("repulse", name, value)


def _change(
    matrices: list[HeadMatrix], kind: str, generator: torch.Generator | None, **numbers: float
) -> None:
    # A schedule may end at 0, by which the noise is divided.
    numbers["step_size"] = max(numbers["step_size"], 1e-12)
    for _, weight, heads in matrices:
        if weight.grad is not None:
            positions, gradients = (x.float().reshape(heads, -1) for x in (weight.detach(), weight.grad))
            changed = descent(positions, gradients, kind, generator=generator, **numbers)
            weight.grad.copy_(changed.reshape(weight.shape))


class Repulsion(TrainerCallback):
    """Callback of transformers' Trainer for :func:`repulse`: ``Trainer(model, ...,
    callbacks=[Repulsion(alpha=0.1)])``.

    Trainer calls it after it has clipped the gradients, so the push is measured against clipped gradients;
    they are clipped once more after it. With gradient accumulation it is called once for each step of the
    optimizer. The noise of "spos" has the step size of the schedule; it comes from Trainer's seed and the
    number of the step, so it is the same in all processes and after resuming.
    """

    def __init__(self, alpha: float = 0.1, kind: str = "svgd", *, temperature: float = 1e-9) -> None:
        _check(kind, alpha=alpha, temperature=temperature)
        self.alpha, self.kind, self.temperature = alpha, kind, temperature
        self.matrices: list[HeadMatrix] = []

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Collect the head matrices once."""
        self.matrices = head_matrices(model)
        if not any(weight.requires_grad for _, weight, _ in self.matrices):
            raise ValueError(
                "repulse: no projection to queries, keys or values is trained, so no head can be pushed"
            )

    @torch.no_grad()
    def on_pre_optimizer_step(
        self, args: Any, state: Any, *_: Any, model: Any = None, optimizer: Any = None, **__: Any
    ) -> None:
        """Change the gradients of the heads."""
        step_size, device = optimizer.param_groups[0]["lr"], self.matrices[0][1].device
        noise = seeded(args.seed, "repulsion", state.global_step, device=device)
        numbers = {"alpha": self.alpha, "temperature": self.temperature, "step_size": step_size}
        _change(self.matrices, self.kind, noise, **numbers)
        if args.max_grad_norm and args.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)


_APART = 1e-3  # particles at one position are moved apart by this share of their size


def descent(
    positions: Tensor,
    gradients: Tensor,
    kind: str = "svgd",
    *,
    alpha: float = 1.0,
    temperature: float = 1.0,
    step_size: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the direction that replaces the gradients, (particles, size).

    >>> pair = torch.tensor([[0.0], [0.1]])
    >>> descent(pair, torch.zeros(2, 1), "repel")          # gradient descent moves them apart
    tensor([[ 3.6620], [-3.6620]])
    """
    one_of("repulse", "kind", kind, REPULSIONS)
    count = len(positions)
    if count > 1:
        weights, bandwidth, positions = _kernel(positions, generator)
        # sum_j K_ij (x_i - x_j) / h^2 as two products, without a tensor of all pairs.
        push = (weights.sum(1, keepdim=True) * positions - weights @ positions) * (alpha / bandwidth / count)
        direction = (gradients if kind == "repel" else weights @ gradients / count) - push
    else:
        direction = gradients
    if kind == "spos":
        noise = _noise(positions, generator)
        direction = direction + temperature * gradients - math.sqrt(2 * temperature / step_size) * noise
    return direction


def _noise(positions: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(positions.shape, dtype=positions.dtype, device=positions.device, generator=generator)


def _kernel(positions: Tensor, generator: torch.Generator | None) -> tuple[Tensor, float, Tensor]:
    """Return the kernel matrix, the squared bandwidth (from the median squared distance between different
    particles), and the positions.

    Published code takes the median of the whole matrix, whose diagonal is 0: with two particles its bandwidth
    is 0. Particles at the same position have no direction to be pushed in, so they get a random one.
    """
    squares = _squares(positions)
    different = ~torch.eye(len(positions), dtype=torch.bool, device=positions.device)
    if not bool(squares[different].all()):
        size = positions.square().mean().sqrt()
        positions = positions + _APART * torch.where(size > 0, size, 1.0) * _noise(positions, generator)
        squares = _squares(positions)
    # K at the median distance is 1 / (n + 1), so that the others together weigh about as much as the
    # particle itself (Liu and Wang 2016).
    bandwidth = 0.5 * squares[different].median().item() / math.log(len(positions) + 1)
    return torch.exp(-squares / (2 * bandwidth)), bandwidth, positions


def _squares(positions: Tensor) -> Tensor:
    # The usual shortcut over inner products cancels where particles are close,
    # which is where repulsion matters.
    return torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist").square()
