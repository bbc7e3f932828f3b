"""The parts of a language model that neurons act through, the path from the stream to logits, and what
flows through them on a text.

Four naming styles are known: Llama, GPT-2, GPT-NeoX and OPT; most other models follow one of them. For other
models ValueError names what is missing.

A norm divides the stream by one number per token, its scale, and multiplies by a gain. The gain is folded
into the unembedding, and so is the centring of a LayerNorm, which leaves

    logits = unembedding @ stream / scale + constant        (then the soft-cap, if there is one)

so an addition to the stream acts in two separable ways: through the scale, and directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.lab.interpret import models
from unsoft.lab.interpret.models import body_runner, matrix_of

FIRST = 3
"""Positions at the start of a sequence that are skipped: the first token's stream is unlike all others."""
LEAST = 32
"""Smallest number of tokens to measure on."""
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

    def logits(self, stream: Tensor) -> Tensor:
        """Return the logits of streams (..., width)."""
        return self.finish(stream @ self.unembedding.mT / self.norm.square(stream).sqrt()[..., None])

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
    down: nn.Module
    """The map of the last block whose inputs are the neurons' activations."""
    norm: nn.Module
    readout: Readout

    @property
    def last(self) -> int:
        """Number of the last layer."""
        return len(self.blocks) - 1

    def writes(self) -> Tensor:
        """Return (neurons, width): what each neuron adds to the residual stream per unit of activation."""
        matrix = matrix_of(self.down)
        assert matrix is not None
        return matrix.detach().float()


def find_parts(model: Any) -> ModelParts:
    """Return the parts of a transformers language model; raise ValueError with what is missing.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> parts = find_parts(LlamaForCausalLM(config))
    >>> parts.style, len(parts.blocks), parts.writes().shape
    ('Llama', 2, torch.Size([24, 16]))
    """
    model = models.transformers_model(model, "neurons")
    missing_by_style = {style: _missing(model, style) for style in STYLES}
    style = min(missing_by_style, key=lambda style: len(missing_by_style[style]))
    if missing := missing_by_style[style]:
        raise ValueError(
            f"neurons: {type(model).__name__} is not supported: it lacks {' and '.join(missing)}"
            f" (nearest known style: {style.name}; others: {', '.join(s.name for s in STYLES if s != style)})"
        )
    blocks = list(model.get_submodule(style.blocks).children())
    down = blocks[-1].get_submodule(style.down)
    norm = model.get_submodule(style.norm)
    readout = read_out(model, norm, model.get_output_embeddings())
    return ModelParts(model, style.name, blocks, down, norm, readout)


def _missing(model: Any, style: NamingStyle) -> list[str]:
    """Return what a model lacks to follow a style."""
    missing = []
    blocks = _submodule(model, style.blocks)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        missing += [f"a list of blocks ({style.blocks})", f"an MLP ({style.down})"]
    else:
        downs = [_submodule(block, style.down) for block in blocks]
        if lacking := [index for index, down in enumerate(downs) if not _is_matrix(down)]:
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
    matrix = matrix_of(module)
    return matrix is not None and matrix.is_floating_point()


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


@dataclass(frozen=True)
class TokenSequences:
    """Sequences of tokens (sequences, length) without padding, and the tokens of the whole text to count."""

    sequences: Tensor
    all_tokens: Tensor


@dataclass(frozen=True)
class Stream:
    """Activations of the neurons and input of the final norm at each measured token."""

    text: TokenSequences
    residual: Tensor
    """(tokens, width), the input of the final norm."""
    activations: Tensor
    """(tokens, neurons)."""
    target: Tensor
    """(tokens,), the next word."""
    sequence: Tensor
    position: Tensor
    """(tokens,), the sequence of each token and its position there."""

    def deviations(self) -> Tensor:
        """Return (tokens, neurons): what mean ablation adds to each activation."""
        return self.activations.mean(0) - self.activations


def read_text(text: Any, tokenizer: Any, length: int, tokens: int) -> TokenSequences:
    """Cut a text (str, with a tokenizer) or token ids (sequences, length) for at most ``tokens`` tokens.

    >>> read_text(torch.arange(80).view(2, 40), None, 256, 60).sequences.shape
    torch.Size([2, 40])
    """
    if isinstance(text, Tensor):
        if text.dim() != 2 or text.is_floating_point():
            raise TypeError(
                "neurons: argument 'text' as a tensor must hold token numbers (sequences, length), not"
                f" {text.dtype} of shape {tuple(text.shape)}"
            )
        rows, all_tokens = text, text.flatten()
    elif isinstance(text, str):
        if tokenizer is None:
            raise ValueError("neurons: a text needs argument 'tokenizer'; or give token numbers as a tensor")
        all_tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
        size = max(min(length, len(all_tokens)), 1)
        rows = all_tokens[: len(all_tokens) // size * size].view(-1, size)
    else:
        raise TypeError(
            f"neurons: argument 'text' must be a text or a tensor of token numbers, not {type(text).__name__}"
        )
    usable = max(rows.shape[1] - FIRST - 1, 0)  # the last token of a sequence has no next one
    if usable * len(rows) < LEAST:
        raise ValueError(
            f"neurons: argument 'text' is too short: {all_tokens.numel()} tokens leave {usable * len(rows)}"
            f" to measure on; at least {LEAST} are needed"
        )
    return TokenSequences(rows[: -(-tokens // usable)], all_tokens)


def read_stream(
    parts: ModelParts,
    text: TokenSequences,
    tokens: int,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Stream:
    """Run the model over the text, without its head, and keep what is needed of each token."""
    model, down, rows = parts.model, parts.down, text.sequences
    residuals, activations = [], []
    with models.evaluating(model), models.recorded_inputs(down, parts.norm) as seen:
        first = rows[:1].to(model.device)
        logits = model(first).logits
        check_readout(parts, seen[parts.norm], logits)
        _check_addition(parts, first, seen)
        run = body_runner(model)
        for at in range(0, len(rows), batch_size):
            run(input_ids=rows[at : at + batch_size].to(model.device))
            residuals.append(seen[parts.norm][:, FIRST:-1].flatten(0, 1).float())
            activations.append(by_sequence(seen[down], seen[parts.norm])[:, FIRST:-1].flatten(0, 1).float())
            if progress is not None:
                progress(min(at + batch_size, len(rows)), len(rows))
    count, size = len(rows), rows.shape[1] - FIRST - 1
    return Stream(
        text,
        torch.cat(residuals)[:tokens],
        torch.cat(activations)[:tokens],
        rows[:, FIRST + 1 :].flatten().to(model.device)[:tokens],
        torch.arange(count).repeat_interleave(size)[:tokens],
        torch.arange(FIRST, FIRST + size).repeat(count)[:tokens],
    )


def by_sequence(activations: Tensor, stream: Tensor) -> Tensor:
    """Return activations as (sequences, length, neurons), also for OPT, which flattens its tokens."""
    return activations.reshape(*stream.shape[:2], -1)


def _check_addition(parts: ModelParts, tokens: Tensor, seen: dict[Any, Tensor]) -> None:
    """Raise ValueError unless a neuron only adds its row of the map to the stream.

    Tested on the neuron with the largest spread.
    """
    down, model = parts.down, parts.model
    before = seen[parts.norm].clone()
    activations = by_sequence(seen[down], before).clone()
    neuron = int(activations.flatten(0, 1).float().std(0).argmax())

    def silence(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., neuron] = 0
        return x

    with models.replaced_inputs(down, silence):
        body_runner(model)(input_ids=tokens)
    expected = activations[..., neuron, None] * parts.writes()[neuron]
    error = float((before - seen[parts.norm] - expected).abs().max())
    if not error <= 1e-3 * float(expected.abs().max()) + 1e-4 * float(before.abs().max()):
        between = [name for name, _ in parts.blocks[-1].named_children() if "post" in name and "feed" in name]
        raise ValueError(
            f"neurons: the last MLP of {type(model).__name__} does not write straight into the stream that"
            f" the final norm reads: {between[0] if between else 'something'} is between them"
        )
