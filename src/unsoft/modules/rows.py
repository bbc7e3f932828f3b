"""Mechanisms given by the weights of whole rows: a function that returns them, or a rule (engines/rows).

:class:`WrittenOut` is the shortest way to a custom mechanism that is not a formula.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from unsoft.engines import check_name
from unsoft.engines.arguments import with_leading
from unsoft.engines.call import Call
from unsoft.engines.dense import dense_logits, weighted_values
from unsoft.engines.rows.choice import run_rows
from unsoft.engines.rows.rules import RowRule
from unsoft.modules.module import Inputs, Mechanism, Result
from unsoft.modules.spec import LayerSpec


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

    takes_window = packs_documents = True

    @abstractmethod
    def weights(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Return weights (batch, heads, L, S) from the logits, with the float mask added, and from the
        visible entries (bool, same shape).

        Weights that are not visible are set to 0 afterwards; normalise them here.
        """

    def weights_of(self, call: Call, logits: Tensor, visible: Tensor, inputs: Inputs) -> Tensor:
        """Return :meth:`weights`; override it instead if they need more than logits."""
        return self.weights(logits, visible)

    def attend(self, inputs: Inputs) -> Result:
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
            weights = self.weights_of(call, logits, visible, inputs).to(logits.dtype)
            weights = torch.where(visible, weights, 0.0)
            out, weights = weighted_values(call, weights, visible)
        out = with_leading(out, leading)
        return (out, with_leading(weights, leading)) if inputs.return_weights else out


class RowCoupled(Mechanism):
    """A rule for whole rows. A subclass with learnable parameters overrides :meth:`params`.

    A rule is a line of text, here weights that are never above 1/2:

    >>> import torch
    >>> from unsoft.engines.rows.rules import Threshold
    >>> from unsoft.modules.spec import LayerSpec
    >>> rule = Threshold("1/(1 + exp(t - 4*(s - m)))/2", low=-90, high=90)      # t makes a row sum to 1
    >>> layer = RowCoupled(LayerSpec(heads=1, head_dim=4), rule)
    >>> _, weights = layer(*(torch.randn(1, 1, 9, 4) for _ in range(3)), return_weights=True)
    >>> torch.allclose(weights.sum(-1), torch.ones(1, 1, 9)), bool(weights.max() <= 0.5)
    (True, True)

    To register it, see the files of sparsemax and its relatives: ``family(name, class, ...)``.
    """

    takes_window = packs_documents = True

    def __init__(self, layer_spec: LayerSpec, rule: RowRule) -> None:
        super().__init__(layer_spec)
        self.rule = rule

    def params(self) -> dict[str, Tensor]:
        """Return values of the rule's parameters, one for each head."""
        return {}

    def attend(self, inputs: Inputs) -> Result:
        params, before = self.params(), not self.sees_itself
        return run_rows(*inputs.tensors, self.rule, params=params, before=before, **inputs.all_options)
