"""Mechanisms whose weights depend on whole rows: a rule (engines/rows) as a module.

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

from __future__ import annotations

from torch import Tensor

from unsoft.engines.rows.choice import run_rows
from unsoft.engines.rows.rules import RowRule
from unsoft.modules.module import Inputs, Mechanism
from unsoft.modules.spec import LayerSpec


class RowCoupled(Mechanism):
    """A rule for whole rows. A subclass with learnable parameters overrides :meth:`params`."""

    def __init__(self, layer_spec: LayerSpec, rule: RowRule) -> None:
        super().__init__(layer_spec)
        self.rule = rule

    def params(self) -> dict[str, Tensor]:
        """Return values of the rule's parameters, one for each head."""
        return {}

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        return run_rows(
            inputs.query,
            inputs.key,
            inputs.value,
            self.rule,
            return_weights=inputs.return_weights,
            params=self.params(),
            before=not self.sees_itself,
            **inputs.options,
        )
