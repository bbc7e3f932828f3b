"""unsoft.nn.MultiheadAttention stands where torch's layer stood, and trains.

python examples/07_layer.py
"""

import torch

import unsoft

torch.manual_seed(0)
layer = unsoft.nn.MultiheadAttention(32, 4, mechanism="logn+gpam", batch_first=True)
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)

# The task: give back the token at which all others point, a copy of the first.
losses = []
for _ in range(60):
    tokens = torch.randn(16, 12, 32)
    answer, _ = layer(tokens, tokens, tokens, need_weights=False)
    loss = (answer - tokens[:, :1]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# The state dict of torch's layer goes in, if the mechanism has no parameters of its own.
stock = torch.nn.MultiheadAttention(32, 4, batch_first=True)
ours = unsoft.nn.MultiheadAttention(32, 4, mechanism="softmax", batch_first=True)
ours.load_state_dict(stock.state_dict())
difference = ours(tokens, tokens, tokens)[0] - stock(tokens, tokens, tokens)[0]
print(f"softmax differs from torch's layer by {difference.abs().max():.0e}")
assert losses[-1] < losses[0]
