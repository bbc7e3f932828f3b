"""The smallest kernel: shows whether Triton, its compiler, the C compiler it needs and the driver work
together."""

from __future__ import annotations

import torch


def probe(device: torch.device) -> None:
    """Raises whatever goes wrong; RuntimeError if the result is wrong."""
    from unsoft.engines.triton.binding import on_device
    from unsoft.engines.triton.kernel.copying import copy_kernel

    x = torch.arange(16, dtype=torch.float32, device=device)
    y = torch.zeros_like(x)
    with on_device(x):
        copy_kernel[(1,)](x, y, SIZE=16)
    if not torch.equal(x, y):
        raise RuntimeError("a copy of sixteen numbers came out wrong")
