"""Relevance maps as images."""

import base64
import struct
import zlib

import torch

from experiments.scenes.pictures import relevance_picture


def test_an_image_can_be_read_back():
    """By the rules of the format: its header and check sums, and bytes after zlib."""
    pixels = torch.ones(3, 4, 4) * torch.tensor([0.0, 0.5, 1.0])[:, None, None]
    data = base64.b64decode(relevance_picture(pixels).removeprefix("data:image/png;base64,"))
    assert struct.unpack(">II", data[16:24]) == (4, 4)
    start = data.index(b"IDAT") + 4
    (length,) = struct.unpack(">I", data[start - 8 : start - 4])
    raw = zlib.decompress(data[start : start + length])
    assert len(raw) == 4 * (1 + 4 * 3) and raw[1:4] == bytes([0, 128, 255])


def test_regions_that_contribute_nothing_are_dimmed():
    pixels = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert relevance_picture(pixels, torch.tensor([[0.0, 1.0], [0.0, 0.0]])) != relevance_picture(pixels)
    assert relevance_picture(pixels, torch.ones(2, 2)) == relevance_picture(pixels)
