"""The forward pass of the tiled engine.

Row by row of tiles, a running peak m is kept, and what has been summed is rescaled when it rises: weights by
exp(-dm), masses by exp(-p dm). That is exact, because it is how the formula scales.
"""

from functools import lru_cache

import torch
from torch import Tensor

from unsoft.engines.call import Rows
from unsoft.engines.dropout import keep_factor
from unsoft.engines.terms import Terms, attention_terms, inverse_norm, row_value
from unsoft.engines.tiled.bit_masks import keep_, keep_or_fill_
from unsoft.engines.tiled.tile_program import Program
from unsoft.engines.tiled.tiles import Chunk, Grid
from unsoft.formula import Formula


@lru_cache(maxsize=256)
def _programs(formula: Formula, biased: bool) -> tuple[Terms, Program | None, Program]:
    terms = attention_terms(formula, biased)
    peak = None if terms.peak is None else Program({"peak": terms.peak}, keep_s=True)
    wanted = {"weight": terms.weight} | ({} if terms.mass is None else {"mass": terms.mass})
    return terms, peak, Program(wanted)


def run_forward(grid: Grid) -> Rows:
    """Output (B, H, L, Dv); per row (B, H, L) the peak (0 if there is none, -inf if no key is seen) and the
    total (1 if no mass)."""
    terms = attention_terms(grid.call.formula, grid.call.bias is not None)
    shape = grid.call.q.shape[:3]
    out = grid.call.q.new_empty(*shape, grid.call.v.shape[3])
    peak = torch.zeros(shape, dtype=grid.dtype, device=grid.call.q.device)
    total = torch.ones_like(peak)
    for chunk in grid.chunks():
        k, v = grid.keys_of(grid.call.k, chunk), grid.keys_of(grid.call.v, chunk)
        for rows in grid.row_blocks():
            place = (chunk.batch, chunk.heads, rows)
            symbols = grid.row_symbols(chunk, rows)
            summed, symbols["m"], z, live = _row_block(grid, chunk, rows, k, v, symbols)
            if terms.offset is not None:
                z = z + row_value(terms.offset, symbols)
            inverse = inverse_norm(terms, symbols, z, live) if terms.mass is not None else 1.0
            out[place] = summed * (inverse * keep_factor(grid.call.dropout_p))
            peak[place] = torch.where(live, symbols["m"], -torch.inf).squeeze(-1)
            if terms.mass is not None:
                total[place] = z.squeeze(-1)
    return Rows(out, peak, total)


def _row_block(
    grid: Grid, chunk: Chunk, rows: slice, k: Tensor, v: Tensor, symbols: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted sum of values (b, h, rows, Dv) before normalising, peak, summed mass, and whether any key is
    seen (b, h, rows, 1)."""
    terms, peak_program, program = _programs(grid.call.formula, grid.call.bias is not None)
    q = grid.stacked(grid.call.q, chunk, rows, grid.call.scale)
    summed = q.new_zeros(*q.shape[:2], v.shape[2])
    shape = (chunk.batch_size, chunk.head_count, rows.stop - rows.start)
    z = q.new_zeros(*shape, 1)
    m, highest = z, q.new_full((*shape, 1), -torch.inf)
    live = torch.zeros_like(z, dtype=torch.bool)
    for keys, seen in grid.key_blocks(chunk, rows):
        live |= True if seen is None else (seen != 0).any(-1, keepdim=True)
        s = grid.product(chunk, q, k[:, keys])
        symbols = symbols | grid.tile_symbols(chunk, rows, keys, s)
        if peak_program is not None:
            peaks = grid.filled(peak_program.run(symbols, grid.space)["peak"], s)
            if seen is not None:
                keep_or_fill_(peaks, seen, grid.space.number(-torch.inf))
            before, highest = highest, torch.maximum(highest, peaks.amax(-1, keepdim=True))
            m = torch.where(highest == -torch.inf, 0.0, highest)
            if keys.start > 0:
                drop = before - m
                summed.mul_(drop.exp().view(*summed.shape[:2], 1))
                z.mul_((terms.degree * drop).exp())
            if peaks is not s:
                grid.space.give_back(peaks)
        values = program.run(symbols | {"m": m}, grid.space)
        weight = grid.filled(values["weight"], s)
        if terms.mass is not None:
            mass = grid.filled(values["mass"], s)
            if seen is not None:
                keep_(mass, seen)
            z += mass.sum(-1, keepdim=True)
        for mask in (seen, grid.kept(chunk, rows, keys)):
            if mask is not None:
                keep_(weight, mask)
        summed.baddbmm_(grid.as_matrices(weight), v[:, keys])
        grid.space.give_back_all()
    return summed.view(*shape, v.shape[2]), m, z, live
