"""Loss of a language model without some heads.

The output of a head is set to 0 before the output projection. Rules, fixed before any measurement: a set of
heads *matters* if the loss rises and the 95 % confidence interval of the rise lies above 0. It matters *more
than random heads* if the difference to as many random heads of the same layers, which are not in the role,
lies above 0 with its interval, and *less* if below. Intervals are bootstrapped over sequences, and over the
random draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.checks import whole_number
from unsoft.lab.evidence import resampled_mean
from unsoft.lab.interpret.inspection.observe import Layout, find_layout
from unsoft.lab.interpret.inspection.result import ROLES, Inspection
from unsoft.lab.interpret.models import InputBatch, batches, evaluating, replaced_inputs, single_stack

HEADS, DRAWS = 3, 6
"""Heads of each role that are removed, and random sets of as many."""
SEQUENCES, LENGTH = 16, 128
Head = tuple[int, int]
"""Layer and number of a head."""


def ablate(
    model: nn.Module,
    texts: Any,
    inspection: Inspection,
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
    """Measure the loss without the strongest ``heads`` of each role, one by one and together.

    Return plain data. ``texts`` are as in :func:`unsoft.lab.interpret.inspect`; the first ``sequences`` of
    ``length`` tokens are used. Every set of heads is compared with ``draws`` random ones. ``progress`` is
    called with the number of the pass, the number of passes, and the ablated heads.

    >>> import unsoft
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(50, (3, 20))
    >>> done = ablate(model, tokens, unsoft.lab.interpret.inspect(model, tokens), heads=1, draws=2)
    >>> done["sequences"], done["tokens"], sorted(done["removed"][0])[:2]
    (3, 57, ['change', 'difference'])
    """
    model = single_stack(model)
    if not model.can_generate():
        raise ValueError(
            f"ablate: {type(model).__name__} predicts no next token, so it has no loss to compare; give a"
            " causal language model"
        )
    whole_number("ablate", "heads", heads)
    whole_number("ablate", "draws", draws)
    parts = batches(texts, tokenizer, batch_size, length, model.device, sequences)
    with evaluating(model):
        layout = find_layout(model, parts[0])
        plan = _plan(inspection, layout, heads, draws, random.Random(seed))
        total = 1 + sum(1 + len(controls) for _, _, controls in plan)
        passes = iter(range(total))

        def loss_without(removed: Sequence[Head], description: str) -> Tensor:
            if progress is not None:
                progress(next(passes), total, description)
            with without(layout, removed):
                return losses(model, parts)

        whole = loss_without((), "nothing")
        results = []
        for role, removed, controls in plan:
            change = loss_without(removed, f"{role}: {_names(removed)}") - whole
            others = [loss_without(control, f"random heads beside {role}") - whole for control in controls]
            results.append(judged(role, _names(removed), change, torch.stack(others) if others else None))
    return {
        "loss": float(whole.mean()),
        "sequences": len(whole),
        "tokens": sum(int(_predicted(part).sum()) for part in parts),
        "draws": draws,
        "removed": results,
    }


def judged(role: str, heads: str, change: Tensor, others: Tensor | None) -> dict[str, Any]:
    """Apply the rules to changes (sequences,) of the loss and those without random heads (draws, sequences).

    Return a row of the table: ``change`` of the loss in nats per token with its interval, ``random``, the
    mean change without random heads, ``difference``, change minus that, with its interval, and ``verdict``.

    >>> up, flat = torch.full((8,), 0.5), torch.zeros(2, 8)
    >>> judged("sink", "0.1", up, flat)["verdict"], judged("sink", "0.1", 0 * up, flat + 0.5)["verdict"]
    ('matters, more than random heads', 'not shown to matter, less than random heads')
    """
    own = resampled_mean(change)
    verdict = "matters" if own.low > 0 else "harms" if own.high < 0 else "not shown to matter"
    random_mean = difference = low = high = None
    if others is not None:
        random_mean = float(others.mean())
        beside = resampled_mean(change - others)
        difference, low, high = beside.mean, beside.low, beside.high
        compared = "more than" if low > 0 else "less than" if high < 0 else "not told from"
        verdict += f", {compared} random heads"
    return {
        "role": role,
        "heads": heads,
        "change": own.mean,
        "low": own.low,
        "high": own.high,
        "random": random_mean,
        "difference": difference,
        "difference_low": low,
        "difference_high": high,
        "verdict": verdict,
    }


@contextmanager
def without(layout: Layout, removed: Sequence[Head]) -> Iterator[None]:
    """Set the output of some heads to 0 inside the ``with`` block."""
    with ExitStack() as undo:
        for number, layer in layout.layers.items():
            gone = [head for at, head in removed if at == number]
            if gone and layer.projection is not None:
                silenced = partial(_silenced, heads=layer.heads, gone=gone)
                undo.enter_context(replaced_inputs(layer.projection, silenced))
        yield


def _silenced(x: Tensor, heads: int, gone: list[int]) -> Tensor:
    by_head = x.reshape(*x.shape[:-1], heads, -1).clone()
    by_head[..., gone, :] = 0
    return by_head.reshape(x.shape)


def _plan(
    inspection: Inspection, layout: Layout, heads: int, draws: int, chance: random.Random
) -> list[tuple[str, list[Head], list[list[Head]]]]:
    """List the strongest heads of each role, each alone and all together, with random sets for the latter."""
    removable = [
        (layer.number, head)
        for layer in layout.layers.values()
        if layer.projection is not None
        for head in range(layer.heads)
    ]
    plan: list[tuple[str, list[Head], list[list[Head]]]] = []
    for role in ROLES:
        ranked = [(record["layer"], record["head"]) for record in role.heads(inspection.heads)]
        best = [head for head in ranked if head in removable][:heads]
        if not best:
            continue
        free = [head for head in removable if head not in ranked]
        controls = [_draw(best, free, chance) for _ in range(draws)] if len(free) >= len(best) else []
        plan += [(role.name, [head], []) for head in best if len(best) > 1]
        plan.append((role.name, best, controls))
    return plan


def _draw(best: list[Head], free: list[Head], chance: random.Random) -> list[Head]:
    """Draw as many heads of the same layers, or of any layer if none is left."""
    drawn: list[Head] = []
    for layer, _ in best:
        left = [head for head in free if head not in drawn]
        drawn.append(chance.choice([head for head in left if head[0] == layer] or left))
    return drawn


def losses(model: Any, parts: Sequence[InputBatch]) -> Tensor:
    """Return the mean loss (nats per token) of each sequence."""
    means = []
    for part in parts:
        logits = model(**part.inputs).logits[:, :-1].float()
        target = part.inputs["input_ids"][:, 1:]
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        counted = _predicted(part)
        means.append((loss * counted).sum(-1) / counted.sum(-1).clamp(min=1))
    return torch.cat(means).double().cpu()


def _predicted(part: InputBatch) -> Tensor:
    """Return 1 for tokens that are predicted from a token, 0 for padding and for tokens after padding."""
    mask = part.inputs.get("attention_mask")
    if mask is None:
        return torch.ones_like(part.inputs["input_ids"])[:, 1:]
    counted: Tensor = mask[:, 1:] * mask[:, :-1]
    return counted


def _names(heads: Sequence[Head]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in heads)
