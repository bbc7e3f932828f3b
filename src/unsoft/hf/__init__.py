"""Hugging Face models with other attention mechanisms. Needs the extra ``hf``.

``import unsoft`` imports this package on first use, since transformers is heavy. Importing it registers
swapped models with transformers' Auto classes (:mod:`unsoft.hf.models`) and the names of attention
implementations such as "unsoft:cog" (:mod:`unsoft.hf.by_name`).
"""

import unsoft.hf.by_name as _by_name  # noqa: F401  # registers the names
from unsoft.hf.accelerate import accelerate
from unsoft.hf.cache import MechanismCache
from unsoft.hf.models import load, load_model
from unsoft.hf.swap import swap

__all__ = ["MechanismCache", "accelerate", "load", "load_model", "swap"]
