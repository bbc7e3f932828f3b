"""Masks do what you expect, and what is masked cannot hurt: not even if it holds NaN.

python examples/04_masks.py
"""

import torch

import unsoft

torch.manual_seed(0)
query = torch.randn(2, 8, 6, 32)
key, value = (torch.randn(2, 2, 6, 32) for _ in range(2))  # grouped queries: 8 heads share 2 key heads
padding = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])  # the second text has four tokens

y = unsoft.attention(query, key, value, "cog", attn_mask=padding[:, None, None], enable_gqa=True)

# The same text without its padding gives the same.
alone = unsoft.attention(query[1:, :, :4], key[1:, :, :4], value[1:, :, :4], "cog", enable_gqa=True)
print(f"with and without padding: {(y[1:, :, :4] - alone).abs().max():.0e}")

# NaN behind the mask changes nothing; PyTorch's kernels give NaN here.
key[1, :, 4:] = value[1, :, 4:] = float("nan")
again = unsoft.attention(query, key, value, "cog", attn_mask=padding[:, None, None], enable_gqa=True)
print(f"NaN behind the mask changes outputs by {(again - y).abs().max():.0e}")

# A row that may see nothing is exactly 0.
blind = torch.zeros(6, 6, dtype=torch.bool)
nothing = unsoft.attention(query, key, value, "softmax", attn_mask=blind, enable_gqa=True)
print("rows that see nothing:", nothing.abs().max().item())

assert torch.allclose(y, again, atol=1e-5) and not nothing.any()
