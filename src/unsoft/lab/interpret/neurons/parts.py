"""Where a language model keeps what neurons need: its MLPs' output maps, its final norm, its unembedding.

Four ways of naming these parts are known, those of Llama, GPT-2, GPT-NeoX and OPT; most other models follow
one of them. A model that follows none is refused, and told what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Style:
    """Names of the parts; ``down`` is inside a block and maps the neurons to the residual stream."""

    name: str
    blocks: str
    down: str
    norm: str


STYLES = (
    Style("Llama", "model.layers", "mlp.down_proj", "model.norm"),
    Style("GPT-2", "transformer.h", "mlp.c_proj", "transformer.ln_f"),
    Style("GPT-NeoX", "gpt_neox.layers", "mlp.dense_4h_to_h", "gpt_neox.final_layer_norm"),
    Style("OPT", "model.decoder.layers", "fc2", "model.decoder.final_layer_norm"),
)


@dataclass(frozen=True)
class Parts:
    """The modules of a model that neurons are looked at through."""

    style: str
    blocks: list[nn.Module]
    downs: list[nn.Module]
    """Of each block the map whose inputs are the neurons' activations."""
    norm: nn.Module
    head: nn.Module

    def writes(self, layer: int) -> Tensor:
        """(neurons, width): what each neuron of a layer adds to the residual stream,
        per unit of activation."""
        return matrix(self.downs[layer]).detach().float()


def find_parts(model: Any) -> Parts:
    """The parts of a transformers language model; ValueError with what it lacks.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> parts = find_parts(LlamaForCausalLM(config))
    >>> parts.style, len(parts.blocks), parts.writes(1).shape
    ('Llama', 2, torch.Size([24, 16]))
    """
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"neurons: argument 'model' must be a transformers language model, not {type(model).__name__}"
        )
    lacking = {style: _lacks(model, style) for style in STYLES}
    style = min(lacking, key=lambda style: len(lacking[style]))
    if missing := lacking[style]:
        raise ValueError(
            f"neurons: {type(model).__name__} cannot be looked at: it lacks {' and '.join(missing)}"
            f" (nearest known style: {style.name}; others: {', '.join(s.name for s in STYLES if s != style)})"
        )
    blocks = list(model.get_submodule(style.blocks).children())
    downs = [block.get_submodule(style.down) for block in blocks]
    return Parts(style.name, blocks, downs, model.get_submodule(style.norm), model.get_output_embeddings())


def _lacks(model: nn.Module, style: Style) -> list[str]:
    """What a model would still need to follow a style, in words."""
    missing = []
    blocks = _inside(model, style.blocks)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        missing += [f"a list of blocks ({style.blocks})", f"an MLP ({style.down})"]
    else:
        lacking = [index for index, block in enumerate(blocks) if not _is_matrix(_inside(block, style.down))]
        if lacking:
            which = "every block" if len(lacking) == len(blocks) else f"block {lacking[0]}"
            missing.append(f"a plain MLP in {which} (a linear map called {style.down})")
    if _inside(model, style.norm) is None:
        missing.append(f"a final norm ({style.norm})")
    if not _is_matrix(model.get_output_embeddings()):  # type: ignore[operator]
        missing.append("an unembedding (a linear language-model head)")
    return missing


def _inside(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _is_matrix(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()


def matrix(module: nn.Module) -> Tensor:
    """(inputs, outputs) of a linear map; GPT-2's Conv1D keeps it that way round."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight if type(module).__name__ == "Conv1D" else weight.mT


@contextmanager
def replaced_inputs(module: nn.Module, change: Any) -> Iterator[None]:
    """Inside the ``with`` block ``change(input)`` stands for the first input of ``module``."""
    hook = module.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def watched_inputs(*modules: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """Inside the ``with`` block the latest first input of each module is kept."""
    seen: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen[module] = (given[0] if given else next(iter(named.values()))).detach()

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def check_layer(layer: int | None, parts: Parts) -> int:
    """The number of a layer; None is the last, negative ones count from the end."""
    count = len(parts.blocks)
    if layer is None:
        return count - 1
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise ValueError(
            f"neurons: argument 'layer' must be a whole number from 0 to {count - 1}, not {layer!r}"
        )
    return layer % count


def is_last(layer: int, parts: Parts) -> bool:
    return layer == len(parts.blocks) - 1
