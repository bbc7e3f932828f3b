"""Which model a direction belongs to: a digest of its class, its mechanisms and its weights."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from unsoft.hf.attention import NAME

_SAMPLE = 64
"""Numbers of each tensor that are looked at, evenly spaced: models of any size take milliseconds."""


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Forty digits. The same for the same weights in float32 and bfloat16, if bfloat16 is what was saved.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    >>> one, two = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(two)
    (True, False)
    """
    total = hashlib.sha256(type(model).__name__.encode())
    total.update(json.dumps(getattr(model.config, NAME, None), sort_keys=True).encode())
    for name, tensor in sorted(model.named_parameters()):
        step = max(1, -(-tensor.numel() // _SAMPLE))
        total.update(f"{name} {tuple(tensor.shape)}".encode())
        total.update(tensor.flatten()[::step].float().cpu().numpy().tobytes())
    return total.hexdigest()[:40]
