"""A mechanism that no formula can say: write its weights in torch, register it, and use its name everywhere.

python examples/10_module.py
"""

import torch

import unsoft


class TopK(unsoft.nn.WrittenOut):
    """Softmax over the k largest logits of a row; all other keys get exactly 0."""

    def __init__(self, layer_spec: unsoft.nn.LayerSpec, k: int = 4) -> None:
        super().__init__(layer_spec)
        self.k = k

    def weights(self, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        hidden = logits.masked_fill(~visible, -torch.inf)
        least = hidden.topk(min(self.k, hidden.shape[-1]), dim=-1).values[..., -1:]
        kept = visible & (hidden >= least)
        return torch.where(kept, hidden, -torch.inf).softmax(-1).nan_to_num()


unsoft.register("top-k", TopK, argument="k", signed=False, sparse=True, row_sum="1", l1="1")

query, key, value = (torch.randn(1, 2, 10, 8) for _ in range(3))
_, weights = unsoft.attention(query, key, value, "top-k(3)", return_weights=True)
print(
    "keys in use:", (weights > 0).sum(-1).unique().tolist(), "largest row sum:", weights.sum(-1).max().item()
)

# The battery finds what does not hold: causality, masks, decoding, promises.
report = unsoft.testing.check_mechanism("top-k", only=["promises", "causality"])
print(str(report).splitlines()[0])
assert report.ok
