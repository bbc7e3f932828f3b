"""Who sees whom, as small as it can be said.

transformers asks for one mask per forward pass. Plain causal or full attention needs none, or with padding
one bool per key (batch, 1, 1, keys), and the attention module says whether it is causal: mechanisms that look
at keys as a whole then know which keys are there, and kernels skip what is masked. Windows, packed sequences
and static caches get the whole table (batch, 1, queries, keys).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from unsoft.hf.positions import Shown


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask function that is registered with transformers; True = may attend.

    >>> padding = torch.tensor([[False, True, True]])
    >>> key_mask(1, 3, 3, attention_mask=padding)
    tensor([[[[False,  True,  True]]]])
    >>> key_mask(1, 3, 3, attention_mask=padding, allow_is_causal_skip=False).shape
    torch.Size([1, 1, 3, 3])
    """
    # A tensor as offset: a static cache, whose unused keys stand at the end.
    at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    plain = (allow_is_causal_skip and at_the_end) or allow_is_bidirectional_skip
    if not plain or (local_size is not None and kv_length >= local_size):
        table: Any = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **options,
        )
        if not torch.compiler.is_compiling():
            dropped = None if attention_mask is None else attention_mask[:, :kv_offset] == 0
            padding = None if dropped is None else dropped.sum(-1, keepdim=True)
            table.unsoft_shown = Shown(q_offset - kv_offset, kv_offset, padding)
        return table  # type: ignore[no-any-return]
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding[:, None, None, :]
