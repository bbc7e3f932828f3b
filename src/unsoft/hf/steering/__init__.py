"""Steering: directions inside a model, found from pairs of examples, and pushed along while it runs."""

from unsoft.hf.steering.directions import Directions
from unsoft.hf.steering.fit import fit
from unsoft.hf.steering.steer import steering

__all__ = ["Directions", "fit", "steering"]
