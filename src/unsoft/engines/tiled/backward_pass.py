"""The backward pass of the tiled engine: tiles are recomputed, derivatives come from the formula.

With N the normaliser, z the summed mass and g the gradient of the output:

    delta_i = g_i . o_i          dZ_i = -delta_i norm'(z_i) / N_i          dP_ij = g_i . v_j
    ds_ij = dP_ij weight'(s_ij) / N_i + mass'(s_ij) dZ_i

and the same with derivatives by the bias or by a parameter in place of s. The peak m is treated as a
constant, since the weights do not depend on it. The factor 1 / N_i is put into g_i once, not into every tile.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import Call, Gradients, Upstream
from unsoft.engines.dropout import keep_factor
from unsoft.engines.terms import BIAS, attention_terms, inverse_norm, row_value
from unsoft.engines.tiled.bit_masks import keep_
from unsoft.engines.tiled.tile_program import Program
from unsoft.engines.tiled.tiles import Chunk, Grid
from unsoft.engines.visibility import take
from unsoft.formula import Formula, derivative


@lru_cache(maxsize=256)
def _program(formula: Formula, biased: bool, by: tuple[str, ...]) -> Program:
    """The weight and the slopes of weight and mass by the symbols ``by``."""
    terms = attention_terms(formula, biased)
    slopes = {("weight", name): derivative(terms.weight, name) for name in by}
    if terms.mass is not None:
        slopes |= {("mass", name): derivative(terms.mass, name) for name in by}
    return Program({("weight", None): terms.weight, **slopes})


class BackwardPass:
    """One backward pass: the gradients and what is needed to add one tile to them."""

    def __init__(self, grid: Grid, upstream: Upstream) -> None:
        self.grid, self.grad_out = grid, upstream.grad_out
        self.out, _, self.total = upstream.rows
        self.live, self.peak = upstream.rows.live_peak()
        self.need_bias, self.need_params = need_bias, need_params = upstream.need_bias, upstream.need_params
        biased, formula = grid.call.bias is not None, grid.call.formula
        self.terms = attention_terms(formula, biased)
        # The symbols by which a gradient is needed besides s, each with its number in a table.
        self.params = list(enumerate(self.terms.names if need_params else ()))
        self.query_fields = list(enumerate(formula.symbols.query if upstream.need_query_fields else ()))
        self.key_fields = list(enumerate(formula.symbols.key if upstream.need_key_fields else ()))
        more = (*self.params, *self.query_fields, *self.key_fields)
        by_bias = (BIAS,) if need_bias and formula.bias != "logit" else ()
        self.program = _program(formula, biased, ("s", *by_bias, *(name for _, name in more)))
        self.dq, self.dk, self.dv = (
            x.new_zeros(x.shape, dtype=grid.dtype) for x in (grid.call.q, grid.call.k, grid.call.v)
        )
        self.dbias = grid.call.params.new_zeros(
            grid.call.bias.shape if need_bias and grid.call.bias is not None else 0
        )
        self.dparams = grid.call.params.new_zeros(grid.call.params.shape if need_params else 0)
        heads = (*grid.call.q.shape[:2],)
        self.dquery_fields = self.dparams.new_zeros(len(self.query_fields), *heads, grid.call.q.shape[2])
        self.dkey_fields = self.dparams.new_zeros(len(self.key_fields), *heads, grid.call.k.shape[2])

    def run(self) -> Gradients:
        grid = self.grid
        for chunk in grid.chunks():
            k, v = grid.keys_of(grid.call.k, chunk), grid.keys_of(grid.call.v, chunk)
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for rows in grid.row_blocks():
                self._row_block(chunk, rows, k, v, dk, dv)
            part = (chunk.batch, chunk.kv_heads)
            self.dk[part], self.dv[part] = dk.view_as(self.dk[part]), dv.view_as(self.dv[part])
        narrow = grid.call.q.dtype
        dq, dk, dv = (x.to(narrow) for x in (self.dq, self.dk, self.dv))
        return Gradients(
            dq,
            dk,
            dv,
            self.dbias,
            self.dparams,
            self.dquery_fields if self.query_fields else self.dparams.new_empty(0),
            shared_heads(self.dkey_fields, grid.call) if self.key_fields else self.dparams.new_empty(0),
        )

    def _row_block(self, chunk: Chunk, rows: slice, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        grid, space = self.grid, self.grid.space
        place = (chunk.batch, chunk.heads, rows)
        symbols = grid.row_symbols(chunk, rows) | {"m": self.peak[place][..., None]}
        inverse, d_total = self._normaliser(chunk, place, symbols)
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
            if self.need_bias and grid.call.formula.bias == "logit":
                self._add_to_bias(chunk, rows, keys, ds)

            weight = grid.filled(slopes["weight", None], ds)
            for mask in (seen, kept):
                if mask is not None:
                    keep_(weight, mask)
            dv[:, keys].baddbmm_(grid.as_matrices(weight).transpose(1, 2), g)
            space.give_back_all()
        self.dq[place] = dq.view_as(self.dq[place]).mul_(grid.call.scale)

    def _normaliser(
        self, chunk: Chunk, place: tuple[slice, ...], symbols: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """1 / N and the gradient of the total, (b, h, rows, 1); adds what offset and norm owe params and
        fields."""
        terms = self.terms
        if terms.mass is None:
            return symbols["m"].new_ones(()), symbols["m"].new_zeros(())
        z = self.total[place][..., None]
        inverse = inverse_norm(terms, symbols, z, self.live[place][..., None])
        dtype = self.grid.dtype
        delta = (self.grad_out[place].to(dtype) * self.out[place].to(dtype)).sum(-1, keepdim=True)
        d_norm = -delta * inverse
        slope = 1.0 if terms.norm is None else row_value(derivative(terms.norm, "z"), symbols | {"z": z})
        d_total = torch.where(inverse == 0, 0.0, d_norm * slope)
        by_row = (*((self.dparams, *x) for x in self.params), *((None, *x) for x in self.query_fields))
        for table, row, name in by_row:
            part = torch.zeros_like(d_norm)
            if terms.norm is not None:
                slope = row_value(derivative(terms.norm, name), symbols | {"z": z})
                part = part + d_norm * slope
            if terms.offset is not None:
                part = part + d_total * row_value(derivative(terms.offset, name), symbols)
            part = torch.where(inverse == 0, 0.0, part)
            if table is None:
                self.dquery_fields[row][place] += part.squeeze(-1)
            else:
                table[row, chunk.heads] += part.sum((0, 2, 3))
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
        """Adds the tile's part to the gradients of bias, parameters and fields."""
        space = self.grid.space

        def by(name: str) -> Tensor:
            return _chained(slopes, name, d_weight, d_total, seen, out=space.take(d_weight.shape))

        if ("weight", BIAS) in slopes:
            tile = by(BIAS)
            self._add_to_bias(chunk, rows, keys, tile)
            space.give_back(tile)
        for row, name in self.params:
            tile = by(name)
            self.dparams[row, chunk.heads] += tile.sum((0, 2, 3))
            space.give_back(tile)
        for row, name in self.query_fields:
            tile = by(name)
            self.dquery_fields[row, chunk.batch, chunk.heads, rows] += tile.sum(3)
            space.give_back(tile)
        for row, name in self.key_fields:
            tile = by(name)
            self.dkey_fields[row, chunk.batch, chunk.heads, keys] += tile.sum(2)
            space.give_back(tile)

    def _add_to_bias(self, chunk: Chunk, rows: slice, keys: slice, tile: Tensor) -> None:
        part = take(chunk.of(self.dbias), rows, keys)
        part += tile.sum_to_size(part.shape)


def shared_heads(gradient: Tensor, call: Call) -> Tensor:
    """The gradient (F, B, H, S) of the fields of keys, summed over query heads that share them."""
    if call.key_fields is None or call.key_fields.shape[2] == gradient.shape[2]:
        return gradient
    summed: Tensor = gradient.unflatten(2, (call.key_fields.shape[2], -1)).sum(3)
    return summed


def _chained(
    slopes: dict[Any, Any], by: str, d_weight: Tensor, d_total: Tensor, seen: Tensor | None, out: Tensor
) -> Tensor:
    """d_weight * weight' + d_total * mass', and 0 where nothing is seen."""
    torch.mul(d_weight, slopes["weight", by], out=out)
    mass = slopes.get(("mass", by), 0.0)
    if isinstance(mass, Tensor):
        out.addcmul_(mass, d_total)
    elif mass != 0.0:
        out.add_(d_total * mass)
    return out if seen is None else keep_(out, seen)
