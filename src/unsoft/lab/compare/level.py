"""How much is measured: quick, standard or full."""

from __future__ import annotations

from dataclasses import dataclass

_QUICK = (
    "softmax",
    "cog",
    "softpick",
    "relu2",
    "sigmoid",
    "identity",
    "gpam",
    "linear-relu",
    "retention",
    "magnitude",
)
_STANDARD = (
    "softmax",
    "softmax1",
    "l2",
    "cog",
    "sinh",
    "swishmax",
    "softpick",
    "relu",
    "relu2",
    "sigmoid",
    "tanh",
    "identity",
    "polynomial",
    "gpam",
    "differential",
    "differential2",
    "linear-relu",
    "linear-elu1",
    "linear-exp",
    "cosformer",
    "performer",
    "retention",
    "decay",
    "magnitude",
    "magnitude+cog",
    "logn+softmax",
    "sink+softmax",
    "sparsemax",
    "entmax15",
    "stick-breaking",
    "fox",
    "rbf",
    "ssmax",
    "tda",
    "deltanet",
    "gated-deltanet",
)


@dataclass(frozen=True)
class Level:
    """Sizes of every measurement."""

    name: str
    mechanisms: tuple[str, ...]
    keys: int
    """Length of the rows whose focus is measured."""
    rows: int
    depth: int
    seeds: int
    """Random networks that collapse is measured in."""
    lengths: tuple[int, ...]
    """N of the costs."""
    rounds: int
    seconds: float
    """The mechanisms are timed in turn, for at least this time in all."""
    geometries: int
    draws: int = 8
    """Repetitions of what is drawn at random, from which intervals come."""


QUICK = Level("quick", _QUICK, 1024, 16, 8, 3, (256, 1024), 5, 0.0, 128, 4)
STANDARD = Level("standard", _STANDARD, 2048, 16, 12, 4, (256, 1024, 2048), 5, 0.0, 256, 8)
FULL = Level("full", (), 8192, 64, 24, 8, (256, 512, 1024, 2048, 4096), 7, 1.0, 1024, 16)
"""Without names: all there are, and the compositions of the standard level."""
