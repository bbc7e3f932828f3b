"""Relevance maps as images for the page of the experiment."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

_DIM = 0.2
"""Brightness of regions that contribute nothing."""


def relevance_picture(pixels: Tensor, relevance: Tensor | None = None) -> str:
    """Return the ``src`` of an image: a picture (3, height, width) of any range, dimmed where ``relevance``
    (rows, columns) is small."""
    low, high = pixels.min(), pixels.max()
    shown = (pixels.float() - low) / (high - low).clamp_min(1e-12)
    if relevance is not None:
        bright = relevance.float() / relevance.max().clamp_min(1e-12)
        cells = torch.nn.functional.interpolate(bright[None, None], pixels.shape[-2:])[0]
        shown = shown * (_DIM + (1 - _DIM) * cells)
    image = png((shown * 255).round().to(torch.uint8))
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def png(pixels: Tensor) -> bytes:
    """Encode (3, height, width) bytes as PNG. Neither torch nor transformers requires an image library.

    >>> png(torch.zeros(3, 2, 2, dtype=torch.uint8))[:4]
    b'\\x89PNG'
    """
    _, height, width = pixels.shape
    lines = pixels.permute(1, 2, 0).reshape(height, -1)
    raw = b"".join(b"\0" + bytes(line) for line in lines.tolist())  # 0: the line is not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
