"""The tiled engine: any formula, any device, torch operations only, memory linear in the sequence length.

The attention matrix exists only as tiles. The forward pass keeps a running row peak m and rescales what it has summed
when the peak rises: weights by exp(-dm), masses by exp(-p dm), which is exact because that is how the formula scales.
The backward pass recomputes each tile from q, k and the saved (peak, total) and uses the symbolic derivatives of the
formula. With N the normaliser, z the summed mass and g the gradient of the output:

    delta_i = g_i . o_i          dZ_i = -delta_i norm'(z_i) / N_i          dP_ij = g_i . v_j
    ds_ij = dP_ij weight'(s_ij) / N_i + mass'(s_ij) dZ_i

and the same with derivatives by the bias or by a parameter in place of s. Tiles that the mask or causality hides are
never computed. Both functions are pure and run eagerly; ``operator.py`` makes them differentiable.
"""

from functools import lru_cache

import torch
from torch import Tensor

from unsoft.engines.dropout import keep_factor
from unsoft.engines.program import Program
from unsoft.engines.select import keep_, keep_or_fill_
from unsoft.engines.terms import BIAS, Terms, attention_terms
from unsoft.engines.tiles import Chunk, Grid
from unsoft.engines.visibility import take
from unsoft.formula import Expr, Formula, derivative, lower
from unsoft.formula.torch_ops import run


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    params: Tensor,
    seed: Tensor | None,
    *,
    formula: str,
    causal_offset: int | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, H, L, Dv), peak m and total z (B, H, L); arguments as in :class:`unsoft.engines.call.Call`."""
    content = Formula.from_key(formula)
    grid = Grid(q, k, v, visible, bias, counts, params, seed, content, causal_offset, scale, dropout_p)
    if grid.all_finite:
        return _forward(grid)
    out, peak, total = _forward(grid.cleaned())
    return out + grid.poison(), peak, total


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    params: Tensor,
    seed: Tensor | None,
    out: Tensor,
    peak: Tensor,
    total: Tensor,
    *,
    formula: str,
    causal_offset: int | None,
    scale: float,
    dropout_p: float,
    need_bias: bool,
    need_params: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and params; the last two are empty unless ``need_bias`` and ``need_params``."""
    content = Formula.from_key(formula)
    grid = Grid(q, k, v, visible, bias, counts, params, seed, content, causal_offset, scale, dropout_p)
    if grid.all_finite:
        return _Backward(grid, grad_out, out, peak, total, need_bias, need_params).run()
    clean = grid.cleaned()
    *gradients, dparams = _Backward(clean, grad_out, *_forward(clean), need_bias, need_params).run()
    # The function of the non-finite entries themselves is constant (0 in, NaN added), and so is their gradient.
    inputs = (q, k, v, bias if need_bias else None)
    return *(
        g if x is None else torch.where(x.isfinite(), g, 0.0) for g, x in zip(gradients, inputs, strict=True)
    ), dparams


@lru_cache(maxsize=256)
def _forward_programs(formula: Formula, biased: bool) -> tuple[Terms, Program | None, Program]:
    terms = attention_terms(formula, biased)
    peak = None if terms.peak is None else Program({"peak": terms.peak}, keep_s=True)
    wanted = {"weight": terms.weight} | ({} if terms.mass is None else {"mass": terms.mass})
    return terms, peak, Program(wanted)


def _forward(grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    terms, *_ = _forward_programs(grid.formula, grid.bias is not None)
    shape = grid.q.shape[:3]
    out = grid.q.new_empty(*shape, grid.v.shape[3])
    peak = torch.zeros(shape, dtype=grid.dtype, device=grid.q.device)
    total = torch.ones_like(peak)
    for chunk in grid.chunks():
        k, v = grid.keys_of(grid.k, chunk), grid.keys_of(grid.v, chunk)
        for rows in grid.row_blocks():
            place = (chunk.batch, chunk.heads, rows)
            symbols = grid.row_symbols(chunk, rows)
            summed, symbols["m"], z = _row_block(grid, chunk, rows, k, v, symbols)
            if terms.offset is not None:
                z = z + _small(terms.offset, symbols)
            inverse = _inverse(_norm(terms, symbols, z)) if terms.mass is not None else 1.0
            out[place] = summed * (inverse * keep_factor(grid.dropout_p))
            peak[place] = symbols["m"].squeeze(-1)
            if terms.mass is not None:
                total[place] = z.squeeze(-1)
    return out, peak, total


def _row_block(
    grid: Grid, chunk: Chunk, rows: slice, k: Tensor, v: Tensor, symbols: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the values (b, h, rows, Dv) before normalising, peak and summed mass (b, h, rows, 1)."""
    terms, peak_program, program = _forward_programs(grid.formula, grid.bias is not None)
    q = grid.stacked(grid.q, chunk, rows, grid.scale)
    summed = q.new_zeros(*q.shape[:2], v.shape[2])
    shape = (chunk.batch_size, chunk.head_count, rows.stop - rows.start)
    z = q.new_zeros(*shape, 1)
    m, highest = z, q.new_full((*shape, 1), -torch.inf)
    for keys, seen in grid.key_blocks(chunk, rows):
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
    return summed.view(*shape, v.shape[2]), m, z


@lru_cache(maxsize=256)
def _backward_program(formula: Formula, biased: bool, need_bias: bool, need_params: bool) -> Program:
    """The weight and the slopes of weight and mass by s, and by the bias and the parameters where needed."""
    terms = attention_terms(formula, biased)
    by = (
        "s",
        *((BIAS,) if need_bias and formula.bias == "strength" else ()),
        *(terms.names if need_params else ()),
    )
    slopes = {("weight", name): derivative(terms.weight, name) for name in by}
    if terms.mass is not None:
        slopes |= {("mass", name): derivative(terms.mass, name) for name in by}
    return Program({("weight", None): terms.weight, **slopes})


class _Backward:
    """One backward pass: the gradients and what is needed to add one tile to them."""

    def __init__(
        self,
        grid: Grid,
        grad_out: Tensor,
        out: Tensor,
        peak: Tensor,
        total: Tensor,
        need_bias: bool,
        need_params: bool,
    ) -> None:
        self.grid, self.grad_out, self.out, self.peak, self.total = grid, grad_out, out, peak, total
        self.need_bias, self.need_params = need_bias, need_params
        biased = grid.bias is not None
        self.terms = attention_terms(grid.formula, biased)
        self.program = _backward_program(grid.formula, biased, need_bias, need_params)
        self.dq, self.dk, self.dv = (x.new_zeros(x.shape, dtype=grid.dtype) for x in (grid.q, grid.k, grid.v))
        self.dbias = grid.params.new_zeros(grid.bias.shape if need_bias else 0)
        self.dparams = grid.params.new_zeros(grid.params.shape if need_params else 0)

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        grid = self.grid
        for chunk in grid.chunks():
            k, v = grid.keys_of(grid.k, chunk), grid.keys_of(grid.v, chunk)
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for rows in grid.row_blocks():
                self._row_block(chunk, rows, k, v, dk, dv)
            part = (chunk.batch, chunk.kv_heads)
            self.dk[part], self.dv[part] = dk.view_as(self.dk[part]), dv.view_as(self.dv[part])
        narrow = grid.q.dtype
        return self.dq.to(narrow), self.dk.to(narrow), self.dv.to(narrow), self.dbias, self.dparams

    def _row_block(self, chunk: Chunk, rows: slice, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        grid, space = self.grid, self.grid.space
        place = (chunk.batch, chunk.heads, rows)
        symbols = grid.row_symbols(chunk, rows) | {"m": self.peak[place][..., None]}
        inverse, d_total = self._normaliser(chunk, place, symbols)
        q = grid.stacked(grid.q, chunk, rows, grid.scale)
        g = grid.stacked(self.grad_out, chunk, rows, inverse * keep_factor(grid.dropout_p))
        dq = torch.zeros_like(q)
        for keys, seen in grid.key_blocks(chunk, rows):
            s = grid.product(chunk, q, k[:, keys])
            slopes = self.program.run(symbols | grid.tile_symbols(chunk, rows, keys, s), space)
            d_weight = grid.product(chunk, g, v[:, keys])
            kept = grid.kept(chunk, rows, keys)
            if kept is not None:
                keep_(d_weight, kept)
            self._add_bias_and_params(chunk, rows, keys, seen, slopes, d_weight, d_total)

            ds = _chained(slopes, "s", d_weight, d_total, seen, out=d_weight)
            dq.baddbmm_(grid.as_matrices(ds), k[:, keys])
            dk[:, keys].baddbmm_(grid.as_matrices(ds).transpose(1, 2), q)
            if self.need_bias and grid.formula.bias == "logit":
                self._add_to_bias(chunk, rows, keys, ds)

            weight = grid.filled(slopes["weight", None], ds)
            for mask in (seen, kept):
                if mask is not None:
                    keep_(weight, mask)
            dv[:, keys].baddbmm_(grid.as_matrices(weight).transpose(1, 2), g)
            space.give_back_all()
        self.dq[place] = dq.view_as(self.dq[place]).mul_(grid.scale)

    def _normaliser(
        self, chunk: Chunk, place: tuple, symbols: dict[str, Tensor]
    ) -> tuple[Tensor | float, Tensor | float]:
        """1 / N and the gradient of the summed mass, (b, h, rows, 1); adds what offset and norm owe the parameters."""
        terms = self.terms
        if terms.mass is None:
            return 1.0, 0.0
        z = self.total[place][..., None]
        inverse = _inverse(_norm(terms, symbols, z))
        dtype = self.grid.dtype
        delta = (self.grad_out[place].to(dtype) * self.out[place].to(dtype)).sum(-1, keepdim=True)
        d_norm = -delta * inverse
        slope = 1.0 if terms.norm is None else _small(derivative(terms.norm, "z"), symbols | {"z": z})
        d_total = torch.where(inverse == 0, 0.0, d_norm * slope)
        if self.need_params:
            for row, name in enumerate(terms.names):
                part = torch.zeros_like(d_norm)
                if terms.norm is not None:
                    slope = _small(derivative(terms.norm, name), symbols | {"z": z})
                    part = part + torch.where(inverse == 0, 0.0, d_norm * slope)
                if terms.offset is not None:
                    part = part + d_total * _small(derivative(terms.offset, name), symbols)
                self.dparams[row, chunk.heads] += part.sum((0, 2, 3))
        return inverse, d_total

    def _add_bias_and_params(self, chunk, rows, keys, seen, slopes, d_weight, d_total) -> None:
        space = self.grid.space
        if ("weight", BIAS) in slopes:
            tile = _chained(slopes, BIAS, d_weight, d_total, seen, out=space.take(d_weight.shape))
            self._add_to_bias(chunk, rows, keys, tile)
            space.give_back(tile)
        for row, name in enumerate(self.terms.names if self.need_params else ()):
            tile = _chained(slopes, name, d_weight, d_total, seen, out=space.take(d_weight.shape))
            self.dparams[row, chunk.heads] += tile.sum((0, 2, 3))
            space.give_back(tile)

    def _add_to_bias(self, chunk: Chunk, rows: slice, keys: slice, tile: Tensor) -> None:
        part = take(chunk.of(self.dbias), rows, keys)
        part += tile.sum_to_size(part.shape)


def _chained(
    slopes: dict, by: str, d_weight: Tensor, d_total: Tensor | float, seen: Tensor | None, out: Tensor
) -> Tensor:
    """d_weight * weight' + d_total * mass', and 0 where nothing is seen."""
    torch.mul(d_weight, slopes["weight", by], out=out)
    mass = slopes.get(("mass", by), 0.0)
    if isinstance(mass, Tensor):
        out.addcmul_(mass, d_total)
    elif mass != 0.0:
        out.add_(d_total * mass)
    return out if seen is None else keep_(out, seen)


def _norm(terms: Terms, symbols: dict[str, Tensor], z: Tensor) -> Tensor:
    return z if terms.norm is None else _small(terms.norm, symbols | {"z": z})


def _inverse(norm: Tensor) -> Tensor:
    """1 / norm, and 0 where norm is 0: such rows have weights 0."""
    return torch.where(norm == 0, 0.0, 1.0 / norm)


def _small(expr: Expr, symbols: dict[str, Tensor]) -> Tensor | float:
    """An expression of row quantities."""
    return run(*_lowered(expr), symbols)["value"]


@lru_cache(maxsize=1024)
def _lowered(expr: Expr):
    return lower({"value": expr})
