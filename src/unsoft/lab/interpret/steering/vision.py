"""Vision-aware directions (VaLSe, Chen et al. 2025): from a picture without what its caption rests on, to a
picture with nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unsoft.lab.interpret.steering.fingerprint import fingerprint
from unsoft.lab.interpret.steering.fit import PairedStates, chosen_layers
from unsoft.lab.interpret.steering.images import Inputs, masked, with_caption
from unsoft.lab.interpret.steering.places import MLP, blocks
from unsoft.lab.interpret.steering.relevance import Relevance, relevance
from unsoft.lab.interpret.steering.states import watching

ORIGINAL, WITHOUT = "original", "without"
NEGATIVES = (ORIGINAL, WITHOUT)


@dataclass(frozen=True)
class Captioned:
    """An example: what the model is given, and the caption (tokens,) it wrote."""

    inputs: Inputs
    caption: Tensor


def vision_states(
    model: PreTrainedModel,
    examples: Sequence[Captioned],
    *,
    layers: int | str | Iterable[int | str] | None = None,
    alpha: float = 1.0,
    share: float = 0.25,
    negative: str = ORIGINAL,
) -> PairedStates:
    """States at the outputs of MLPs for masked pairs of pictures; ``.directions("pca")`` is VaLSe's vector.

    For each example the tokens of its caption that need the picture are found, with what they rest on
    (:func:`unsoft.lab.interpret.steering.relevance.relevance`). The positive picture shows the ``share`` of
    it that
    contributes most, and the rest is masked. The negative one is the ``original``, as in the paper, or the
    picture ``without`` that share. States are taken where the visual tokens are read from, and averaged over
    them. Examples without a visual token are left out.
    """
    if not 0 < share < 1:
        raise ValueError(f"steer: argument 'share' must be between 0 and 1, not {share}")
    if negative not in NEGATIVES:
        raise ValueError(
            f"steer: argument 'negative' must be one of {', '.join(NEGATIVES)}, not {negative!r}"
        )
    wanted = chosen_layers(range(len(blocks(model))) if layers is None else layers, len(blocks(model)))
    pairs: list[tuple[dict[int, Tensor], dict[int, Tensor]]] = []
    for example in examples:
        found = relevance(model, example.inputs, example.caption, alpha=alpha)
        if not bool(found.visual.any()):
            continue
        matters = most_relevant(found, share)
        shown = masked(model, example.inputs, ~matters)
        other = example.inputs if negative == ORIGINAL else masked(model, example.inputs, matters)
        up, down = (
            _states(model, inputs, example.caption, found.visual, wanted) for inputs in (shown, other)
        )
        pairs.append((up, down))
    if len(pairs) < 2:
        raise ValueError(
            f"steer: only {len(pairs)} of {len(examples)} captions have a word that needs its picture by more"
            f" than {alpha:g} nats; at least 2 are needed"
        )
    ups, downs = (
        {layer: torch.stack([pair[side][layer] for pair in pairs]) for layer in wanted} for side in (0, 1)
    )
    about = {"pairs": len(pairs), "alpha": alpha, "share": share, "negative": negative}
    return PairedStates(ups, downs, MLP, fingerprint(model), about)


def most_relevant(found: Relevance, share: float) -> Tensor:
    """(visual tokens,): is it in the ``share`` that contributes most to the visual words together?"""
    total = found.maps[found.visual].mean(0).flatten()
    count = max(1, round(share * len(total)))
    chosen = torch.zeros(len(total), dtype=torch.bool)
    chosen[total.topk(count).indices] = True
    return chosen


@torch.no_grad()
def _states(
    model: PreTrainedModel, inputs: Inputs, caption: Tensor, visual: Tensor, layers: Sequence[int]
) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    first = inputs["input_ids"].shape[1] - 1
    places = first + visual.nonzero()[:, 0]

    def see(layer: int, states: Tensor) -> None:
        found[layer] = states.view(-1, states.shape[-1])[places].mean(0).float().cpu()

    with watching(model, MLP, layers, see):
        model(**with_caption(model, inputs, caption))
    return found
