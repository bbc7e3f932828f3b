"""What is asked of a mechanism at every point of the grid."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from unsoft.testing.grid.trial import Trial
from unsoft.testing.measure import Measure, fact, rms

GATE = 16.0
"""c in RMS(y - r) <= c eps size, with the sizes of :class:`Trial`."""
_HEADROOM = 0.1
"""How much of a dtype's range an exact result may take for a finite one to be expected."""


def results(trial: Trial, engine: str) -> Iterator[Measure]:
    """The output and every gradient are what the definition says; where that is too large for the dtype
    nothing is asked."""
    found = trial.run(engine)
    shape = (trial.point.batch, trial.point.head_counts[0], trial.point.length, trial.point.value_width)
    whole = found.pop("whole output")
    yield fact(f"output has shape {shape}, found {tuple(whole.shape)}", whole.shape == shape)
    yield fact(f"output has dtype {trial.dtype}, found {whole.dtype}", whole.dtype == trial.dtype)
    if _fits(trial, trial.reference["output"]):
        yield fact("every row of the output is finite", bool(whole.isfinite().all()))
    for name, result in found.items():
        what = name if name == "output" else f"gradient of {name}"
        yield from _compared(trial, name, result, trial.reference[name], what)


def _compared(trial: Trial, name: str, result: Tensor, reference: Tensor, what: str) -> Iterator[Measure]:
    if not _fits(trial, reference):
        return
    yield fact(f"{what} is finite", bool(result.isfinite().all()))
    if trial.point.inputs != "denormal":  # whose digits are lost already
        yield Measure(what, rms(result.double() - reference), _tolerance(trial, name))


def _fits(trial: Trial, reference: Tensor) -> bool:
    """Is the exact result within the range of the dtype?"""
    return bool((reference.abs() <= _HEADROOM * torch.finfo(trial.dtype).max).all())


def _tolerance(trial: Trial, name: str) -> float:
    precision = torch.finfo(trial.dtype)
    return GATE * precision.eps * trial.sizes[name] + precision.smallest_normal


def decoding(trial: Trial, engine: str) -> Iterator[Measure]:
    """With a cache, in uneven pieces, the output is the same: what the definition says of the whole sequence.

    A cache of fixed size refuses a mask that differs from row to row, but cannot tell it from padding if
    every piece is one token. So it gets the chance to refuse the whole first.
    """
    point, x = trial.point, trial.tensors
    if point.causal != "upper left" or point.keys != "same" or point.length == 0:
        return  # a cache is filled from the first token on
    q, k, v = (y.to(trial.dtype) for y in (x.query, x.key, x.value))
    mask = x.visible if x.bias is None else x.bias.to(trial.dtype)
    pieces = _pieces(point.length, f"{trial.seed} {point}")
    options = {**trial.arguments, "is_causal": False, "engine": engine}
    cache, parts = trial.layer.new_cache(point.batch), []
    with torch.no_grad():
        if mask is not None and mask.shape[-2] > 1 and len(pieces) == point.length:
            trial.layer(q, k, v, mask, cache=trial.layer.new_cache(point.batch), **options)
        for start, end in pieces:
            part = None if mask is None else _part(mask, start, end)
            parts.append(trial.layer(*(y[:, :, start:end] for y in (q, k, v)), part, cache=cache, **options))
    yield fact("the cache has seen every token", cache.length == point.length)
    whole = torch.cat(parts, dim=2)[:, :, x.rows]
    expected = trial.decoded(pieces)
    if expected is not None:
        yield from _compared(trial, "output", whole, expected, "output with a cache")


def _part(mask: Tensor, start: int, end: int) -> Tensor:
    """The rows of the new tokens and the keys so far."""
    rows = mask if mask.shape[-2] == 1 else mask[..., start:end, :]
    return rows[..., :end]


def _pieces(length: int, seed: str) -> list[tuple[int, int]]:
    """From the first token to the last: a single one, and pieces of any size, some of them one token."""
    source = random.Random(zlib.crc32(seed.encode()))
    cuts = {0, length, *(source.randrange(length + 1) for _ in range(3))}
    start = source.randrange(max(1, length - 2))
    cuts |= {min(length, start + step) for step in range(3)}
    ordered = sorted(cuts)
    return list(zip(ordered, ordered[1:], strict=False))
