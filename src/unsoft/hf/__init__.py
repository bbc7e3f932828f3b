"""Hugging Face models with other mechanisms of attention. Needs the extra ``hf``; imported on demand, since transformers is heavy."""

from unsoft.hf.models import load_model

__all__ = ["load_model"]
