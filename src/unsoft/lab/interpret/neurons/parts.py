"""The parts of a language model that neurons act through, and the path from the stream to logits.

Four naming styles are known: Llama, GPT-2, GPT-NeoX and OPT; most other models follow one of them. For other
models ValueError names what is missing.

A norm divides the stream by one number per token, its scale, and multiplies by a gain. The gain is folded
into the unembedding, and so is the centring of a LayerNorm, which leaves

    logits = unembedding @ stream / scale + constant        (then the soft-cap, if there is one)

so an addition to the stream acts in two separable ways: through the scale, and directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.checks import whole_number
from unsoft.lab.interpret.models import transformers_model

_TOLERANCE = 1e-3
"""Largest allowed error of the formula, relative to the size of logits."""


@dataclass(frozen=True)
class NamingStyle:
    """Names of the parts; ``down`` is inside a block and maps the neurons to the residual stream."""

    name: str
    blocks: str
    down: str
    norm: str


STYLES = (
    NamingStyle("Llama", "model.layers", "mlp.down_proj", "model.norm"),
    NamingStyle("GPT-2", "transformer.h", "mlp.c_proj", "transformer.ln_f"),
    NamingStyle("GPT-NeoX", "gpt_neox.layers", "mlp.dense_4h_to_h", "gpt_neox.final_layer_norm"),
    NamingStyle("OPT", "model.decoder.layers", "fc2", "model.decoder.final_layer_norm"),
)


@dataclass(frozen=True)
class Norm:
    """Formula of a LayerNorm (``centred``) or an RMSNorm."""

    centred: bool
    eps: float
    gain: Tensor
    shift: Tensor | None

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def square(self, stream: Tensor) -> Tensor:
        """Return the squared scale, one number per token."""
        return self.centre(stream).square().mean(-1) + self.eps

    def __call__(self, stream: Tensor) -> Tensor:
        result = self.centre(stream) / self.square(stream).sqrt()[..., None] * self.gain
        return result if self.shift is None else result + self.shift


@dataclass(frozen=True)
class Readout:
    """``unembedding`` is (words, width) with the gain folded in, ``constant`` (words,) or None."""

    norm: Norm
    unembedding: Tensor
    constant: Tensor | None
    softcap: float | None

    def logits(self, stream: Tensor, square: Tensor | None = None) -> Tensor:
        """Return the logits of streams (..., width); ``square`` replaces the squared scale of the stream."""
        square = self.norm.square(stream) if square is None else square
        return self.finish(stream @ self.unembedding.mT / square.sqrt()[..., None])

    def finish(self, raw: Tensor) -> Tensor:
        """Return the logits from ``unembedding @ stream / scale``."""
        if self.constant is not None:
            raw = raw + self.constant
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


@dataclass(frozen=True)
class ModelParts:
    """The modules of a model that neurons act through."""

    model: Any
    style: str
    blocks: list[nn.Module]
    downs: list[nn.Module]
    """For each block, the map whose inputs are the neurons' activations."""
    norm: nn.Module
    readout: Readout

    @property
    def last(self) -> int:
        """Number of the last layer."""
        return len(self.blocks) - 1

    def writes(self, layer: int) -> Tensor:
        """Return (neurons, width): what each neuron adds to the residual stream per unit of activation."""
        down = self.downs[layer]
        weight = down.weight
        assert isinstance(weight, Tensor)
        # GPT-2's Conv1D stores (inputs, outputs), a Linear the transpose.
        return (weight if type(down).__name__ == "Conv1D" else weight.mT).detach().float()

    def check_layer(self, layer: int | None) -> int:
        """Return the number of a layer; None is the last, negative numbers count from the end."""
        count = len(self.blocks)
        if layer is None:
            return self.last
        if isinstance(layer, int) and -count <= layer < 0:
            return layer + count
        return whole_number("neurons", "layer", layer, 0, count - 1)


def find_parts(model: Any) -> ModelParts:
    """Return the parts of a transformers language model; raise ValueError with what is missing.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> parts = find_parts(LlamaForCausalLM(config))
    >>> parts.style, len(parts.blocks), parts.writes(1).shape
    ('Llama', 2, torch.Size([24, 16]))
    """
    model = transformers_model(model, "neurons")
    missing_by_style = {style: _missing(model, style) for style in STYLES}
    style = min(missing_by_style, key=lambda style: len(missing_by_style[style]))
    if missing := missing_by_style[style]:
        raise ValueError(
            f"neurons: {type(model).__name__} cannot be looked at: it lacks {' and '.join(missing)}"
            f" (nearest known style: {style.name}; others: {', '.join(s.name for s in STYLES if s != style)})"
        )
    blocks = list(model.get_submodule(style.blocks).children())
    downs = [block.get_submodule(style.down) for block in blocks]
    norm = model.get_submodule(style.norm)
    return ModelParts(
        model, style.name, blocks, downs, norm, read_out(model, norm, model.get_output_embeddings())
    )


def _missing(model: Any, style: NamingStyle) -> list[str]:
    """Return what a model lacks to follow a style."""
    missing = []
    blocks = _submodule(model, style.blocks)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        missing += [f"a list of blocks ({style.blocks})", f"an MLP ({style.down})"]
    else:
        lacking = [
            index for index, block in enumerate(blocks) if not _is_matrix(_submodule(block, style.down))
        ]
        if lacking:
            which = "every block" if len(lacking) == len(blocks) else f"block {lacking[0]}"
            missing.append(f"a plain MLP in {which} (a linear map called {style.down})")
    if _submodule(model, style.norm) is None:
        missing.append(f"a final norm ({style.norm})")
    if not _is_matrix(model.get_output_embeddings()):
        missing.append("an unembedding (a linear language-model head)")
    return missing


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _is_matrix(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()


def read_norm(module: nn.Module) -> Norm:
    """Return the formula of a norm, found by comparing candidates with the module's output.

    >>> read_norm(nn.LayerNorm(8)).centred
    True
    >>> read_norm(nn.Softmax(-1))
    Traceback (most recent call last):
    ValueError: neurons: the final norm Softmax is neither a LayerNorm nor an RMSNorm
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        probe = torch.randn(4, weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight)
        expected = module(probe).detach().float()
        for norm in _norms(module, weight.detach().float()):
            if torch.allclose(norm(probe.float()), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return norm
    raise ValueError(
        f"neurons: the final norm {type(module).__name__} is neither a LayerNorm nor an RMSNorm with a gain"
    )


def _norms(module: Any, weight: Tensor) -> Iterator[Norm]:
    """Yield the formulas that fit these parameters; Gemma's gain is one more than its weight."""
    names = ("eps", "variance_epsilon", "epsilon")
    eps = next((value for name in names if isinstance(value := getattr(module, name, None), float)), 1e-6)
    bias = getattr(module, "bias", None)
    shift = bias.detach().float() if isinstance(bias, Tensor) else None
    for centred in (True, False):
        for gain in (weight, 1 + weight):
            yield Norm(centred, eps, gain, shift)


def read_out(model: Any, module: nn.Module, head: Any) -> Readout:
    """Return the formula of the logits, from the final norm, the head and the configuration."""
    norm = read_norm(module)
    weight: Tensor = head.weight.detach().float()
    bias = getattr(head, "bias", None)
    constant = bias.detach().float() if isinstance(bias, Tensor) else None
    if norm.shift is not None:
        constant = weight @ norm.shift + (0.0 if constant is None else constant)
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    softcap = next((float(cap) for cap in caps if cap), None)
    return Readout(norm, norm.centre(weight * norm.gain), constant, softcap)


def check_readout(parts: ModelParts, stream: Tensor, logits: Tensor) -> None:
    """Raise ValueError if the model's logits differ from those of the formula."""
    ours = parts.readout.logits(stream.float())
    error = float((ours - logits.float()).abs().max())
    size = float(logits.float().abs().max())
    if not error <= _TOLERANCE * size + _TOLERANCE:
        raise ValueError(
            f"neurons: the logits of {type(parts.model).__name__} are not its final norm and unembedding"
            f" alone: they differ by {error:.2g} where the largest is {size:.2g}, so something else changes"
            " them (a scale, a projection, another norm)"
        )
