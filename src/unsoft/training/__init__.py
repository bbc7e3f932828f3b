"""Training on tasks with transformers' Trainer, and heads that repel each other. Needs the extra ``hf``;
imported on demand.

>>> import unsoft
>>> spec = unsoft.training.Spec(task="census", mechanism="magnitude+cog", steps=3)
>>> spec.filled().width
64
"""

from unsoft.training.conversion import Conversion, Converted, convert
from unsoft.training.repulsion import Repulsion, repulse
from unsoft.training.result import Result
from unsoft.training.run import train
from unsoft.training.spec import Spec

__all__ = ["Conversion", "Converted", "Repulsion", "Result", "Spec", "convert", "repulse", "train"]
