"""What the attention of a trained model does: how much goes to the first token, and how much heads differ."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unsoft.measure import head_similarity


@torch.no_grad()
def attention_figures(
    model: PreTrainedModel, inputs: dict[str, Tensor], at_rest: Tensor | None = None
) -> dict[str, list[float]]:
    """Figures of every layer, on one batch of the keywords of a model.

    first_token
        The share of all attention (in absolute value) that goes to the first token; the row that sees nothing
        else does not count. Softmax attention which has nothing to attend to puts its weight somewhere, most
        often here (a sink).
    first_token_at_rest
        Only for tasks that say in which rows the right thing is to do nothing, ``at_rest`` (batch, length):
        how much weight goes to the first token in these rows. From 0 to 1: 1 is a sink that takes all, 0 a
        model that rests without one. The unit is the weight that a row has in all, mean over rows, of the
        rows at rest or of the others, whichever have more. So it does not depend on the scale of weights that
        are not normalised, and what little is left in rows whose weights are all nearly 0, beside rows that
        do attend, is no sink, although it may be a large *share* of its row. Rows of softmax have 1 in all:
        there it is the mean weight itself.
    head_diversity
        1 - the mean similarity between the attention patterns of two heads,
        :func:`unsoft.measure.head_similarity`: 0 if all heads do the same, 1 if no two of them look at the
        same keys, more if they subtract what others add. Only for two and more heads.

    >>> import unsoft
    >>> spec = unsoft.lab.training.Spec(task="copy", width=16, heads=2).filled()
    >>> task = spec.make_task()
    >>> from unsoft.lab.training.model import build, to_model
    >>> inputs = to_model(task.sample(4), task, 16)
    >>> figures = attention_figures(build(spec, task), {"input_ids": inputs["input_ids"]})
    >>> {name: len(layers) for name, layers in figures.items()}
    {'first_token': 2, 'head_diversity': 2}
    """
    model.eval()
    weights = model(**inputs, output_attentions=True)["attentions"]
    found = {"first_token": [_first_token(layer) for layer in weights]}
    if at_rest is not None:
        found["first_token_at_rest"] = [_first_token_at_rest(layer, at_rest) for layer in weights]
    heads = weights[0].shape[1]
    if heads > 1:
        pairs = heads * (heads - 1)
        similar = [head_similarity(layer).mean(0) for layer in weights]
        found["head_diversity"] = [1 - (one.sum() - one.trace()).item() / pairs for one in similar]
    return found


def _first_token(weights: Tensor) -> float:
    size = weights[:, :, 1:].double().abs()
    return (size[..., 0].sum() / size.sum().clamp(min=torch.finfo(size.dtype).tiny)).item()


def _first_token_at_rest(weights: Tensor, at_rest: Tensor) -> float:
    """Mean over heads, each in its own unit."""
    size = weights[:, :, 1:].double().abs().transpose(0, 1)  # heads first: (heads, batch, rows, keys)
    rests = at_rest[:, 1:]
    rows, busy = size[:, rests], size[:, ~rests]
    kinds = [one.sum(-1).mean(-1) for one in (rows, busy) if one.shape[1]]
    unit = torch.stack(kinds).amax(0).clamp(min=torch.finfo(size.dtype).tiny)
    return (rows[..., 0].mean(-1) / unit).mean().item()
