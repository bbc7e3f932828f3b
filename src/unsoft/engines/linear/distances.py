"""Checks positions for mechanisms that take distances from the order of the tokens."""

import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.engines.dense import visible_entries
from unsoft.tracing import readable


def check_distances(call: Call, queries: Tensor, keys: Tensor, name: str) -> None:
    """ValueError unless every query and the keys it sees stand as far apart as their order in the call says.

    A row whose own key no row sees is padding, which has no position, though it may see other keys.
    While a graph is traced, values cannot be asked for.
    """
    length, count, device = call.q.shape[2], call.k.shape[2], call.q.device
    if torch.compiler.is_compiling() or length * count == 0:
        return
    order = torch.arange(length, device=device) + (call.causal_offset or 0)
    i, j = queries - order, keys - torch.arange(count, device=device)  # equal where order and position agree
    if call.visible is not None and call.visible.shape[2] > 1:
        visible = visible_entries(call).any(1)
        row_there = visible.any(1)[:, order.clamp(0, count - 1)]
        wrong = visible & row_there[..., None] & (i.view(-1, length, 1) != j.view(-1, 1, count))
    else:
        there = torch.ones(1, count, dtype=torch.bool, device=device)
        there = there if call.visible is None else there & call.visible[:, :, 0].any(1)
        shift = torch.where(there, j, -torch.inf).amax(-1, keepdim=True)
        row_there = there[:, order.clamp(0, count - 1)]
        wrong = torch.cat([(j != shift) & there, (i != shift) & row_there], dim=-1)
    if not readable(wrong):
        raise ValueError(
            f"argument 'positions': {name} knows distances only, and under vmap it cannot be checked that"
            " positions are consecutive; map over the other arguments"
        )
    if bool(wrong.any()):
        raise ValueError(
            f"{name}: argument 'positions' must be consecutive: its weights depend on distances, which it"
            " takes from the order of the tokens"
        )
