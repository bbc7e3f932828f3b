"""Models of equal size: how wide softmax must be to have the parameters of another mechanism."""

from __future__ import annotations

from dataclasses import replace

from unsoft.lab.training.model import build
from unsoft.lab.training.spec import Spec


def count_parameters(spec: Spec) -> int:
    """Of the model that a spec describes.

    >>> count_parameters(Spec(task="copy", width=16)) < count_parameters(Spec(task="copy", width=24))
    True
    """
    full = spec.filled()
    return sum(parameter.numel() for parameter in build(full, full.make_task()).parameters())


def width_of_equal_parameters(spec: Spec, like: Spec) -> int:
    """The smallest width with which ``spec`` has at least the parameters of ``like``; the perceptron is twice
    as wide.

    >>> small = Spec(task="copy", mechanism="softmax", width=16, heads=2)
    >>> gated = Spec(task="copy", mechanism="gated+softmax", width=16, heads=2)
    >>> width_of_equal_parameters(small, small), width_of_equal_parameters(small, gated)
    (16, 20)
    """
    wanted, full = count_parameters(like), spec.filled()
    assert full.width and full.heads
    step = 2 * full.heads
    width = full.width
    while _parameters(full, width) < wanted:
        width += step
    return width


def _parameters(spec: Spec, width: int) -> int:
    return count_parameters(replace(spec, width=width, mlp=2 * width))
