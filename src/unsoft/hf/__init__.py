"""Hugging Face models with other mechanisms of attention. Needs the extra ``hf``; imported on demand, since
transformers is heavy."""

from unsoft.hf import (
    auto,  # noqa: F401  # transformers' Auto classes know swapped folders from here on
    neurons,
)
from unsoft.hf.cache import MechanismCache
from unsoft.hf.inspection import Inspection, inspect
from unsoft.hf.load import load
from unsoft.hf.models import load_model
from unsoft.hf.swap import swap

__all__ = ["Inspection", "MechanismCache", "inspect", "load", "load_model", "neurons", "swap"]
