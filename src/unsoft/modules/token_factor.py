"""A learned number (or vector) per token and head, computed from the hidden state,
or from the query in its place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsoft.modules.spec import LayerSpec


class TokenFactor(nn.Module):
    """x W + c per head, shape (..., heads, length, width); at the start W is 0,
    so every token begins with ``start``.

    ``hidden`` is (..., length, hidden_dim), shared by the heads, with W (hidden_dim, heads * width); the
    query that stands in for it is (..., heads, length, head_dim), with one W (head_dim, width) for each head.
    """

    def __init__(self, layer_spec: LayerSpec, width: int, start: float = 0.0) -> None:
        super().__init__()
        self.heads, self.width, self.hidden_dim = layer_spec.heads, width, layer_spec.hidden_dim
        self.constant = nn.Parameter(torch.full((layer_spec.heads, width), start))
        if layer_spec.hidden_dim is None:
            self.weight = nn.Parameter(torch.zeros(layer_spec.heads, layer_spec.head_dim, width))
        else:
            self.weight = nn.Parameter(torch.zeros(layer_spec.hidden_dim, layer_spec.heads * width))

    def forward(self, query: Tensor, hidden: Tensor | None) -> Tensor:
        weight, constant = self.weight.to(query.dtype), self.constant.to(query.dtype)[:, None, :]
        if self.hidden_dim is None:
            if hidden is not None:
                raise ValueError(
                    "argument 'hidden' was given, but the mechanism was made without hidden_dim=; it uses"
                    " the query"
                )
            return query @ weight + constant
        if hidden is None:
            raise ValueError(
                f"argument 'hidden' is missing: the mechanism was made with hidden_dim={self.hidden_dim}"
            )
        if hidden.shape[-1] != self.hidden_dim:
            raise ValueError(
                f"argument 'hidden' has width {hidden.shape[-1]} (shape {tuple(hidden.shape)}); hidden_dim is"
                f" {self.hidden_dim}"
            )
        by_head = (hidden.to(query.dtype) @ weight).unflatten(-1, (self.heads, self.width))
        factor: Tensor = by_head.transpose(-3, -2) + constant
        return factor
