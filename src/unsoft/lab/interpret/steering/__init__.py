"""Steering: directions inside a model, found from pairs of examples, and pushed along while it runs."""

from unsoft.lab.interpret.steering.directions import Directions
from unsoft.lab.interpret.steering.fit import fit
from unsoft.lab.interpret.steering.steer import steering

__all__ = ["Directions", "fit", "steering"]
