"""Directions to steer a model in: a vector for each layer, whose model they are of, and their file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import PreTrainedModel

from unsoft.files import write_whole
from unsoft.hf.recipe import select_all
from unsoft.lab.interpret.steering.fingerprint import fingerprint
from unsoft.lab.interpret.steering.places import blocks, check_site, width

_KEY, _SCHEMA = "unsoft.steering", 1


@dataclass(frozen=True)
class Directions:
    """Vectors by layer. A strength of 1 moves a state as far as the two kinds of examples are apart.

    >>> found = Directions({1: torch.tensor([3.0, 4.0])}, site="block", method="mean", model="0" * 40)
    >>> found.norms()
    {1: 5.0}
    """

    vectors: Mapping[int, Tensor]
    """Layer (from 0) to vector (width,), float32."""
    site: str
    """What is steered: what leaves a "block", or what leaves its "mlp"."""
    method: str
    model: str
    """The fingerprint of the model they were found in."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """How they were found, as plain data."""

    def __post_init__(self) -> None:
        check_site(self.site)
        if not self.vectors:
            raise ValueError("steer: directions need a vector for at least one layer")
        for layer, vector in self.vectors.items():
            if vector.dim() != 1 or not bool(vector.isfinite().all()):
                raise ValueError(f"steer: the vector of layer {layer} must be one row of finite numbers")

    def norms(self) -> dict[int, float]:
        """Length of the vector of each layer."""
        return {layer: vector.norm().item() for layer, vector in self.vectors.items()}

    def only(self, layers: int | str | Iterable[int | str], count: int) -> Directions:
        """Those of some layers, of a model with ``count``: 3, "4-7", [0, "8-"]."""
        wanted = select_all([layers] if isinstance(layers, (int, str)) else layers, count)
        if missing := sorted(wanted - set(self.vectors)):
            raise ValueError(
                f"steer: there is no direction for layer {missing[0]}; there is for {sorted(self.vectors)}"
            )
        return replace(self, vectors={layer: self.vectors[layer] for layer in sorted(wanted)})

    def as_long_as(self, other: Directions) -> Directions:
        """The same ways with the lengths of others, layer by layer."""
        norms = other.norms()
        vectors = {
            layer: vector * (norms[layer] / vector.norm().clamp_min(1e-30))
            for layer, vector in self.vectors.items()
        }
        return replace(self, vectors=vectors)

    def random(self, seed: int) -> Directions:
        """Directions drawn at random, with the same lengths: what steering must be better than."""
        generator = torch.Generator().manual_seed(seed)
        vectors = {
            layer: torch.randn(vector.shape, generator=generator) for layer, vector in self.vectors.items()
        }
        return replace(self, vectors=vectors, method="random").as_long_as(self)

    def check_model(self, model: PreTrainedModel) -> None:
        """ValueError if they were found in another model."""
        count = len(blocks(model))
        if (last := max(self.vectors)) >= count or min(self.vectors) < 0:
            raise ValueError(
                f"steer: a direction is for layer {last}, and {type(model).__name__} has {count} layers"
            )
        for layer, vector in self.vectors.items():
            if len(vector) != width(model):
                raise ValueError(
                    f"steer: the direction of layer {layer} has {len(vector)} numbers, and states of this"
                    f" model have {width(model)}"
                )
        if (mine := fingerprint(model)) != self.model:
            raise ValueError(
                "steer: these directions were found in another model, or in this one with other weights"
                f" (fingerprint {self.model[:12]}, here {mine[:12]}); fit them again"
            )

    def save(self, path: str | Path) -> None:
        """A safetensors file: the vectors, and as metadata what they are."""
        told = {
            "schema": _SCHEMA,
            "site": self.site,
            "method": self.method,
            "model": self.model,
            "about": dict(self.about),
        }
        tensors = {str(layer): vector.float().contiguous() for layer, vector in self.vectors.items()}
        write_whole(Path(path), to_bytes(tensors, {_KEY: json.dumps(told)}))

    @staticmethod
    def load(path: str | Path) -> Directions:
        """What :meth:`save` wrote."""
        if not Path(path).is_file():
            raise ValueError(f"steer: there is no file {str(path)!r}")
        try:
            with safe_open(str(path), "pt") as file:
                told = json.loads((file.metadata() or {})[_KEY])
                vectors = {int(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if told["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {told['schema']}")
            names = ("site", "method", "model", "about")
            return Directions(dict(sorted(vectors.items())), **{name: told[name] for name in names})
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as problem:
            raise ValueError(
                f"steer: {str(path)!r} does not hold directions that unsoft wrote ({problem})"
            ) from None
