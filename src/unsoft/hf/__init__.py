"""Hugging Face models with other mechanisms of attention. Needs the extra ``hf``; imported on demand, since
transformers is heavy."""

from unsoft.hf import auto  # noqa: F401  # registers swapped models with transformers' Auto classes
from unsoft.hf.cache import MechanismCache
from unsoft.hf.load import load
from unsoft.hf.models import load_model
from unsoft.hf.swap import swap

__all__ = ["MechanismCache", "load", "load_model", "swap"]
