"""What must lose: mechanisms that do nothing, know nothing, or only seem to do something."""

from dataclasses import dataclass

import torch

from unsoft.formula import Formula
from unsoft.lab.compare.candidate import Candidate


@dataclass(frozen=True)
class Control(Candidate):
    """Takes part like a mechanism, with weights of its own: ``make`` gets the shape."""

    kind: str = "zero"

    def weights(self, query, key, *, scale=None, is_causal=False):
        shape = (len(query), query.shape[1], key.shape[1])
        if self.kind == "noise":
            found = torch.randn(
                shape, generator=torch.Generator().manual_seed(int(key.abs().sum() * 1e4) % 2**31)
            )
        elif self.kind == "one token":
            found = torch.zeros(shape)
            found[..., 0] = 1.0
        else:
            found = torch.zeros(shape)
        found = found.to(query.dtype)
        return found.tril() if is_causal else found

    def row(self, *, width=64, seed=0):
        def weigh(logits):
            flat = logits.detach().reshape(-1, 1, logits.shape[-1])
            return self.weights(flat[..., :1], flat.mT).reshape(logits.shape)

        return weigh


ZERO = Control("zero", "softmax", kind="zero")
NOISE = Control("noise", "softmax", kind="noise")
ONE_TOKEN = Control("one token", "softmax", kind="one token")
SCALED = Candidate("0.01 softmax", Formula("0.01*exp(s - m)", "exp(s - m)", "s"))
