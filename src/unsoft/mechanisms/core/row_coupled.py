"""Mechanisms whose weights depend on whole rows: a rule (engines/rows) as a module.

The next one is a file too: a :class:`~unsoft.engines.rows.threshold.Threshold` written as text, given to
:func:`threshold_family`.

>>> import torch
>>> from unsoft.engines.rows.threshold import Threshold
>>> from unsoft.mechanisms.core.spec import LayerSpec
>>> soft_top2 = Threshold("1/(1 + exp(-(s - m)*4 - t))/2", low="-50", high="50")  # weights sum to 1, none above 1/2
"""

from __future__ import annotations

from torch import Tensor

from unsoft.engines.rows.choice import run_rows
from unsoft.engines.rows.rule import RowRule
from unsoft.mechanisms.core.module import Inputs, Mechanism
from unsoft.mechanisms.core.spec import LayerSpec


class RowCoupled(Mechanism):
    """A rule for whole rows. A subclass with learnable parameters gives their values (:meth:`params`)."""

    def __init__(self, layer_spec: LayerSpec, rule: RowRule) -> None:
        super().__init__(layer_spec)
        self.rule = rule

    def params(self) -> dict[str, Tensor]:
        """Values of the rule's parameters, one for each head."""
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
