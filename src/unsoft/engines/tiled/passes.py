"""The forward and the backward pass of the tiled engine.

Forward: row by row of tiles, a running peak m is kept, and what has been summed is rescaled when it rises:
weights by exp(-dm), masses by exp(-p dm). That is exact, because it is how the formula scales.

Backward: tiles are recomputed, derivatives come from the formula. With N the normaliser, z the summed mass
and g the gradient of the output:

    delta_i = g_i . o_i          dZ_i = -delta_i norm'(z_i) / N_i          dP_ij = g_i . v_j
    ds_ij = dP_ij weight'(s_ij) / N_i + mass'(s_ij) dZ_i

and the same with derivatives by the bias or by a parameter in place of s. The peak m is treated as a
constant, since the weights do not depend on it. The factor 1 / N_i is put into g_i once, not into every tile.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import Gradients, Rows, Upstream, named_rows
from unsoft.engines.dropout import keep_factor
from unsoft.engines.terms import BIAS, Terms, attention_terms, inverse_norm, norm_gradients, row_value
from unsoft.engines.tiled.program import TileProgram, keep_, keep_or_fill_
from unsoft.engines.tiled.tiles import Chunk, Grid
from unsoft.engines.visibility import take
from unsoft.formula import Formula, derivative


@lru_cache(maxsize=256)
def _programs(formula: Formula, biased: bool) -> tuple[Terms, TileProgram | None, TileProgram]:
    terms = attention_terms(formula, biased)
    peak = None if terms.peak is None else TileProgram({"peak": terms.peak}, keep_s=True)
    wanted = {"weight": terms.weight} | ({} if terms.mass is None else {"mass": terms.mass})
    return terms, peak, TileProgram(wanted)


def run_forward(grid: Grid) -> Rows:
    """Return the output (B, H, L, Dv); per row (B, H, L) the peak (0 if there is none, -inf if no key is
    seen) and the total (1 if no mass)."""
    terms = attention_terms(grid.call.formula, grid.call.bias is not None)
    shape = grid.call.q.shape[:3]
    out = grid.call.q.new_empty(*shape, grid.call.v.shape[3], dtype=grid.call.out_dtype)
    peak = torch.zeros(shape, dtype=grid.dtype, device=grid.call.q.device)
    total = torch.ones_like(peak)
    for chunk in grid.chunks():
        k, v = grid.keys_of(grid.call.k, chunk), grid.keys_of(grid.call.v, chunk)
        for rows in grid.row_blocks():
            block = (chunk.batch, chunk.heads, rows)
            symbols = grid.row_symbols(chunk, rows)
            summed, symbols["m"], z, live = _row_block(grid, chunk, rows, k, v, symbols)
            if terms.offset is not None:
                z = z + row_value(terms.offset, symbols)
            inverse = inverse_norm(terms, symbols, z, live) if terms.mass is not None else 1.0
            out[block] = summed * (inverse * keep_factor(grid.call.dropout_p))
            peak[block] = torch.where(live, symbols["m"], -torch.inf).squeeze(-1)
            if terms.mass is not None:
                total[block] = z.squeeze(-1)
    return Rows(out, peak, total)


def _row_block(
    grid: Grid, chunk: Chunk, rows: slice, k: Tensor, v: Tensor, symbols: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted sum of values (b, h, rows, Dv) before normalising, peak, summed mass, and whether
    any key is seen (b, h, rows, 1)."""
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
                # The peak never falls, so drop <= 0 and exp cannot overflow. It is -inf in rows that had seen
                # nothing, whose sums are 0; m is 0 there, not -inf, because -inf + inf would be NaN.
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


@lru_cache(maxsize=256)
def _program(formula: Formula, biased: bool, by: tuple[str, ...]) -> TileProgram:
    """Return a program for the weight and the slopes of weight and mass by the symbols ``by``."""
    terms = attention_terms(formula, biased)
    slopes = {("weight", name): derivative(terms.weight, name) for name in by}
    if terms.mass is not None:
        slopes |= {("mass", name): derivative(terms.mass, name) for name in by}
    return TileProgram({("weight", None): terms.weight, **slopes})


class BackwardPass:
    """One backward pass: the gradients and what is needed to add one tile to them."""

    def __init__(self, grid: Grid, upstream: Upstream) -> None:
        self.grid, self.grad_out = grid, upstream.grad_out
        self.out, _, self.total = upstream.rows
        self.live, self.peak = upstream.rows.live_peak()
        call, formula = grid.call, grid.call.formula
        self.terms = attention_terms(formula, call.bias is not None)
        self.dq, self.dk, self.dv = (x.new_zeros(x.shape, dtype=grid.dtype) for x in (call.q, call.k, call.v))
        self.optional = upstream.optional_gradients(call, () if call.bias is None else call.bias.shape)
        # The symbols by which a gradient is needed besides s, each with its row in a table.
        self.params = named_rows(self.optional.params, self.terms.names)
        self.query_fields = named_rows(self.optional.query_fields, formula.symbols.query)
        self.key_fields = named_rows(self.optional.key_fields, formula.symbols.key)
        by_bias = (BIAS,) if upstream.need_bias and formula.bias != "logit" else ()
        more = (name for name, _ in (*self.params, *self.query_fields, *self.key_fields))
        self.program = _program(formula, call.bias is not None, ("s", *by_bias, *more))

    def run(self) -> Gradients:
        grid = self.grid
        for chunk in grid.chunks():
            k, v = grid.keys_of(grid.call.k, chunk), grid.keys_of(grid.call.v, chunk)
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for rows in grid.row_blocks():
                self._row_block(chunk, rows, k, v, dk, dv)
            part = (chunk.batch, chunk.kv_heads)
            self.dk[part], self.dv[part] = dk.view_as(self.dk[part]), dv.view_as(self.dv[part])
        dq, dk, dv = (x.to(grid.call.q.dtype) for x in (self.dq, self.dk, self.dv))
        return Gradients.finished(grid.call, dq, dk, dv, self.optional)

    def _row_block(self, chunk: Chunk, rows: slice, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        grid, space = self.grid, self.grid.space
        block = (chunk.batch, chunk.heads, rows)
        symbols = grid.row_symbols(chunk, rows) | {"m": self.peak[block][..., None]}
        inverse, d_total = self._normaliser(chunk, block, symbols)
        q = grid.stacked(grid.call.q, chunk, rows, grid.call.scale)
        g = grid.stacked(self.grad_out, chunk, rows, inverse * keep_factor(grid.call.dropout_p))
        dq = torch.zeros_like(q)
        for keys, seen in grid.key_blocks(chunk, rows):
            s = grid.product(chunk, q, k[:, keys])
            slopes = self.program.run(symbols | grid.tile_symbols(chunk, rows, keys, s), space)
            d_weight = grid.product(chunk, g, v[:, keys])
            kept = grid.kept(chunk, rows, keys)
            if kept is not None:
                keep_(d_weight, kept)
            self._add_others(chunk, rows, keys, seen, slopes, d_weight, d_total)

            ds = _chained(slopes, "s", d_weight, d_total, seen, out=d_weight)
            dq.baddbmm_(grid.as_matrices(ds), k[:, keys])
            dk[:, keys].baddbmm_(grid.as_matrices(ds).transpose(1, 2), q)
            if self.optional.bias is not None and grid.call.formula.bias == "logit":
                self._add_to_bias(chunk, rows, keys, ds)

            weight = grid.filled(slopes["weight", None], ds)
            for mask in (seen, kept):
                if mask is not None:
                    keep_(weight, mask)
            dv[:, keys].baddbmm_(grid.as_matrices(weight).transpose(1, 2), g)
            space.give_back_all()
        self.dq[block] = dq.view_as(self.dq[block]).mul_(grid.call.scale)

    def _normaliser(
        self, chunk: Chunk, block: tuple[slice, ...], symbols: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return 1 / N and the gradient of the total, (b, h, rows, 1). Add the parts of offset and norm to
        the gradients of parameters and fields."""
        terms = self.terms
        if terms.mass is None:
            return symbols["m"].new_ones(()), symbols["m"].new_zeros(())
        z, dtype = self.total[block][..., None], self.grid.dtype
        inverse = inverse_norm(terms, symbols, z, self.live[block][..., None])
        delta = (self.grad_out[block].to(dtype) * self.out[block].to(dtype)).sum(-1, keepdim=True)
        d_total, by = norm_gradients(terms, symbols | {"z": z}, inverse, delta)
        for name, row in self.params:
            row[chunk.heads] += by(name).sum((0, 2, 3))
        for name, row in self.query_fields:
            row[block] += by(name).squeeze(-1)
        return inverse, d_total

    def _add_others(
        self,
        chunk: Chunk,
        rows: slice,
        keys: slice,
        seen: Tensor | None,
        slopes: dict[Any, Any],
        d_weight: Tensor,
        d_total: Tensor,
    ) -> None:
        """Add the tile's part to the gradients of bias, parameters and fields."""
        space = self.grid.space

        def by(name: str) -> Tensor:
            return _chained(slopes, name, d_weight, d_total, seen, out=space.take(d_weight.shape))

        if ("weight", BIAS) in slopes:
            tile = by(BIAS)
            self._add_to_bias(chunk, rows, keys, tile)
            space.give_back(tile)
        heads = (chunk.batch, chunk.heads)
        for table, part, summed in (
            (self.params, (chunk.heads,), (0, 2, 3)),
            (self.query_fields, (*heads, rows), (3,)),
            (self.key_fields, (*heads, keys), (2,)),
        ):
            for name, row in table:
                tile = by(name)
                row[part] += tile.sum(summed)
                space.give_back(tile)

    def _add_to_bias(self, chunk: Chunk, rows: slice, keys: slice, tile: Tensor) -> None:
        assert self.optional.bias is not None
        part = take(chunk.of(self.optional.bias), rows, keys)
        part += tile.sum_to_size(part.shape)


def _chained(
    slopes: dict[Any, Any], by: str, d_weight: Tensor, d_total: Tensor, seen: Tensor | None, out: Tensor
) -> Tensor:
    """Return d_weight * weight' + d_total * mass', and 0 where nothing is seen."""
    torch.mul(d_weight, slopes["weight", by], out=out)
    mass = slopes.get(("mass", by), 0.0)
    if isinstance(mass, Tensor):
        out.addcmul_(mass, d_total)
    elif mass != 0.0:
        out.add_(d_total * mass)
    return out if seen is None else keep_(out, seen)
