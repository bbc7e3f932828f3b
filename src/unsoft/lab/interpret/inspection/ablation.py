"""Loss of a language model without some heads, or without what they delete.

The output of a head is set to 0 before the output projection. Rules, fixed before any measurement: a set of
heads *matters* if the loss rises and the 95 % confidence interval of the rise lies above 0. It matters *more
than random heads* if the difference to as many random heads of the same layers, which are not in the role,
lies above 0 with its interval, and *less* if below. Intervals are bootstrapped over sequences, and over the
random draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.checks import whole_number
from unsoft.lab.evidence import resampled_mean
from unsoft.lab.interpret.inspection.layout import Layout, find_layout
from unsoft.lab.interpret.inspection.observe import AttentionCall, observe
from unsoft.lab.interpret.inspection.result import ROLES, Inspection
from unsoft.lab.interpret.inspection.sequence import sequences
from unsoft.lab.interpret.models import (
    InputBatch,
    batches,
    body_runner,
    evaluating,
    replaced_inputs,
    single_stack,
)
from unsoft.measure.rows import ratio

HEADS, DRAWS = 3, 6
"""Heads of each role that are removed, and random sets of as many."""
SEQUENCES, LENGTH = 16, 128
PARTS = ("head", "deletion", "as much elsewhere")
Head = tuple[int, int]
"""Layer and number of a head."""


@dataclass(frozen=True)
class HeadAblation:
    """A set of heads, and the change of the loss (nats per token) without it."""

    role: str
    heads: str
    """layer.head of each."""
    change: float
    low: float
    high: float
    random: float | None = None
    """The change without random heads, mean over draws."""
    difference: float | None = None
    """Change minus that of random heads."""
    difference_low: float | None = None
    difference_high: float | None = None
    verdict: str = ""


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
        layout = find_layout(model, body_runner(model), parts[0])
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
        "removed": [asdict(result) for result in results],
    }


def judged(role: str, heads: str, change: Tensor, others: Tensor | None) -> HeadAblation:
    """Apply the rules to changes (sequences,) and those of random heads (draws, sequences).

    >>> up, flat = torch.full((8,), 0.5), torch.zeros(2, 8)
    >>> judged("sink", "0.1", up, flat).verdict, judged("sink", "0.1", 0 * up, flat + 0.5).verdict
    ('matters, more than random heads', 'not shown to matter, less than random heads')
    """
    own = resampled_mean(change)
    effect = "matters" if own.low > 0 else "harms" if own.high < 0 else "not shown to matter"
    result = HeadAblation(role, heads, own.mean, own.low, own.high, verdict=effect)
    if others is None:
        return result
    beside = resampled_mean(change - others)
    compared = "more than" if beside.low > 0 else "less than" if beside.high < 0 else "not told from"
    return replace(
        result,
        random=float(others.mean()),
        difference=beside.mean,
        difference_low=beside.low,
        difference_high=beside.high,
        verdict=f"{effect}, {compared} random heads",
    )


@contextmanager
def without(layout: Layout, removed: Sequence[Head]) -> Iterator[None]:
    """Set the output of some heads to 0 inside the ``with`` block."""
    with ExitStack() as undo:
        for number, layer in layout.layers.items():
            gone = [head for at, head in removed if at == number]
            if gone and layer.projection is not None:
                undo.enter_context(replaced_inputs(layer.projection, _silence(layer.heads, gone)))
        yield


def _silence(heads: int, gone: list[int]) -> Callable[[Tensor], Tensor]:
    def silence(x: Tensor) -> Tensor:
        by_head = x.reshape(*x.shape[:-1], heads, -1).clone()
        by_head[..., gone, :] = 0
        return by_head.reshape(x.shape)

    return silence


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
        ranked = [(record["layer"], record["head"]) for record in inspection.ranked(role)]
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
    """Return 1 for tokens that are predicted, 0 for padding."""
    mask = part.inputs.get("attention_mask")
    return torch.ones_like(part.inputs["input_ids"])[:, 1:] if mask is None else mask[:, 1:]


def _names(heads: Sequence[Head]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in heads)


def losses_without(
    model: torch.nn.Module,
    tokens: Tensor,
    heads: Collection[Head],
    part: str = "head",
    *,
    seed: int = 0,
    batch_size: int = 4,
) -> Tensor:
    """Return the mean loss (nats) of each sequence (sequences,) of ``tokens`` (sequences, length) while a
    part of ``heads`` is removed; heads are pairs of layer and head as in
    :func:`unsoft.lab.interpret.inspect`.

        head                   the whole output
        deletion               the part of each source's value that points against the source:
                               v - min(v.u, 0) u / |u|^2, with u = W_O r, r the residual stream of the source.
                               The rest of the head, and everything it adds, stays.
        as much elsewhere      the control: vectors of the same lengths along the u of other sources, drawn
                               with ``seed``

    The model itself is not changed.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(50, (3, 20))
    >>> whole = losses_without(model, tokens, [])
    >>> bool((losses_without(model, tokens, [(0, 1), (1, 3)]) != whole).all())
    True
    """
    model = single_stack(model)
    if part not in PARTS:
        raise ValueError(f"ablation: argument 'part' is {part!r}; there are {', '.join(map(repr, PARTS))}")
    with evaluating(model):
        parts = batches(tokens, None, batch_size, tokens.shape[1], model.device)
        layout = find_layout(model, body_runner(model), parts[0])
        for layer, head in heads:
            if layer not in layout.layers or not 0 <= head < layout.layers[layer].heads:
                raise ValueError(
                    f"ablation: argument 'heads' has ({layer}, {head}); the model has no such head"
                )
            if part != "head" and layout.layers[layer].out_proj is None:
                raise ValueError(
                    f"ablation: layer {layer} has no output projection, so what it deletes is unknown"
                )
        with observe(model, _Removal(layout, heads, part, seed), layout.blocks):
            return losses(model, parts)


class _Removal:
    """A visitor that, unlike others, changes the output of attention calls."""

    def __init__(self, layout: Layout, heads: Collection[Head], part: str, seed: int) -> None:
        self._layout, self._part = layout, part
        self._heads: dict[int, list[int]] = {}
        for layer, head in sorted(set(heads)):
            self._heads.setdefault(layer, []).append(head)
        self._random = torch.Generator().manual_seed(seed)

    def attention(self, call: AttentionCall) -> None:
        chosen = self._heads.get(call.number)
        if chosen is None:
            return
        if self._part == "head":
            call.output[:, :, chosen] = 0
            return
        out_proj = self._layout.layers[call.number].out_proj
        assert out_proj is not None
        for item, sequence in enumerate(sequences(call, [None] * len(call.query))):
            assert sequence.states is not None
            value = sequence.values_by_head()[chosen]
            towards = sequence.states @ out_proj[chosen].to(value.dtype).mT
            taken = deleting_part(value, towards)
            if self._part != "deletion":
                other = towards[:, torch.randperm(towards.shape[1], generator=self._random)]
                taken = other * ratio(taken.norm(dim=-1, keepdim=True), other.norm(dim=-1, keepdim=True))
            change = (sequence.whole()[chosen] @ taken).transpose(0, 1)
            call.output[item, :, chosen] -= change.to(call.output.dtype)

    def stream(self, stack: str, depth: int, states: Tensor) -> None: ...


def deleting_part(value: Tensor, towards: Tensor) -> Tensor:
    """Return the part of each value (..., sources, dim) that points against its source, ``towards``.

    >>> value, towards = torch.tensor([[1.0, 2.0], [-3.0, 2.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    >>> deleting_part(value, towards)
    tensor([[ 0.,  0.],
            [-3., -0.]])
    """
    along = (value * towards).sum(-1, keepdim=True).clamp(max=0)
    return ratio(along, towards.square().sum(-1, keepdim=True)) * towards
