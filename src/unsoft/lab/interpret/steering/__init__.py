"""Steering: find directions inside a model from pairs of examples, and push along them while it runs."""

from unsoft.lab.interpret.steering.directions import Directions
from unsoft.lab.interpret.steering.fit import fit
from unsoft.lab.interpret.steering.steer import steering

__all__ = ["Directions", "fit", "steering"]
