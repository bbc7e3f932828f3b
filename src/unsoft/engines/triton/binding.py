"""Run the kernels on a call, forward and backward. No step waits for the GPU, so that a call can be captured
in a CUDA graph.

The fast kernels ignore NaN and Inf. Each is followed by an exact kernel, compiled from the same text, that
follows the rules for them: it returns at once if the sum of all inputs is finite, and computes everything
again otherwise.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.engines import tiled
from unsoft.engines.call import Call, Gradients, Rows, Upstream, named_rows
from unsoft.engines.dropout import keep_factor
from unsoft.engines.registry import warn_unavailable
from unsoft.engines.terms import Terms, attention_terms, norm_gradients
from unsoft.engines.triton import launch, structures
from unsoft.engines.triton.codegen import kernels, row_factor, slots
from unsoft.engines.triton.launch import KernelError, Launch, TileSizes, fields_view, on_device, padded, view
from unsoft.engines.triton.structures import NO_VIEW, View
from unsoft.engines.visibility import key_spans

MOST_ROWS = 64
"""Queries times query heads of one key head that still count as few."""
FEW = 16
_SMALLEST_SPLIT = 256
_MOST_SPLITS = 64
NO_ROWS = structures.RowGradients(view(None), view(None), view(None), view(None))
_INTERPRETED = (3, 16)
"""Splits and keys of a tile in Triton's interpreter: small, so that small tests have several."""


class Near(NamedTuple):
    """Densities of keys, for the kernels of a call (see density.py), and the tile sizes that they are for."""

    density: structures.KernelDensity
    fixed: dict[str, Any]
    """Fields of :class:`Fixed`."""
    sizes: tuple[TileSizes, ...]

    @property
    def is_there(self) -> bool:
        return self.density.power is not None


NO_DENSITIES = Near(structures.NO_DENSITY, {}, ())


class CallArguments:
    """Arguments that all kernels of a call share. Holds the tensors until the kernels have been started."""

    def __init__(self, call: Call, near: Near = NO_DENSITIES) -> None:
        # A tensor with the negative bit set (x.conj().imag) stores the negated values, which kernels would
        # read.
        q, k, v = (x.resolve_neg() for x in (call.q, call.k, call.v))
        self.call, self.qkv, self.kind = call, (q, k, v), (call.formula.key, call.q.dtype)
        self.code = kernels(call.formula.key, call.bias is not None or near.is_there)
        self.near = near
        (batch, heads, length, width), (_, kv_heads, keys, value_width) = q.shape, v.shape
        full = (batch, heads, length, keys)
        row_positions = key_positions = None
        if call.positions is not None:
            both = call.positions.expand(batch, -1)[:, None].expand(-1, heads, -1)
            row_positions, key_positions = both[..., :length], both[..., length:]
        self.inputs = structures.KernelInputs(view(q), view(k), view(v))
        self.context = structures.Context(
            structures.Extras(
                view(None if call.visible is None else call.visible.view(torch.uint8).expand(full)),
                _spans_view(call.spans, batch, heads),
                view(None),
                view(None if call.bias is None else call.bias.resolve_neg().expand(full)),
                view(None if call.counts is None else call.counts.expand(full[:3])),
                view(row_positions),
                view(key_positions),
                fields_view(call.query_fields),
                fields_view(call.spread_key_fields()),
                call.params.resolve_neg().contiguous(),
                call.seed,
            ),
            structures.Numbers(
                *launch.two_floats(call.scale),
                *launch.two_floats(keep_factor(call.dropout_p)),
                round(call.dropout_p * 2**32),
            ),
            structures.Shape(heads, length, keys, call.causal_offset or 0),
        )
        self.fixed = structures.Fixed(
            group=heads // kv_heads,
            width=width,
            padded=padded(width),
            value_width=value_width,
            value_padded=padded(value_width),
            causal=call.causal_offset is not None and call.spans is None,
            precision=launch.precision(q.dtype),
            double=q.dtype == torch.float64,
            exact=False,
            parts=launch.flag_parts(),
            **near.fixed,
        )
        self.flag = call.params.new_empty(self.fixed.parts)
        """Sums of all inputs, by ``prepare``."""

    def prepare(
        self, results: structures.KernelResults, grad: View, gradients: structures.RowGradients
    ) -> Launch:
        """Return the launch of the kernel that sums the inputs and prepares the rows of a backward pass."""
        optional = (self.call.bias, self.call.query_fields, self.call.key_fields)
        sums = [x.sum(dtype=self.call.compute_dtype) for x in optional if x is not None]
        of_rows = {"results": results, "grad": grad, "gradients": gradients}
        of_inputs = {"inputs": self.inputs, "more": sum(sums[1:], sums[0]) if sums else None}
        sizes, batches = TileSizes(32, 16, 4, 1), len(self.call.q)
        return self._sized(
            "prepare", self.fixed.parts, sizes, **of_rows, **of_inputs, flag=self.flag, batches=batches
        )

    def few_queries(self, results: structures.KernelResults) -> list[Launch]:
        """Return the two launches of decoding: sums over parts of the keys, then one row from its parts.

        The keys are split among programs, so that the whole GPU reads them."""
        batch, kv_heads, keys, _ = self.qkv[1].shape
        heads, length = self.qkv[0].shape[1:3]
        rows = padded(heads // kv_heads * length)
        splits, tile = _INTERPRETED if launch.interpreted() else (_splits(batch * kv_heads, keys), 64)
        widths = (self.fixed.value_padded, 1, 1)
        new_empty, shape = results.peaks.new_empty, (batch, kv_heads, splits, rows)
        shared: dict[str, Any] = {
            "parts": structures.KernelParts(*(new_empty(*shape, width) for width in widths)),
            "splits": splits,
            "FIXED": self.fixed._replace(exact=True),
        }
        tiles = (TileSizes(rows, width, 4, stages) for width, stages in _decode_tiles(tile))
        all_splits = TileSizes(16, 1 << (splits - 1).bit_length(), 4, 1)
        return [
            self._sized("decode", splits * batch * kv_heads, *tiles, inputs=self.inputs, **shared),
            self._sized("combine", length * batch * heads, all_splits, results=results, ROWS=rows, **shared),
        ]

    def _sized(self, name: str, programs: int, *sizes: TileSizes, **arguments: Any) -> Launch:
        """Return the launch of a kernel with tile sizes of its own."""
        given = {"context": self.context, "FIXED": self.fixed, **arguments}
        kernel = getattr(self.code, f"{name}_kernel")
        return Launch(name, kernel, given, lambda _: (programs,), *self.kind, sizes)

    def launch(self, name: str, exact: bool, **arguments: Any) -> Launch:
        """Return the launch of a kernel. Its programs own blocks of rows, or of keys to write their
        gradients."""
        of_keys = name == "key_gradients"
        batch, heads, length, _ = self.qkv[1 if of_keys else 0].shape

        def grid(sizes: TileSizes) -> tuple[int]:
            return (-(-length // (sizes.keys if of_keys else sizes.rows)) * batch * heads,)

        context = self.key_context if of_keys else self.context
        lists = view(None if self.call.visible is None or exact else _example_list(self.call.q.device))
        shared = {"inputs": self.inputs, "context": context, "flag": self.flag, "lists": lists}
        shared["density"] = self.near.density
        given = {**shared, **arguments, "FIXED": self.fixed._replace(exact=exact)}
        prepare = None if lists.pointer is None else partial(self._lists, of_keys=of_keys)
        kernel = getattr(self.code, f"{name}_kernel")
        return Launch(name, kernel, given, grid, *self.kind, self.near.sizes, prepare=prepare)

    @cached_property
    def key_context(self) -> structures.Context:
        """The context of a kernel that owns keys: with the spans of keys, not of rows."""
        if self.call.spans is None:
            return self.context
        (batch, heads, _, _), keys = self.call.q.shape, self.call.k.shape[2]
        spans = _spans_view(key_spans(self.call.spans, keys), batch, heads)
        return self.context._replace(extras=self.context.extras._replace(spans=view(None), key_spans=spans))

    def _lists(self, sizes: TileSizes, *, of_keys: bool) -> dict[str, View]:
        """Start the kernel that lists the tiles with a visible entry of every block of rows, or of keys."""
        from unsoft.engines.triton.kernel.tiles import visible_tiles_kernel

        mask, spans = self.call.visible, self.call.spans
        assert mask is not None
        (all_batch, all_heads, length, _), keys = self.call.q.shape, self.call.k.shape[2]
        batch, heads = max(len(mask), 1 if spans is None else len(spans)), mask.shape[1]
        blocks, tiles = -(-length // sizes.rows), -(-keys // sizes.keys)
        blocks, tiles = (tiles, blocks) if of_keys else (blocks, tiles)
        lists = torch.empty(batch, heads, blocks, _list_width(tiles), dtype=torch.int32, device=mask.device)
        extras = self.key_context.extras if of_keys else self.context.extras
        arguments = {
            "visible": view(mask.view(torch.uint8).expand(batch, heads, length, keys)),
            "spans": extras.key_spans if of_keys else extras.spans,
            "shape": self.context.shape._replace(heads=heads),
            "lists": view(lists),
            "FIXED": structures.ListFixed(of_keys, self.fixed.causal),
        }
        grid, own = (blocks * batch * heads,), sizes._replace(warps=4, stages=1)
        launch.start(
            Launch("visible_tiles", visible_tiles_kernel, arguments, lambda _: grid, "", torch.uint8, (own,))
        )
        return {"lists": view(lists.expand(all_batch, all_heads, -1, -1))}


def _spans_view(spans: Tensor | None, batch: int, heads: int) -> View:
    """Return spans (B|1, rows, 2) as a view (B, H, rows, 2)."""
    return view(None if spans is None else spans[:, None].expand(batch, heads, -1, -1))


def _list_width(tiles: int) -> int:
    """Return the numbers of a list of so many tiles and their count; a multiple of 16, since Triton compiles
    other code for other strides."""
    return -(-(tiles + 1) // 16) * 16


@cache
def _example_list(device: torch.device) -> Tensor:
    """Return a tensor like those of :meth:`CallArguments._lists`, to choose tile sizes with."""
    return torch.zeros(1, 1, 1, 16, dtype=torch.int32, device=device)


def has_few_queries(call: Call) -> bool:
    """Return True if a call should be split over its keys.

    >>> from unsoft.engines.arguments import checked_call
    >>> from unsoft.formula import Formula
    >>> q, k = torch.zeros(1, 8, 1, 64), torch.zeros(1, 2, 1000, 64)
    >>> has_few_queries(checked_call(q, k, k, Formula("s/n"), enable_gqa=True)[0])
    True
    """
    length, group = call.q.shape[2], call.q.shape[1] // call.k.shape[1]
    return length <= FEW and length * group <= MOST_ROWS


def _decode_tiles(keys: int) -> list[tuple[int, int]]:
    """Return keys of a tile and stages of the pipeline, to try until one has room; all divide the first."""
    return [(keys, 2), *((smaller, 1) for smaller in (keys, keys // 2, keys // 4) if smaller >= 16)]


def _splits(programs: int, keys: int) -> int:
    """Return as many splits as give every multiprocessor two programs, without splits that are too short."""
    wanted = -(-2 * torch.cuda.get_device_properties().multi_processor_count // programs)
    return max(1, min(wanted, -(-keys // _SMALLEST_SPLIT), _MOST_SPLITS))


def run_forward(call: Call, rows: Rows, near: Near = NO_DENSITIES) -> CallArguments:
    """Start the kernels that fill the rows. Densities have no rules for NaN and Inf."""
    results = structures.KernelResults(view(rows.out), *rows[1:])
    common = CallArguments(call, near)
    if has_few_queries(call) and not near.is_there:
        launches = common.few_queries(results)
    else:
        launches = [common.prepare(results, NO_VIEW, NO_ROWS)]
        for exact in (False,) if near.is_there else (False, True):
            arguments = {"results": results, "grad": NO_VIEW, "gradients": NO_ROWS}
            launches.append(common.launch("forward", exact, **arguments))
    for started in launches:
        launch.start(started)
    return common


def forward(call: Call) -> Rows:
    """Return output, row peaks and row totals."""
    rows = Rows.empty(call.q, call.v)
    if call.is_empty:
        return rows.of_no_keys()
    try:
        with on_device(call.q):
            run_forward(call, rows)
    except KernelError as error:
        warn_or_raise(call, error)
        return tiled.forward(call)
    return rows


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of q, k and v, and of the other inputs that need one."""
    try:
        return run_backward(call, upstream)
    except KernelError as error:
        warn_or_raise(call, error)
        return tiled.backward(call, upstream)


def run_backward(
    call: Call,
    upstream: Upstream,
    near: Near = NO_DENSITIES,
    dpoints: View = NO_VIEW,
    by_density: structures.DensityGradients = structures.NO_DENSITY_GRADIENTS,
) -> Gradients:
    """Return the gradients; those by densities are written to ``dpoints`` and ``by_density``."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    # The gradient of a bias that is the same in all rows is summed by the kernel that owns keys.
    by_key = call.bias is not None and call.bias.shape[2] == 1
    batch, heads, length, _ = call.q.shape
    bias_shape = (batch, heads, 1 if by_key else length, call.k.shape[2])
    optional = upstream.optional_gradients(call, bias_shape)
    if call.is_empty:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return Gradients.finished(call, dq, dk, dv, optional)
    count, blocks = slots(len(call.params)), -(-call.q.shape[2] // launch.SMALLEST.rows)
    by_block = None
    if optional.params is not None and len(optional.params):
        by_block = call.params.new_zeros(*call.q.shape[:2], blocks, count)
    partials = View(by_block, (blocks * count,))
    dfields = fields_view(optional.query_fields), fields_view(optional.key_fields)
    dbias = view(optional.bias)
    of_queries = structures.QueryGradients(
        view(dq), partials, NO_VIEW if by_key else dbias, dfields[0], by_density
    )
    of_keys = structures.KeyGradients(view(dk), view(dv), dbias if by_key else NO_VIEW, dfields[1], dpoints)
    with on_device(call.q):
        by_row = _start_backward(call, upstream, of_queries, of_keys, near)
    if optional.params is not None and by_block is not None:
        optional.params.add_(by_block.sum((0, 2))[:, : len(call.params)].T)
    if by_row is not None:  # after the kernels, which overwrite the gradients of fields
        for name, row in named_rows(optional.params, sorted(call.rule.params)):
            row += by_row(name).sum((0, 2))
        for name, row in named_rows(optional.query_fields, call.rule.symbols.query):
            row += by_row(name)
    gradients = Gradients.finished(call, dq, dk, dv, optional)
    return gradients.where_finite(call, ("query_fields", "key_fields"))


def warn_or_raise(call: Call, error: KernelError) -> None:
    """Warn that the tiled engine computes instead; raise the error if this engine was requested by name."""
    if call.strict:
        raise error
    warn_unavailable("triton", str(error))


def _start_backward(
    call: Call,
    upstream: Upstream,
    of_queries: structures.QueryGradients,
    of_keys: structures.KeyGradients,
    near: Near,
) -> Callable[[str], Tensor] | None:
    """Start the kernels that fill the gradients; return what :func:`_through_norm` does."""
    grad, common = view(upstream.grad_out.resolve_neg()), CallArguments(call, near)
    terms, factor = row_factor(attention_terms(call.formula, call.bias is not None or near.is_there))
    by_norm = _norm_names(terms) & {*terms.names, *terms.fields.query}
    needed = (
        terms.peak is not None,
        terms.mass is not None or factor.constant != 1,
        terms.mass is not None,
        bool(by_norm),
    )
    peak = upstream.rows.peak
    gradients = structures.RowGradients(*(view(torch.empty_like(peak) if need else None) for need in needed))
    rows = structures.KernelResults(
        view(upstream.rows.out), peak.contiguous(), upstream.rows.total.contiguous()
    )
    launch.start(common.prepare(rows, grad, gradients))
    if terms.mass is not None and not near.is_there:
        # The output of rows that see NaN or Inf is NaN, so their deltas are computed again.
        no_results = structures.KernelResults(view(None), None, None)
        launch.start(common.launch("forward", True, results=no_results, grad=grad, gradients=gradients))
    shared = {"grad": grad, "gradients": gradients}
    for exact in (False,) if near.is_there else (False, True):
        launch.start(common.launch("query_gradients", exact, **shared, outputs=of_queries))
        launch.start(common.launch("key_gradients", exact, **shared, outputs=of_keys))
    return _through_norm(terms, call, upstream.rows, gradients) if by_norm else None


def _norm_names(terms: Terms) -> frozenset[str]:
    """Return the symbols of norm and offset."""
    parts = [part for part in (terms.norm, terms.offset) if part is not None]
    return frozenset().union(*(part.symbols for part in parts))


def _through_norm(
    terms: Terms, call: Call, rows: Rows, gradients: structures.RowGradients
) -> Callable[[str], Tensor]:
    """Return a function for the gradients of parameters and query fields through norm and offset. By torch
    operations: rows are few compared to entries."""
    _, m = rows.live_peak()
    symbols = call.row_symbols() | {"m": m, "z": rows.total}
    return norm_gradients(terms, symbols, gradients.inverses.pointer, gradients.deltas.pointer)[1]
