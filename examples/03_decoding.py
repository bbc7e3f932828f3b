"""Every name is also a module, with parameters of its own and a cache: a token at a time gives what the whole
sequence gives.

python examples/03_decoding.py
"""

import torch

import unsoft

torch.manual_seed(0)
query, key, value = (torch.randn(1, 8, 40, 64) for _ in range(3))

for name in ("cog", "logn+gpam", "linear-relu", "magnitude+softmax"):
    layer = unsoft.mechanism(name, heads=8, head_dim=64).eval()
    with torch.no_grad():
        whole = layer(query, key, value, is_causal=True)
        cache = layer.new_cache(batch=1)
        pieces = [
            layer(query[:, :, t : t + 1], key[:, :, t : t + 1], value[:, :, t : t + 1], cache=cache)
            for t in range(query.shape[2])
        ]
    difference = (torch.cat(pieces, dim=2) - whole).abs().max()
    learnable = sum(p.numel() for p in layer.parameters())
    print(f"{name:18} differs by {difference:.0e}; cache {cache.nbytes / 1e3:.0f} kB; {learnable} parameters")
    assert difference < 1e-4
