"""Measure what negative attention logits do in pretrained models.

``python -m experiments.signed_logits`` takes a few minutes of one core. Softmax turns a negative logit into a
small weight, so a model trained with it may use logits below zero only as "off". Two kinds of evidence are
written to docs/questions/models.json, which docs/generate/questions.py reads:

    interventions    what it costs to change logits in all heads of all layers at once (:data:`CHANGES`)
    probes           whether the size of a negative logit, among negative logits only, predicts a property of
                     its key in other sequences; the control shuffles the property over keys
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiments.real_models import KEPT, TESTED, read, update
from unsoft.hf import load_model
from unsoft.lab.bench.machine import machine
from unsoft.lab.interpret.models import evaluating

PROBE = "unsoft-signed-logits"
FREQUENT = 20
"""Keys among the most frequent tokens of the text count as frequent."""
PAIRS = 20_000
"""Query-key pairs per head and half of the text that a probe uses at most."""


def flattened(logits: Tensor, chosen: Tensor) -> Tensor:
    """Give all chosen logits of a row one value that keeps their total weight under softmax.

    >>> logits = torch.tensor([[0.0, -1.0, -3.0]])
    >>> flat = flattened(logits, logits < 0)
    >>> bool(flat[0, 1] == flat[0, 2]), torch.allclose(flat.exp().sum(), logits.exp().sum())
    (True, True)
    """
    total = logits.masked_fill(~chosen, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(chosen, total - chosen.sum(-1, keepdim=True).log(), logits)


def _as_many(logits: Tensor, visible: Tensor) -> Tensor:
    """Choose as many visible keys of each row at random as have a negative logit."""
    count = (visible & (logits < 0)).sum(-1, keepdim=True)
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~visible, 2.0)
    return (noise.argsort(-1).argsort(-1) < count) & visible


def _removed(logits: Tensor, visible: Tensor) -> Tensor:
    """Hide keys with a negative logit, except in rows that would be left without a key."""
    negative = visible & (logits < 0)
    return logits.masked_fill(negative & (visible & ~negative).any(-1, keepdim=True), -torch.inf)


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "negative logits made equal": lambda s, visible: flattened(s, visible & (s < 0)),
    "as many random logits made equal": lambda s, visible: flattened(s, _as_many(s, visible)),
    "other logits made equal": lambda s, visible: flattened(s, visible & (s >= 0)),
    "keys with negative logits removed": _removed,
    "negative logits set to 0": lambda s, visible: torch.where(visible, s.clamp(min=0), s),
}
"""Changes of logits, given which keys are visible. Making logits equal keeps their total weight."""


class Attention:
    """Stock softmax attention that passes its logits through ``change`` and shows them to ``see``."""

    def __init__(self) -> None:
        self.change: Callable[[Tensor, Tensor], Tensor] | None = None
        self.see: Callable[[int, Tensor, Tensor], None] = lambda layer, logits, visible: None

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        visible = torch.ones_like(logits, dtype=torch.bool)
        if attention_mask is not None:
            visible = (attention_mask > -1e4).expand_as(logits)
        self.see(getattr(module, "layer_idx", 0), logits, visible)
        if self.change is not None:
            logits = self.change(logits, visible)
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), None


def interventions(model: Any, attention: Attention, tokens: Tensor) -> list[dict[str, Any]]:
    """Return one row for each change: what each sequence loses.

    It is the gain in loss (nats) of a language model, else the relative change of the last states.
    """
    rows = []
    before = None
    for name, change in ({"none": None} | CHANGES).items():
        attention.change = change
        results = []
        for one in tokens:
            if hasattr(model, "lm_head"):
                results.append(model(one[None], labels=one[None], use_cache=False).loss[None])
            else:
                results.append(model(one[None]).last_hidden_state)
        if before is None:
            before = results
            continue
        if results[0].dim() == 1:
            lost = [float(after - plain) for after, plain in zip(results, before, strict=True)]
        else:
            pairs = zip(results, before, strict=True)
            lost = [float((after - plain).norm() / plain.norm()) for after, plain in pairs]
        rows.append({"change": name, "lost": lost})
    attention.change = None
    return rows


def auc(scores: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive example has a larger score than another one.

    >>> auc(torch.tensor([0.1, 0.4, 0.9]), torch.tensor([False, True, True]))
    1.0
    """
    ranks = scores.argsort().argsort().double() + 1
    many, others = int(positive.sum()), int((~positive).sum())
    return (
        float((ranks[positive].sum() - many * (many + 1) / 2) / (many * others)) if many and others else 0.5
    )


def probes(model: Any, attention: Attention, tokens: Tensor) -> list[dict[str, Any]]:
    """Return the mean AUC of all heads for each property of a key, and that of the shuffled control.

    The direction of a head (whether a strongly negative logit speaks for the property) is chosen on the first
    half of the sequences, its AUC is measured on the second.
    """
    frequent = tokens.flatten().bincount().argsort(descending=True)[:FREQUENT]
    pick = torch.Generator().manual_seed(0)
    seen: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
    shares: list[Tensor] = []

    def see(layer: int, logits: Tensor, visible: Tensor) -> None:
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        negative = visible & (logits < 0)
        shares.append(torch.stack([negative.sum() / visible.sum(), (weights * negative).sum(-1).mean()]))
        for head in range(logits.shape[1]):
            rows, keys = negative[0, head].nonzero(as_tuple=True)
            kept = torch.randperm(len(rows), generator=pick)[: PAIRS // len(tokens)]
            rows, keys = rows[kept], keys[kept]
            seen.setdefault((layer, head), []).append((logits[0, head, rows, keys], rows, keys))

    attention.see = see
    for one in tokens:
        model(one[None])
    attention.see = lambda layer, logits, visible: None
    half = len(tokens) // 2
    properties: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "the key is a frequent token": lambda text, rows, keys: torch.isin(text[keys], frequent),
        "the key is the next token": lambda text, rows, keys: (
            text[keys] == text.roll(-1)[rows.clamp(max=len(text) - 2)]
        ),
        "the key equals the query": lambda text, rows, keys: text[keys] == text[rows],
    }
    results = []
    for name, holds in properties.items():
        for shuffled in (False, True):
            scores = []
            for parts in seen.values():
                sides = []
                for side in (slice(0, half), slice(half, None)):
                    logits = torch.cat([part[0] for part in parts[side]])
                    truth = torch.cat(
                        [holds(text, *part[1:]) for text, part in zip(tokens[side], parts[side], strict=True)]
                    )
                    order = torch.randperm(len(truth), generator=pick) if shuffled else slice(None)
                    sides.append(auc(logits, truth[order]))
                scores.append(sides[1] if sides[0] >= 0.5 else 1 - sides[1])
            results.append({"property": name, "shuffled": shuffled, "auc": scores})
    share = torch.stack(shares).mean(0)
    results.append({"negative": float(share[0]), "weight": float(share[1])})
    return results


def main() -> None:
    """Measure both models."""
    attention = Attention()
    ALL_ATTENTION_FUNCTIONS.register(PROBE, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, eager_mask)
    models = {}
    for name in ("smollm2", "minilm"):
        model, tokenizer = load_model(name)
        model.set_attn_implementation(PROBE)
        tokens = read(tokenizer, *TESTED)
        with evaluating(model), torch.no_grad():
            models[name] = {
                "interventions": interventions(model, attention, tokens),
                "probes": probes(model, attention, tokens),
            }
        print(name, flush=True)
    about = {"machine": machine(), "written": datetime.now(UTC).isoformat()[:10]}
    update("signed-logits", {"sequences": TESTED[0], "length": TESTED[1], "models": models} | about)
    print(KEPT)


if __name__ == "__main__":
    main()
