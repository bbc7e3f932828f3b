"""Fifty look-alike keys drown one that is twenty times as relevant. Magnitude counts them as one.

python examples/05_crowds.py
"""

import torch

import unsoft

torch.manual_seed(0)
unique, crowd = torch.zeros(1, 64), 3 * torch.randn(1, 64) + 1e-3 * torch.randn(50, 64)
keys = torch.cat([unique, crowd])

# How many keys are there, really?
found = unsoft.magnitude.weighting(keys, t=1.0, eps=1e-3)
print(f"{len(keys)} keys count as {found.magnitude:.2f} ({found.status.name.lower()}, {found.solver})")
print(f"the unique key stands for {found.weights[0]:.3f}, one of the crowd for {found.weights[1]:.3f}")

# What that does to attention: one key against clones, each 1/20 as relevant by exp (logits 4 and 1).
for clones in (1, 50, 1000):
    plain = float(unsoft.theory.hijack_share("softmax", clones))
    gated = float(unsoft.theory.magnitude_hijack(clones, slope=12.0, offset=-8.0, on="mass").share)
    print(f"against {clones:4} clones it keeps {plain:.3f} under softmax, {gated:.3f} with a learned gate")

# In a model: "magnitude+" before any mechanism. The gate learns how much to trust the geometry.
layer = unsoft.mechanism("magnitude+softmax", heads=1, head_dim=64, where="mass")
print({name: round(p.item(), 2) for name, p in layer.named_parameters()})
assert 1.9 < found.magnitude < 2.1
