"""Another mechanism in one word: the arguments are those of PyTorch's scaled_dot_product_attention.

python examples/01_attention.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import unsoft

torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, 128, 64, requires_grad=True) for _ in range(3))

# With "softmax" it is PyTorch's own function ...
ours = unsoft.attention(query, key, value, "softmax", is_causal=True)
theirs = scaled_dot_product_attention(query, key, value, is_causal=True)
print(f"softmax differs from PyTorch by at most {(ours - theirs).abs().max():.0e}")

# ... and any other mechanism is another word. Gradients work as always.
unsoft.attention(query, key, value, "cog", is_causal=True).sum().backward()
print("gradient of the queries:", tuple(query.grad.shape))

# Weights can be looked at. Softmax averages; cog also subtracts; softpick leaves most keys out.
for name in ("softmax", "cog", "softpick"):
    _, weights = unsoft.attention(query, key, value, name, return_weights=True)
    print(f"{name:9} smallest weight {weights.min():+.3f}, exactly 0: {(weights == 0).float().mean():.0%}")

assert torch.allclose(ours, theirs, atol=1e-5)
