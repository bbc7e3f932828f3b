"""A mechanism that takes part: its name, and its weights for queries and keys of our choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.lab.compare.level import STANDARD, Level
from unsoft.lab.compare.store import outside_digest
from unsoft.mechanisms import summary_of
from unsoft.modules.build import mechanism
from unsoft.modules.module import Mechanism
from unsoft.modules.registry import label_of, resolve
from unsoft.modules.registry import names as names_of_all
from unsoft.modules.spec import Family, MechanismSpec

WIDTH = 64
"""Dimensions of queries and keys wherever they are drawn at random."""


@dataclass(frozen=True)
class Subject:
    """``label`` is what pages and tables call it; ``mechanism`` a name or a formula."""

    label: str
    mechanism: str | Formula

    @cached_property
    def found(self) -> Formula | MechanismSpec:
        return resolve(self.mechanism)

    @property
    def formula(self) -> Formula | None:
        """The formula, if that is all it is."""
        return self.found if isinstance(self.found, Formula) else None

    @property
    def identity(self) -> str:
        """Everything that decides its numbers, as text; the code too, of a
        mechanism that somebody else has registered.
        """
        if isinstance(self.found, Formula):
            return self.found.key
        return f"{self.mechanism} {'' if self.family is None else outside_digest(self.family.build)}".strip()

    @property
    def family(self) -> Family | None:
        """The family, if it is one, with or without something around it."""
        return None if isinstance(self.found, Formula) else self.found.family

    @property
    def own(self) -> bool:
        """Did the user write its formula?"""
        return not isinstance(self.mechanism, str) or "{" in self.mechanism

    @property
    def summary(self) -> str:
        return summary_of(self.mechanism)

    def module(self, length: int, heads: int = 1, width: int = WIDTH) -> Mechanism:
        """As it is at its start, for sequences of ``length`` keys;
        mechanisms that come in pairs get twice the heads.

        The length is for mechanisms that are made for one, as cosformer is, unless the name says which.
        """
        made_for_a_length = self.family is not None and self.family.argument == "max_length"
        said = isinstance(self.found, MechanismSpec) and self.found.number is not None
        options = {"max_length": length} if made_for_a_length and not said else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            heads *= self.found.head_multiple if isinstance(self.found, MechanismSpec) else 1
            return mechanism(self.mechanism, heads=heads, head_dim=width, **options)

    def weights(
        self, query: Tensor, key: Tensor, *, scale: float | None = None, is_causal: bool = False
    ) -> Tensor:
        """Weights (batch, queries, keys) of one head for queries (batch,
        queries, width) and keys (batch, keys, width).

        Where a mechanism wants several queries or keys for one head, the further ones are a fixed rotation of
        the first, as projections are at random before training.
        """
        module = self.module(key.shape[1], width=query.shape[-1]).to(query.dtype)
        queries = _rotations(query, module.query_heads, 7)
        keys = _rotations(key, module.layer_spec.heads, 8)
        values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(9)).to(keys)
        # Where a row must know its own key, the query is the last token.
        aligned = any(part.aligned for part in module.parts)
        causal: bool | str = is_causal or ("lower_right" if aligned else False)
        found: Tensor = module(queries, keys, values, scale=scale, is_causal=causal, return_weights=True)[1]
        return found[:, 0]

    def row(self, *, width: int = WIDTH, seed: int = 0) -> Callable[[Tensor], Tensor]:
        """The function from logits (..., keys) to weights that the mechanism is.

        A formula needs the logits only. For others keys are made that have these logits with one query, and
        random parts orthogonal to it that stay the same.
        """
        if self.formula is not None:
            return self.formula.row

        def weigh(logits: Tensor) -> Tensor:
            flat = logits.reshape(-1, logits.shape[-1])
            query, key = keys_of(flat, width, seed)
            found = [
                self.weights(query.expand(len(part), 1, width), part)[:, 0] for part in torch.split(key, 256)
            ]
            return torch.cat(found).reshape(logits.shape)

        return weigh


def keys_of(logits: Tensor, width: int = WIDTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A query (1, width) and keys (rows, keys, width) with q . k / sqrt(width) = the logits (rows, keys).

    >>> q, k = keys_of(torch.tensor([[1.0, -2.0]]))
    >>> torch.allclose(k @ q[0] / 8, torch.tensor([[1.0, -2.0]]), atol=1e-5)
    True
    """
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, width, generator=generator, dtype=torch.float64).to(logits.dtype)
    noise = torch.randn(logits.shape[-1], width, generator=generator, dtype=torch.float64).to(logits.dtype)
    along = query / query.norm()
    noise = noise - (noise @ along.T) * along
    return query, logits[..., None] * (math.sqrt(width) / query.norm()) * along + noise


def _rotations(x: Tensor, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    heads = [x]
    while len(heads) < count:
        square = torch.randn(x.shape[-1], x.shape[-1], generator=generator, dtype=torch.float64)
        heads.append(x @ torch.linalg.qr(square).Q.to(x.dtype))
    return torch.stack(heads, 1)


def default_names(level: Level, own: bool) -> tuple[str, ...]:
    """The names that take part unless the user says which: a few beside
    formulas of one's own, all there are at the full level.
    """
    if own:
        return ("softmax", "cog", "relu2", "linear-relu", "magnitude")
    if level.mechanisms:
        return level.mechanisms
    return tuple(dict.fromkeys((*STANDARD.mechanisms, *names_of_all())))


def subjects_of(names: Sequence[str], own: Sequence[Formula]) -> list[Subject]:
    """The mechanisms by name, then the formulas; labels are made unique."""
    found: list[Subject] = []
    everything: list[str | Formula] = [*dict.fromkeys(names), *own]
    for given in everything:
        first = label_of(given) if isinstance(given, str) else given.name or str(given.weight)
        label = first
        taken = {subject.label for subject in found}
        number = 2
        while label in taken:
            label, number = f"{first} ({number})", number + 1
        found.append(Subject(label, given))
    for subject in found:
        subject.found  # noqa: B018 - an unknown name is an error now, not in the middle of a run
    return found
