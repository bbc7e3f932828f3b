"""Numbers about attention weights: does it focus, does it subtract, is it hijacked?

python examples/06_measures.py
"""

import torch

import unsoft
from unsoft import measure

torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, 64, 32) for _ in range(3))
names = ("effective_keys", "sparsity", "negative_share", "row_sum", "sink_mass")

print("mechanism  " + "  ".join(f"{name:>14}" for name in names))
for mechanism in ("softmax", "cog", "softpick", "relu2", "identity"):
    _, weights = unsoft.attention(query, key, value, mechanism, return_weights=True)
    row = [getattr(measure, name)(weights).mean().item() for name in names]
    print(f"{mechanism:9}  " + "  ".join(f"{x:14.3f}" for x in row))
    assert (row[2] > 0) == (mechanism in ("cog", "identity"))  # only these two subtract

# Theory knows where this must end for long rows: S = exp(-gamma^2 / 2) for softmax.
print("S of softmax by theory:", unsoft.theory.sparsity("softmax", beta=0.0, gamma=1.0).item())
