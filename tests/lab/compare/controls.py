"""Negative controls: mechanisms that do nothing, are random, or only rescale."""

from dataclasses import dataclass

import torch

from unsoft.formula import Formula
from unsoft.lab.compare.candidate import Candidate


@dataclass(frozen=True)
class ControlCandidate(Candidate):
    """A candidate with weights of its own."""

    kind: str = "zero"

    def weights(self, query, key, *, scale=None, is_causal=False):
        shape = (len(query), query.shape[1], key.shape[1])
        if self.kind == "noise":
            weights = torch.randn(
                shape, generator=torch.Generator().manual_seed(int(key.abs().sum() * 1e4) % 2**31)
            )
        elif self.kind == "one token":
            weights = torch.zeros(shape)
            weights[..., 0] = 1.0
        else:
            weights = torch.zeros(shape)
        weights = weights.to(query.dtype)
        return weights.tril() if is_causal else weights

    def row(self, *, width=64, seed=0):
        def weigh(logits):
            flat = logits.detach().reshape(-1, 1, logits.shape[-1])
            return self.weights(flat[..., :1], flat.mT).reshape(logits.shape)

        return weigh


ZERO = ControlCandidate("zero", "softmax", kind="zero")
NOISE = ControlCandidate("noise", "softmax", kind="noise")
ONE_TOKEN = ControlCandidate("one token", "softmax", kind="one token")
SCALED = Candidate("0.01 softmax", Formula("0.01*exp(s - m)", "exp(s - m)", "s"))
