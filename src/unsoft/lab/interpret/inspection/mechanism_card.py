"""Measures of a mechanism rather than of weights: what its formula makes of clones, opposed keys and negative
logits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from unsoft import measure
from unsoft.formula import Formula

CLONES = (1, 10, 100)
LOGITS = (-4.0, 0.0, 4.0)
_OTHERS = 63


@lru_cache(maxsize=16)  # a quarter of a second each
def mechanism_card(formula: Formula) -> dict[str, Any]:
    """Unique share, discrimination and gradient of one formula, with rows of 64 keys whose other logits are
    0.

    >>> from unsoft.modules.registry import resolve_formula
    >>> card = mechanism_card(resolve_formula("softmax"))
    >>> round(card["unique_share"]["10"], 4)                # 20 / 30
    0.6667
    """
    shares = measure.unique_share(formula, CLONES).tolist()
    told = measure.discrimination(formula)
    slopes = measure.gradient(formula, torch.tensor(LOGITS), torch.zeros(_OTHERS))
    return {
        "unique_share": {str(count): share for count, share in zip(CLONES, shares, strict=True)},
        "discrimination": {"auc": told.auc, "gap": told.gap},
        "gradient": {
            field: {f"{logit:g}": value for logit, value in zip(LOGITS, values.tolist(), strict=True)}
            for field, values in slopes._asdict().items()
        },
    }
