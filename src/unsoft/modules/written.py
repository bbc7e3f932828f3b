"""Mechanisms defined by a function that returns all their weights: the shortest way to a custom mechanism
that is not a formula."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from unsoft.engines import check_name
from unsoft.engines.arguments import with_leading
from unsoft.engines.dense import dense_logits, weighted_values
from unsoft.modules.module import Inputs, Mechanism


class WrittenOut(Mechanism):
    """Base class: override :meth:`weights`. Masks, causality, groups of heads, dropout, caches, NaN and
    dtypes are handled here.

    Memory grows with queries times keys. It is an ``nn.Module``, so a subclass may have parameters.

    >>> class Nearest(WrittenOut):
    ...     def weights(self, logits, visible):
    ...         best = logits.masked_fill(~visible, -torch.inf).argmax(-1)
    ...         return torch.nn.functional.one_hot(best, logits.shape[-1])
    >>> from unsoft.modules.spec import LayerSpec
    >>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    >>> out, weights = Nearest(LayerSpec(heads=2, head_dim=4))(q, k, v, is_causal=True, return_weights=True)
    >>> torch.equal(weights.sum(-1), torch.ones(1, 2, 5)), bool((weights.triu(1) == 0).all())
    (True, True)
    """

    @abstractmethod
    def weights(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Return weights (batch, heads, L, S) from the logits, with the float mask added, and from the
        visible entries (bool, same shape).

        Weights that are not visible are set to 0 afterwards; normalise them here.
        """

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        engine = inputs.options["engine"]
        check_name(engine)
        if engine not in ("auto", "dense"):
            raise ValueError(
                f"attention: argument 'engine': {engine!r} does not support this call: {type(self).__name__}"
                " writes its weights out; use 'dense' or 'auto'"
            )
        call, leading = inputs.checked()
        with torch.autocast(call.q.device.type, enabled=False):
            logits, visible = dense_logits(call)
            weights = torch.where(visible, self.weights(logits, visible).to(logits.dtype), 0.0)
            out, weights = weighted_values(call, weights, visible)
        out = with_leading(out, leading)
        return (out, with_leading(weights, leading)) if inputs.return_weights else out
