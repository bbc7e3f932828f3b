"""What are heads worth to a model? Its loss without them, or without what they delete."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.ablation import losses
from unsoft.lab.interpret.inspection.batches import batches
from unsoft.lab.interpret.inspection.layout import Layout, find_layout
from unsoft.lab.interpret.inspection.observe import Seen, observe
from unsoft.lab.interpret.inspection.sequence import sequences
from unsoft.lab.interpret.inspection.walk import evaluating, model_of, runner
from unsoft.measure.rows import ratio

PARTS = ("head", "deletion", "as much elsewhere")


def losses_without(
    model: torch.nn.Module,
    tokens: Tensor,
    heads: Collection[tuple[int, int]],
    part: str = "head",
    *,
    seed: int = 0,
    batch_size: int = 4,
) -> Tensor:
    """Mean loss, in nats, of the next token in each sequence (sequences,) of ``tokens`` (sequences, length),
    while something is taken from ``heads``, pairs of layer and head as :func:`unsoft.lab.interpret.inspect`
    counts them.

        head                   all of its output
        deletion               from the value of every source what points against the source: v - min(v.u, 0)
                               u / |u|^2, with u = W_O r, r the residual stream of the source. The rest of the
                               head, and all it adds, stays.
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
    model = model_of(model)
    if part not in PARTS:
        raise ValueError(f"ablation: argument 'part' is {part!r}; there are {', '.join(map(repr, PARTS))}")
    with evaluating(model):
        parts = batches(tokens, None, batch_size, tokens.shape[1], model.device)
        layout = find_layout(model, runner(model), parts[0])
        _check(layout, heads, part)
        with observe(model, _Removal(layout, heads, part, seed), layout.blocks):
            return losses(model, parts)


def _check(layout: Layout, heads: Collection[tuple[int, int]], part: str) -> None:
    for layer, head in heads:
        if layer not in layout.layers or not 0 <= head < layout.layers[layer].heads:
            raise ValueError(f"ablation: argument 'heads' has ({layer}, {head}); the model has no such head")
        if part != "head" and layout.layers[layer].out_proj is None:
            raise ValueError(
                f"ablation: layer {layer} has no output projection, so what it deletes is unknown"
            )


class _Removal:
    """Unlike other visitors it changes what a call of attention returns."""

    def __init__(self, layout: Layout, heads: Collection[tuple[int, int]], part: str, seed: int) -> None:
        self._layout, self._part = layout, part
        self._heads: dict[int, list[int]] = {}
        for layer, head in sorted(set(heads)):
            self._heads.setdefault(layer, []).append(head)
        self._random = torch.Generator().manual_seed(seed)

    def attention(self, seen: Seen) -> None:
        chosen = self._heads.get(seen.number)
        if chosen is None:
            return
        if self._part == "head":
            seen.output[:, :, chosen] = 0
            return
        out_proj = self._layout.layers[seen.number].out_proj
        assert out_proj is not None
        for item, sequence in enumerate(sequences(seen, [None] * len(seen.query))):
            assert sequence.states is not None
            value = sequence.value.repeat_interleave(sequence.heads // len(sequence.value), 0)[chosen]
            towards = sequence.states @ out_proj[chosen].to(value.dtype).mT
            taken = deleting_part(value, towards)
            if self._part != "deletion":
                other = towards[:, torch.randperm(towards.shape[1], generator=self._random)]
                taken = other * ratio(taken.norm(dim=-1, keepdim=True), other.norm(dim=-1, keepdim=True))
            change = (sequence.whole()[chosen] @ taken).transpose(0, 1)
            seen.output[item, :, chosen] -= change.to(seen.output.dtype)

    def stream(self, stack: str, depth: int, states: Tensor) -> None: ...


def deleting_part(value: Tensor, towards: Tensor) -> Tensor:
    """What of each value (..., sources, dim) points against its source, seen from the head as ``towards``.

    >>> value, towards = torch.tensor([[1.0, 2.0], [-3.0, 2.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    >>> deleting_part(value, towards)
    tensor([[ 0.,  0.],
            [-3., -0.]])
    """
    along = (value * towards).sum(-1, keepdim=True).clamp(max=0)
    return ratio(along, towards.square().sum(-1, keepdim=True)) * towards
