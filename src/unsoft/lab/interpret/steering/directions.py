"""Directions to steer a model in: where they apply, their model and file; ``steering`` pushes along them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.linalg import vector_norm
from transformers import PreTrainedModel

from unsoft.checks import finite, one_of
from unsoft.files import write_whole
from unsoft.hf.attention import NAME
from unsoft.lab.interpret.models import hooked, transformers_model

BLOCK, MLP = "block", "mlp"
SITES = (BLOCK, MLP)
ALL, PROMPT, GENERATED = "all", "prompt", "generated"
POSITIONS = (ALL, PROMPT, GENERATED)
_MLPS = ("mlp", "feed_forward", "ffn", "fc2")
"""Names of the MLP of a block in transformers; fc2 is the last layer of OPT's, which has no module."""
_KEY, _SCHEMA = "unsoft.steering", 1
_SAMPLE = 64
"""Numbers of each tensor in a fingerprint, evenly spaced, so that models of any size take milliseconds."""


def language_part(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model with the stack of language blocks, without head and vision tower."""
    decoder = transformers_model(model, "steer").get_decoder()
    return model if decoder is None else decoder


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the stack of language blocks.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> len(blocks(GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=9))))
    3
    """
    part = language_part(model)
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for module in part.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"steer: {type(model).__name__} has no stack of {count} language blocks, so no layer to steer"
    )


def modules_at(model: PreTrainedModel, site: str) -> list[nn.Module]:
    """Return for each layer the module whose output is steered."""
    one_of("steer", "site", site, SITES)
    stack = list(blocks(model))
    return stack if site == BLOCK else [_mlp(block, number) for number, block in enumerate(stack)]


def _mlp(block: nn.Module, number: int) -> nn.Module:
    for name in _MLPS:
        if (mlp := getattr(block, name, None)) is not None:
            return mlp  # type: ignore[no-any-return]
    children = ", ".join(name for name, _ in block.named_children())
    raise ValueError(
        f"steer: layer {number} ({type(block).__name__}) has no MLP called {', '.join(_MLPS)}; it has"
        f" {children}. Steer what leaves its blocks instead: site={BLOCK!r}"
    )


def states_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the states (batch, tokens, width) in the output of a block or an MLP."""
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return 40 hex digits of a model's class, mechanisms and weights.

    They are the same for the same weights in float32 and bfloat16, if bfloat16 is what was saved.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    >>> one, two = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(two)
    (True, False)
    """
    total = hashlib.sha256(type(model).__name__.encode())
    total.update(json.dumps(getattr(model.config, NAME, None), sort_keys=True).encode())
    for name, tensor in sorted(model.named_parameters()):
        step = max(1, -(-tensor.numel() // _SAMPLE))
        total.update(f"{name} {tuple(tensor.shape)}".encode())
        total.update(tensor.flatten()[::step].float().cpu().numpy().tobytes())
    return total.hexdigest()[:40]


@dataclass(frozen=True)
class Directions:
    """Vectors by layer. A strength of 1 moves a state by the distance between the two kinds of examples.

    >>> directions = Directions({1: torch.tensor([3.0, 4.0])}, site="block", method="mean", model="0" * 40)
    >>> directions.norms()
    {1: 5.0}
    """

    vectors: Mapping[int, Tensor]
    """Layer (from 0) to vector (width,), float32."""
    site: str
    """What is steered: the output of a "block", or of its "mlp"."""
    method: str
    model: str
    """Fingerprint of the model they were fitted in."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """How they were fitted, as plain data."""

    def __post_init__(self) -> None:
        one_of("steer", "site", self.site, SITES)
        if not self.vectors:
            raise ValueError("steer: directions need a vector for at least one layer")
        for layer, vector in self.vectors.items():
            if vector.dim() != 1 or not bool(vector.isfinite().all()):
                raise ValueError(f"steer: the vector of layer {layer} must be one row of finite numbers")

    def norms(self) -> dict[int, float]:
        """Return the length of the vector of each layer."""
        return {layer: vector.norm().item() for layer, vector in self.vectors.items()}

    def as_long_as(self, other: Directions) -> Directions:
        """Return the same directions with the lengths of others, layer by layer."""
        norms = other.norms()
        vectors = {x: own * (norms[x] / own.norm().clamp_min(1e-30)) for x, own in self.vectors.items()}
        return replace(self, vectors=vectors)

    def random(self, seed: int) -> Directions:
        """Return random directions of the same lengths, as a negative control."""
        generator = torch.Generator().manual_seed(seed)
        vectors = {x: torch.randn(old.shape, generator=generator) for x, old in self.vectors.items()}
        return replace(self, vectors=vectors, method="random").as_long_as(self)

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise ValueError if they were fitted in another model."""
        count = len(blocks(model))
        if (last := max(self.vectors)) >= count or min(self.vectors) < 0:
            raise ValueError(
                f"steer: a direction is for layer {last}, and {type(model).__name__} has {count} layers"
            )
        width = int(model.config.get_text_config(decoder=True).hidden_size)
        for layer, vector in self.vectors.items():
            if len(vector) != width:
                raise ValueError(
                    f"steer: the direction of layer {layer} has {len(vector)} numbers, and states of this"
                    f" model have {width}"
                )
        if (own := fingerprint(model)) != self.model:
            raise ValueError(
                "steer: these directions were found in another model, or in this one with other weights"
                f" (fingerprint {self.model[:12]}, here {own[:12]}); fit them again"
            )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with the vectors, and the rest as metadata."""
        content = {"schema": _SCHEMA, "site": self.site, "method": self.method, "model": self.model}
        content["about"] = dict(self.about)
        tensors = {str(layer): vector.float().contiguous() for layer, vector in self.vectors.items()}
        write_whole(Path(path), to_bytes(tensors, {_KEY: json.dumps(content)}))

    @staticmethod
    def load(path: str | Path) -> Directions:
        """Read what :meth:`save` wrote."""
        if not Path(path).is_file():
            raise ValueError(f"steer: there is no file {str(path)!r}")
        try:
            with safe_open(str(path), "pt") as file:
                content = json.loads((file.metadata() or {})[_KEY])
                vectors = {int(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if content["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {content['schema']}")
            names = ("site", "method", "model", "about")
            return Directions(dict(sorted(vectors.items())), **{name: content[name] for name in names})
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as problem:
            raise ValueError(
                f"steer: {str(path)!r} does not hold directions that unsoft wrote ({problem})"
            ) from None


@contextmanager
def steering(
    model: PreTrainedModel,
    directions: Directions,
    strength: float = 1.0,
    *,
    positions: str | Collection[int] = ALL,
    keep_norm: bool = False,
) -> Iterator[None]:
    """Add ``strength`` times the direction of each layer to the states of the model, also in ``generate``.

    positions
        "all" tokens; those of the "prompt"; "generated": the last of the prompt, from which the first new
        token is predicted, and every new token; or token numbers, from 0, or from -1 at the prompt's end.
    keep_norm
        Rotate each state and keep its length.

    No weight is changed, and afterwards outputs are bit for bit as before. Blocks may be nested.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=9)).eval()
    >>> ahead = Directions({1: torch.ones(8)}, site="block", method="mean", model=fingerprint(model))
    >>> words = torch.tensor([[1, 2, 3]])
    >>> before = model(words).logits
    >>> with steering(model, ahead, 5.0, positions=[-1], keep_norm=True):
    ...     changed = model(words).logits != before
    >>> changed.any(-1), torch.equal(model(words).logits, before)
    (tensor([[False, False,  True]]), True)
    """
    finite("steer", "strength", strength)
    where = _Positions(positions)
    directions.check_model(model)
    modules = modules_at(model, directions.site)
    hooks = [
        modules[layer].register_forward_hook(_Push(strength * vector, where, keep_norm))
        for layer, vector in directions.vectors.items()
    ]
    if positions != ALL:
        hooks.append(language_part(model).register_forward_pre_hook(where.count_past, with_kwargs=True))
    with hooked(*hooks):
        yield


class _Positions:
    """Columns of a forward pass to steer; a pass may contain the whole text, or the newest token only."""

    def __init__(self, wanted: str | Collection[int]) -> None:
        numbers = not isinstance(wanted, str)
        if numbers and not all(isinstance(n, int) and not isinstance(n, bool) for n in wanted):
            raise TypeError(f"steer: argument 'positions' must be whole numbers, not {wanted!r}")
        if not wanted or (not numbers and wanted not in POSITIONS):
            raise ValueError(
                f"steer: argument 'positions' must be one of {', '.join(POSITIONS)}, or numbers, not"
                f" {wanted!r}"
            )
        self.wanted, self.past, self.prompt = wanted, 0, 0

    def count_past(self, module: object, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Read from the cache how many tokens precede those of this pass."""
        cache = options.get("past_key_values")
        self.past = 0 if cache is None else int(cache.get_seq_length())

    def columns(self, count: int) -> slice | list[int] | None:
        """Return the columns to steer among ``count`` new tokens; None for all."""
        if self.wanted == ALL:
            return None
        if self.past == 0:
            self.prompt = count
        if self.wanted == PROMPT:
            return None if self.past == 0 else []
        if self.wanted == GENERATED:
            return slice(count - 1, count) if self.past == 0 and count > 1 else None
        absolute = {n + self.prompt if n < 0 else n for n in self.wanted if isinstance(n, int)}
        return sorted(n - self.past for n in absolute if self.past <= n < self.past + count)


class _Push:
    """The hook of one layer."""

    def __init__(self, shift: Tensor, where: _Positions, keep_norm: bool) -> None:
        self.shift, self.where, self.keep_norm = shift, where, keep_norm

    def __call__(self, module: object, inputs: object, output: Any) -> Any:
        states = states_of(output)
        columns = self.where.columns(states.shape[1])
        if columns == []:
            return output
        if self.shift.dtype != states.dtype or self.shift.device != states.device:
            self.shift = self.shift.to(states)
        if columns is None:
            moved = self._moved(states)
        else:
            moved = states.clone()
            moved[:, columns] = self._moved(states[:, columns])
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    def _moved(self, states: Tensor) -> Tensor:
        moved = states + self.shift
        if not self.keep_norm:
            return moved
        size = vector_norm(moved, dim=-1, keepdim=True).clamp_min(torch.finfo(moved.dtype).tiny)
        rotated: Tensor = moved * (vector_norm(states, dim=-1, keepdim=True) / size)
        return rotated
