"""Steering: find directions inside a model from pairs of examples, and push along them while it runs."""

from unsoft.lab.interpret.steering.directions import Directions, steering
from unsoft.lab.interpret.steering.fit import fit

__all__ = ["Directions", "fit", "steering"]
