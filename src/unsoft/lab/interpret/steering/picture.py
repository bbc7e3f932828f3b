"""Relevance as a picture a person can look at: what a word rests on stays bright, the rest is dimmed."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

_DIM = 0.2
"""Brightness of what contributes nothing."""


def relevance_picture(pixels: Tensor, relevance: Tensor | None = None, scale: int = 8) -> bytes:
    """A PNG of a picture (3, height, width), any range; with the relevance (rows, columns) of its regions."""
    low, high = pixels.min(), pixels.max()
    shown = (pixels.float() - low) / (high - low).clamp_min(1e-12)
    if relevance is not None:
        bright = relevance.float() / relevance.max().clamp_min(1e-12)
        cells = torch.nn.functional.interpolate(bright[None, None], pixels.shape[-2:])[0]
        shown = shown * (_DIM + (1 - _DIM) * cells)
    large = shown.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    return png((large * 255).round().to(torch.uint8))


def as_address(picture: bytes) -> str:
    """For the ``src`` of an image inside a page."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def png(pixels: Tensor) -> bytes:
    """An uncompressed-colour PNG file of (3, height, width) bytes.

    >>> png(torch.zeros(3, 2, 2, dtype=torch.uint8))[:4]
    b'\\x89PNG'
    """
    _, height, width = pixels.shape
    lines = pixels.permute(1, 2, 0).reshape(height, -1)
    raw = b"".join(b"\0" + bytes(line) for line in lines.tolist())  # 0: the line is stored as it is
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
