"""sink: a learned logit per head that takes part in the normaliser and has no value:
a place for attention that has no use.

    a_j = weight(s_j) / norm( sum_k mass(s_k) + exp(sink) )

Known from gpt-oss; with sink = 0 on softmax it is softmax1.

Strengths: a head can attend to nothing, without misusing a token as a sink.
Limitations: it does not help a formula without a normaliser.

>>> import torch
>>> from unsoft.modules.registry import resolve
>>> resolve("sink+softmax").row(torch.tensor([0.0, 0.0]), sink=0.0)           # 1 / (1 + 1 + 1)
tensor([0.3333, 0.3333])
"""

from dataclasses import replace

import torch

from unsoft.formula import Formula
from unsoft.formula.expr import make, symbol
from unsoft.modules.definition import Layer, Pointwise
from unsoft.modules.registry import modifier


def sink(base: Formula, start: float = 0.0) -> Formula:
    """Return the formula with a parameter ``sink`` (one per head) whose exponential joins the total mass."""
    if base.peak is None or base.mass is None:
        raise ValueError(
            "mechanism: sink needs a mechanism that is normalised by exponentials (softmax, cog, sinh ...),"
            f" not {base.name or base}"
        )
    if "sink" in base.params:
        raise ValueError("mechanism: this mechanism has a sink already")
    level = symbol("sink")
    own = make(
        "exp", base.mass_degree * (level - symbol("m")) if base.mass_degree != 1 else level - symbol("m")
    )
    offset = own if base.offset_mass is None else base.offset_mass + own
    params = {**base.params, "sink": float(start)}
    return base.change(peak=make("max", base.peak, level), offset_mass=offset, params=params)


def definition(inner: Pointwise, start: float | None, layer: Layer) -> Pointwise:
    """One more logit per head in the normaliser, without a value."""
    level = layer.values["sink"] if hasattr(layer, "values") else torch.zeros(1)
    return lambda x: inner(replace(x, sink=level[:, None, None]))


modifier(
    "sink",
    sink,
    of_formula=True,
    summary="a learned logit per head in the normaliser: can attend to nothing",
)
