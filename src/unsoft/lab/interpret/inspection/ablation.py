"""Does a head matter? The loss of a language model without it, beside that without random heads.

The output of a head is set to 0 before the output projection, in every layer that attention goes through.
Rules, fixed before any number: a set of heads *matters* if the loss rises and the interval of the rise lies
above 0; it matters *more than random heads* if the difference to as many random heads of the same layers,
which are not in the role, lies above 0 with its interval, and *less* if below. Intervals are bootstrapped
over sequences, and over the random draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.lab.evidence import Interval, resampled_mean
from unsoft.lab.interpret.inspection.batches import Batch, batches
from unsoft.lab.interpret.inspection.inspection import Inspection
from unsoft.lab.interpret.inspection.layout import Layout, find_layout
from unsoft.lab.interpret.inspection.roles import ROLES
from unsoft.lab.interpret.inspection.walk import evaluating, model_of, runner

HEADS, DRAWS = 3, 6
"""Heads of each role that are removed, and random sets of as many."""
SEQUENCES, LENGTH = 16, 128
Place = tuple[int, int]
"""Layer and head."""


@dataclass(frozen=True)
class Removed:
    """One set of heads, and what the loss (nats per token) becomes without it."""

    role: str
    heads: str
    """Layer.head of each."""
    change: float
    low: float
    high: float
    random: float | None = None
    """The change without random heads, mean over draws."""
    difference: float | None = None
    """Change less that of random heads."""
    difference_low: float | None = None
    difference_high: float | None = None
    verdict: str = ""


def ablate(
    model: nn.Module,
    texts: Any,
    found: Inspection,
    *,
    tokenizer: Any = None,
    heads: int = HEADS,
    draws: int = DRAWS,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    batch_size: int = 4,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """What the model loses without the strongest ``heads`` of each role, one by one and together, as plain
    data.

    ``texts`` are what :func:`unsoft.lab.interpret.inspect` takes; of them the first ``sequences`` of
    ``length`` tokens
    are read. Every set of heads is compared with ``draws`` random ones. ``progress`` is called with the
    number of the pass, their number, and what is removed.

    >>> import unsoft
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(50, (3, 20))
    >>> done = ablate(model, tokens, unsoft.lab.interpret.inspect(model, tokens), heads=1, draws=2)
    >>> done["sequences"], done["tokens"], sorted(done["removed"][0])[:2]
    (3, 57, ['change', 'difference'])
    """
    model = model_of(model)
    if not model.can_generate():
        raise ValueError(
            f"ablate: {type(model).__name__} predicts no next token, so it has no loss to compare; give a"
            " causal language model"
        )
    for name, value in (("heads", heads), ("draws", draws)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"ablate: argument '{name}' must be a whole number of at least 1, not {value!r}")
    parts = batches(texts, tokenizer, batch_size, length, model.device, sequences)
    with evaluating(model):
        layout = find_layout(model, runner(model), parts[0])
        plan = _plan(found, layout, heads, draws, random.Random(seed))
        total = 1 + sum(1 + len(controls) for _, _, controls in plan)
        done = iter(range(total))

        def losses_without(places: Sequence[Place], words: str) -> Tensor:
            if progress is not None:
                progress(next(done), total, words)
            with without(layout, places):
                return losses(model, parts)

        whole = losses_without((), "nothing")
        removed = []
        for role, places, controls in plan:
            change = losses_without(places, f"{role}: {_named(places)}") - whole
            others = [losses_without(control, f"random heads beside {role}") - whole for control in controls]
            removed.append(judged(role, _named(places), change, torch.stack(others) if others else None))
    return {
        "loss": float(whole.mean()),
        "sequences": len(whole),
        "tokens": sum(int(_counted(part).sum()) for part in parts),
        "draws": draws,
        "removed": [asdict(one) for one in removed],
    }


def judged(role: str, heads: str, change: Tensor, others: Tensor | None) -> Removed:
    """The verdict from changes (sequences,) and those of random heads (draws, sequences).

    >>> up, flat = torch.full((8,), 0.5), torch.zeros(2, 8)
    >>> judged("sink", "0.1", up, flat).verdict, judged("sink", "0.1", 0 * up, flat + 0.5).verdict
    ('matters, more than random heads', 'not shown to matter, less than random heads')
    """
    own = resampled_mean(change)
    word = "matters" if own.low > 0 else "harms" if own.high < 0 else "not shown to matter"
    if others is None:
        return Removed(role, heads, own.mean, own.low, own.high, verdict=word)
    beside = resampled_mean(change - others)
    return Removed(
        role,
        heads,
        own.mean,
        own.low,
        own.high,
        float(others.mean()),
        beside.mean,
        beside.low,
        beside.high,
        f"{word}, {_compared(beside)}",
    )


def _compared(beside: Interval) -> str:
    if beside.low > 0:
        return "more than random heads"
    return "less than random heads" if beside.high < 0 else "not told from random heads"


@contextmanager
def without(layout: Layout, places: Sequence[Place]) -> Iterator[None]:
    """The heads at ``places`` give 0 inside the ``with`` block."""
    with ExitStack() as undo:
        for number, layer in layout.layers.items():
            gone = [head for at, head in places if at == number]
            if gone and layer.projection is not None:
                hook = layer.projection.register_forward_pre_hook(_silence(layer.heads, gone))
                undo.callback(hook.remove)
        yield


def _silence(heads: int, gone: list[int]) -> Callable[..., tuple[Tensor, ...]]:
    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = arguments[0]
        split = given.reshape(*given.shape[:-1], heads, -1).clone()
        split[..., gone, :] = 0
        return (split.reshape(given.shape), *arguments[1:])

    return hook


def _plan(
    found: Inspection, layout: Layout, heads: int, draws: int, chance: random.Random
) -> list[tuple[str, list[Place], list[list[Place]]]]:
    """For each role its strongest heads, each alone and all together, with random sets for the latter."""
    there = [
        (layer.number, head)
        for layer in layout.layers.values()
        if layer.projection is not None
        for head in range(layer.heads)
    ]
    plan: list[tuple[str, list[Place], list[list[Place]]]] = []
    for role in ROLES:
        ranked = [(record["layer"], record["head"]) for record in found.ranked(role)]
        best = [place for place in ranked if place in there][:heads]
        if not best:
            continue
        free = [place for place in there if place not in ranked]
        controls = [_drawn(best, free, chance) for _ in range(draws)] if len(free) >= len(best) else []
        plan += [(role.name, [place], []) for place in best if len(best) > 1]
        plan.append((role.name, best, controls))
    return plan


def _drawn(best: list[Place], free: list[Place], chance: random.Random) -> list[Place]:
    """As many heads of the same layers; of any layer where there are none left."""
    drawn: list[Place] = []
    for layer, _ in best:
        left = [place for place in free if place not in drawn]
        drawn.append(chance.choice([place for place in left if place[0] == layer] or left))
    return drawn


def losses(model: Any, parts: Sequence[Batch]) -> Tensor:
    """Mean loss (nats per token) of each sequence."""
    found = []
    for part in parts:
        logits = model(**part.inputs).logits[:, :-1].float()
        right = part.inputs["input_ids"][:, 1:]
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), right, reduction="none")
        counted = _counted(part)
        found.append((loss * counted).sum(-1) / counted.sum(-1).clamp(min=1))
    return torch.cat(found).double().cpu()


def _counted(part: Batch) -> Tensor:
    """1 where the next token is there, 0 at padding."""
    mask = part.inputs.get("attention_mask")
    return torch.ones_like(part.inputs["input_ids"])[:, 1:] if mask is None else mask[:, 1:]


def _named(places: Sequence[Place]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in places)
