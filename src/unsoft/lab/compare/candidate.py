"""A mechanism to compare: its label, and its weights for given queries and keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from unsoft.errors import FormulaError
from unsoft.formula import Formula
from unsoft.formula.formula import TEXT_PARTS, formula_from_text
from unsoft.formula.parser import reread
from unsoft.formula.stabilise import Normalise, has_exponential
from unsoft.lab.compare.store import outside_digest
from unsoft.mechanisms import summary_of
from unsoft.modules.build import mechanism
from unsoft.modules.module import Mechanism
from unsoft.modules.registry import label_of, parts_of, resolve
from unsoft.modules.spec import Family, MechanismSpec

WIDTH = 64
"""Dimensions of queries and keys wherever they are drawn at random."""


@dataclass(frozen=True)
class Candidate:
    """``label`` is what pages and tables call it; ``mechanism`` a name or a formula."""

    label: str
    mechanism: str | Formula

    @cached_property
    def spec(self) -> Formula | MechanismSpec:
        return resolve(self.mechanism)

    @property
    def formula(self) -> Formula | None:
        """The formula of a mechanism that consists of nothing else, or None."""
        return self.spec if isinstance(self.spec, Formula) else None

    @property
    def identity(self) -> str:
        """Everything that decides its numbers, as text, including the code of a registered plugin."""
        if isinstance(self.spec, Formula):
            return self.spec.key
        return f"{self.mechanism} {'' if self.family is None else outside_digest(self.family.build)}".strip()

    @property
    def family(self) -> Family | None:
        """The family of the mechanism inside any modifiers, or None for a formula."""
        return None if isinstance(self.spec, Formula) else self.spec.family

    @property
    def own(self) -> bool:
        """True if the user wrote its formula."""
        return not isinstance(self.mechanism, str) or "{" in self.mechanism

    @property
    def summary(self) -> str:
        return summary_of(self.mechanism)

    def module(self, length: int, heads: int = 1, width: int = WIDTH) -> Mechanism:
        """Return the initial module for sequences of ``length`` keys; paired mechanisms get twice the heads.

        Only mechanisms made for one length, such as cosformer, use it, unless their name has a number.
        """
        needs_length = self.family is not None and self.family.argument == "max_length"
        has_number = isinstance(self.spec, MechanismSpec) and self.spec.number is not None
        options = {"max_length": length} if needs_length and not has_number else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            heads *= self.spec.head_multiple if isinstance(self.spec, MechanismSpec) else 1
            return mechanism(self.mechanism, heads=heads, head_dim=width, **options)

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        geometry: Tensor | None = None,
    ) -> Tensor:
        """Return weights (batch, queries, keys) of one head for queries and keys (batch, tokens, width);
        ``geometry``: keys whose distances count, if those are others.

        If a mechanism needs several queries or keys per head, the further ones are fixed random rotations of
        the first, as random projections are before training. Gradients are recorded only if queries or keys
        require them.
        """
        module = self.module(key.shape[1], width=query.shape[-1]).to(query.dtype)
        queries = _rotations(query, module.query_heads, 7)
        keys = _rotations(key, module.layer_spec.heads, 8)
        values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(9)).to(keys)
        # A mechanism that needs to know the key of each row gets the query as the last token.
        aligned = any(part.aligned for part in module.parts)
        causal: bool | str = is_causal or ("lower_right" if aligned else False)
        compared = None if geometry is None else geometry[:, None].expand(-1, keys.shape[1], -1, -1)
        options = {"scale": scale, "is_causal": causal, "geometry_keys": compared}
        with torch.set_grad_enabled(torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
            weights: Tensor = module(queries, keys, values, **options, return_weights=True)[1]
        return weights[:, 0]

    def row(self, *, width: int = WIDTH, seed: int = 0) -> Callable[[Tensor], Tensor]:
        """Return the mechanism as a function from logits (..., keys) to weights.

        A formula needs the logits only. Others get keys that have these logits with one query, plus fixed
        random parts orthogonal to it.
        """
        if self.formula is not None:
            return self.formula.row

        def weigh(logits: Tensor) -> Tensor:
            flat = logits.reshape(-1, logits.shape[-1])
            query, key = keys_of(flat, width, seed)
            weights = [
                self.weights(query.expand(len(part), 1, width), part)[:, 0] for part in torch.split(key, 256)
            ]
            return torch.cat(weights).reshape(logits.shape)

        return weigh


def normals(seed: int, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """Return a function from shapes to standard normal numbers, one stream for each seed."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def keys_of(logits: Tensor, width: int = WIDTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a query (1, width) and keys (rows, keys, width) with q . k / sqrt(width) = logits (rows, keys).

    >>> q, k = keys_of(torch.tensor([[1.0, -2.0]]))
    >>> torch.allclose(k @ q[0] / 8, torch.tensor([[1.0, -2.0]]), atol=1e-5)
    True
    """
    normal = normals(seed)
    query, noise = (normal(count, width).to(logits.dtype) for count in (1, logits.shape[-1]))
    along = query / query.norm()
    noise = noise - (noise @ along.T) * along
    return query, logits[..., None] * (math.sqrt(width) / query.norm()) * along + noise


def _rotations(x: Tensor, count: int, seed: int) -> Tensor:
    normal, heads = normals(seed), [x]
    while len(heads) < count:
        heads.append(x @ torch.linalg.qr(normal(x.shape[-1], x.shape[-1])).Q.to(x.dtype))
    return torch.stack(heads, 1)


def candidates_of(names: Sequence[str], own: Sequence[Formula]) -> list[Candidate]:
    """Return the mechanisms by name, then the formulas; labels are made unique.

    An unknown name raises here, not in the middle of a run.
    """
    labels: dict[str, Candidate] = {}
    everything: list[str | Formula] = [*dict.fromkeys(names), *own]
    for one in everything:
        first = label = label_of(one) if isinstance(one, str) else one.name or str(one.weight)
        number = 2
        while label in labels:
            label, number = f"{first} ({number})", number + 1
        labels[label] = Candidate(label, one)
    for candidate in labels.values():
        resolve(candidate.mechanism)
    return list(labels.values())


_NAME = re.compile(r"[A-Za-z][\w-]*(\([-+0-9.eE]*\))?")
_SYMBOL = re.compile(r"[snij]|[0-9.]*")


def is_name(text: str) -> bool:
    """Return True for a name such as cog, polynomial(3) or logn+cog, False for a formula.

    >>> [is_name(text) for text in ("tanh", "logn+cog", "polynomial(3)", "tanh(s)", "s + 1", "s-n")]
    [True, True, True, False, False, False]
    """
    parts = parts_of(text)
    named = parts[-1].startswith("{") or all(_NAME.fullmatch(part) for part in parts)
    return named and not all(_SYMBOL.fullmatch(word.strip()) for word in re.split("[-+]", text))


def read_formula(
    text: str, normalise: Normalise | None = None, name: str | None = None
) -> tuple[Formula, str]:
    """Return the formula with a normaliser, chosen if the text has none, and a line about the choice.

    >>> read_formula("tanh(s)")[1]
    'normalise=count (chosen: no exponentials): weights are divided by the number of keys'
    """
    if not text.strip():
        raise FormulaError("formula: the text is empty; write a weight such as 'tanh(s)*exp(abs(s))'")
    about = "" if name is None else f"; name={name}"
    if normalise is not None:
        return formula_from_text(f"{text}; normalise={normalise}{about}"), ""
    given = {piece.partition("=")[0].strip() for piece in text.split(";")}
    if given & {"mass", "normalise", "peak"}:
        return formula_from_text(text + about), ""
    probe = formula_from_text(f"{text}; normalise=abs{about}")
    if "n" in probe.weight.symbols:
        return formula_from_text(text + about), "not normalised: the weight mentions n"
    pieces = [piece.strip() for piece in text.split(";")]
    written = next((piece for piece in pieces if piece.startswith("weight=")), pieces[0])
    if has_exponential(reread(written.removeprefix("weight="))):
        kind, why = ("abs", "both signs") if probe.signed else ("sum", "one sign")
        by = "their absolute sum" if probe.signed else "their sum"
        note = f"normalise={kind} (chosen: exponentials of {why}): weights are divided by {by}"
        return formula_from_text(f"{text}; normalise={kind}{about}"), note
    note = "normalise=count (chosen: no exponentials): weights are divided by the number of keys"
    return formula_from_text(f"{text}; normalise=count{about}"), note


def in_braces(formula: Formula, label: str = "") -> str:
    """Return the formula as a name in braces, which files and worker processes can resolve.

    >>> in_braces(Formula("tanh(tau*s)/n", params={"tau": 2.0}), "mine")
    '{weight=tanh(tau*s)/n;bias=strength;tau=2.0;name=mine}'
    """
    if formula.fields:
        raise ValueError("a formula with fields needs a class that computes them; register it, use its name")
    pairs: dict[str, Any] = {part: text for part, text in formula.to_dict().items() if part in TEXT_PARTS}
    pairs.update(formula.params)
    if label:
        pairs["name"] = "".join(c if c.isalnum() or c in " .+()-_" else " " for c in label)
    return "{" + ";".join(f"{key}={value}" for key, value in pairs.items()) + "}"
