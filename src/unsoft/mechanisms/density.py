"""density: every key divided by the number of its near-duplicates in the row, so that a crowd counts as one.

    a_ij = f(s_ij) rho_ij^-p / norm,        rho_ij = sum over visible l of exp(-t |k_j - k_l|^2 / d)

rho_ij is the kernel density of key j among the keys that row i sees, itself included: 1 for a key without
near-duplicates, m for one of m clones. The factor multiplies weight and mass, as a float mask of
-p log rho_ij does: m clones count as m^(1 - p). Every head learns p in (0, 1), by a sigmoid, and t > 0. Heads
that share a key head use the geometric mean of their t.

Derivation: diffusion maps (Coifman and Lafon 2006, Applied and Computational Harmonic Analysis 21) divide a
kernel by the density of both points to the power alpha, before rows are normalised, so that the result does
not depend on how densely each region was sampled. The density of the query cancels in the row; alpha is p.
The opposite is the proportional attention of token merging (Bolya et al., arXiv 2210.09461), which *adds* the
logarithm of a token's size, so that one counts as many.

Stands around any mechanism with a normaliser: "density+cog", "density+linear-relu"; "density" alone is
"density+softmax".

Strengths: the number of clones does not count as relevance, however large it is: with p = 0.99, 50 clones
count as 1.04 and 1000 as 1.07. A row counts the keys that it sees, so causal attention corrects for clones
that come later, without a solver: a new key costs O(n), and the cache holds one number for each key.
Limitations: one more product of keys with keys, O(n^2), and three more with gradients; with a window twice as
many, of the keys in it. It cannot know which member of a crowd matters, and repetition that carries
information is lost as p approaches 1. p is bounded because an unbounded power grows beyond 1 in training and
then suppresses everything frequent. Masks must hide a key from all rows or from none; ``is_causal`` and
``window`` hide others besides, which then do not count in that row. Rotary embedding makes distances depend
on positions: :func:`unsoft.hf.swap` compares keys before rotation; in a model of your own, pass those as
``geometry_keys``.

Compiled code computes densities beside the logits, around any formula (engines/native/density.py on the CPU,
engines/triton/density.py on GPUs, where windows are not supported). Everything else uses torch operations on
a block of rows at a time: ``torch.compile``, mechanisms inside that are no formula, returned weights, caches
with gradients or on GPUs. With a window these operations write out the densities of all rows.

``t`` starts at 8, at which the density of 1000 standard normal keys of width 64 is 1.002: keys that differ
are left alone. ``start="plain"`` is p = 1/2; ``start="open"`` is p = 0.0001, for pretrained models.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("density+cog", heads=2, head_dim=4)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> layer(q, k, v, is_causal=True).shape
torch.Size([1, 2, 6, 4])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from unsoft.checks import one_of, positive
from unsoft.engines.arguments import with_leading
from unsoft.engines.call import Call, compute_dtype
from unsoft.engines.native.density import (
    DensityStep,
    KeyDensities,
    NotFinite,
    density_attention,
    density_failure,
    watched,
)
from unsoft.engines.triton import density as gpu
from unsoft.formula import ONE, Formula, Properties
from unsoft.magnitude.gaussian import full_precision, gaussian
from unsoft.magnitude.points import Points
from unsoft.modules.cache import Cache, KeyValueCache, of_kind
from unsoft.modules.definition import Defined, Definition, Layer, WrittenCall
from unsoft.modules.key_gates import (
    ROWS,
    KeyGate,
    MassGate,
    RowWeights,
    attend_by_rows,
    check_transforms,
    key_points,
    key_scale,
    seen_by_some_row,
)
from unsoft.modules.module import Derived, Inputs, Mechanism, Result, joined_masks, key_padding
from unsoft.modules.pointwise import Pointwise
from unsoft.modules.registry import family, modifier

STARTS = {"plain": 0.0, "open": -9.0}
"""The logit of p."""


class Density(KeyGate):
    """See the module's docstring."""

    needs_all_keys = True
    inner: MassGate

    def __init__(self, inner: Mechanism, *, t: float = 8.0, start: str = "plain") -> None:
        super().__init__(inner)
        one_of("density", "start", start, STARTS)
        # Its own fields, or values of another layer, are not those of a block of rows.
        parts = [part for part in inner.parts if isinstance(part, Pointwise)]
        self._by_rows = not any(part.formula.fields or part.source is not None for part in parts)
        self._by_rows &= not any(part.needs_first_value for part in inner.parts)
        self._paired = max(part.key_head_multiple for part in inner.parts)
        self.inner, self.takes_window = MassGate(inner), inner.takes_window
        heads = inner.layer_spec.heads
        self.log_t = nn.Parameter(torch.full((heads,), math.log(positive("density", "t", t))))
        self.logit_p = nn.Parameter(torch.full((heads,), STARTS[start]))
        self._constants = Derived()

    def _structured(self, inputs: Inputs, given: Mapping[str, Any]) -> Inputs:
        lengths = given["key_lengths"]
        if lengths is not None:  # a mask of whole keys, so that spans are those of a window only
            mask = key_padding(inputs.query, inputs.key, lengths)
            inputs = inputs.with_options(attn_mask=joined_masks(inputs.options["attn_mask"], mask))
        return super()._structured(inputs, {**given, "key_lengths": None})

    @torch.no_grad()
    def open_start(self) -> None:
        """Set p = sigmoid(-9) = 0.0001: a factor of 0.999 for one of 1000 clones."""
        self.logit_p.fill_(STARTS["open"])

    @torch.no_grad()
    def set_density(self, *, p: float, t: float) -> None:
        """Set the power p, between 0 and 1, and the scale t of squared distances."""
        self.logit_p.fill_(math.log(p / (1 - p)))
        self.log_t.fill_(math.log(t))

    @property
    def clone_theory(self) -> dict[str, Any] | None:
        """Keywords of :func:`unsoft.theory.density_hijack` if that predicts how much attention clones of a
        key get; otherwise None."""
        base = self.inner.inner
        if not isinstance(base, Pointwise) or base.uses_positions:
            return None
        return {"base": base.formula, "p": self.logit_p[0].sigmoid().item()}

    def gate(self, weights: Tensor) -> Tensor:
        return self.log_gate(weights).exp()

    def log_gate(self, weights: Tensor) -> Tensor:
        """Return -p log(rho) of densities (batch, key heads, ...) for every head."""
        # The density of a key that counts is at least 1, since it counts itself. It is 0 for a masked key and
        # may be 0 after the row: the logarithm does not matter there, but would make the gradient NaN.
        log = torch.where(weights > 0.5, weights, 1.0).log()
        every = self.layer_spec.heads // log.shape[1]
        if every > 1:  # heads, or pairs of them, that share keys
            log = log.unflatten(1, (-1, self._paired)).repeat_interleave(every, dim=1).flatten(1, 2)
        p = self.logit_p.to(log.dtype).sigmoid()
        return -p.view(-1, *(1,) * (log.dim() - 2)) * log

    def attend(self, inputs: Inputs) -> Result:
        self._check(inputs)
        fused = self._fused(inputs)
        if fused is not None:
            return fused[0]
        call = self.checked_call(inputs)
        points = key_points(call, inputs, self.log_t)
        if 0 in points.x.shape[:2] or call.q.numel() == 0:  # no keys, or no queries
            return self.inner.attend(inputs)
        densities = Densities(points.x, points.present, inputs.options["engine"])
        window = _window(call, inputs)
        if window is not None:
            return self._at_once(inputs, densities.in_window(window, inputs.query.shape[-2]))
        if call.causal_offset is None:
            every = densities.before(points.x.shape[1])
            return self._at_once(inputs, every[:, None])
        if self._by_rows:
            return attend_by_rows(self, inputs, densities, None, call.causal_offset)[0]
        return self._at_once(inputs, densities.table(None, inputs.query.shape[-2], call.causal_offset))

    @property
    def _formula_inside(self) -> Pointwise | None:
        """The mechanism inside, if it does nothing but run a formula."""
        base = self.inner.inner
        return base if isinstance(base, Pointwise) and type(base).attend is Pointwise.attend else None

    def _fused(
        self, inputs: Inputs, points: Points | None = None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the output by compiled code, and the densities (systems, keys) in its last row; None if the
        call needs torch operations. ``points``: those of all keys, and ``before``: densities among the keys
        before the first row; by default both are computed."""
        base, engine = self._formula_inside, inputs.options["engine"]
        if base is None or engine not in ("auto", "native", "triton") or inputs.return_weights or watched():
            return None
        narrowed = inputs.as_autocast()
        call, leading = base.checked(narrowed)
        if call.is_empty or call.q.shape[1] != len(self.logit_p):
            return None
        on_gpu = engine == "triton" or not call.q.is_cpu
        if (engine == "native") if on_gpu else (density_failure(call) is not None):
            return None
        call = call if engine == "auto" else replace(call, strict=True)
        if points is None:  # of the keys as they are, whatever autocast makes of them
            exact = call if narrowed.key is inputs.key else self.checked_call(inputs)
            points = full_precision(key_points)(exact, inputs, self.log_t)
        try:
            out, last = self._by_kernel(call, points, before, _window(call, inputs), on_gpu=on_gpu)
        except NotFinite:
            return None
        return with_leading(out, leading), last.flatten(0, 1)

    @full_precision
    def _by_kernel(
        self,
        call: Call,
        points: Points,
        before: Tensor | None,
        window: tuple[int, int] | None,
        *,
        on_gpu: bool,
    ) -> tuple[Tensor, Tensor]:
        present = None if points.present is None else points.shaped(points.present)
        seen = seen_by_some_row(call)
        if seen is not None:  # keys that no row sees may be NaN
            k, v = (torch.where(seen[..., None], x, 0.0) for x in (call.k, call.v))
            call = replace(call, k=k, v=v)
        p = self.logit_p.to(points.x.dtype).sigmoid()
        before = None if before is None else points.shaped(before)
        densities = KeyDensities(points.shaped(points.x), present, p, before, window)
        if not on_gpu:
            return density_attention(call, densities)
        if gpu.density_unsupported(call, densities) is not None:
            raise NotFinite
        return gpu.density_attention(call, densities)

    def _check(self, inputs: Inputs) -> None:
        check_transforms("density")
        engine = inputs.options["engine"]
        if self.inner.by_column and engine not in ("auto", "dense"):
            raise ValueError(
                "density: argument 'engine': around linear attention the weights of every row are written"
                f" out, as 'dense' does; {engine!r} does not"
            )
        if engine == "triton" and "window" in inputs.options:
            raise ValueError(
                "density: argument 'window': the kernels of engine 'triton' count all keys before a row; use"
                " engine='auto', which computes densities in a window by torch operations"
            )

    def _at_once(self, inputs: Inputs, table: Tensor, cache: Cache | None = None) -> Result:
        """Attend with the densities (systems, rows or 1, keys) of all rows in one call."""
        *leading, heads, _, _ = inputs.key.shape
        log = self.log_gate(table.reshape(-1, heads, *table.shape[1:]))
        return self.inner.attend_log(inputs, log.reshape(*leading, -1, *table.shape[1:]), cache)

    def new_cache(self, batch: int) -> Cache:
        inner = self.inner.new_cache(batch)
        return DensityCache(batch, inner if inner.keeps_keys else KeyValueCache(batch))

    def prepared_step(self, inputs: Inputs, cache: Cache) -> Tensor | None:
        base, cache = self._formula_inside, of_kind(DensityCache, cache)
        if base is None or not base.prepares_steps or self._needs_gradient(inputs):
            return None
        return cache.step_by(base.formula, inputs, lambda key: self._constants.get(*self._computed(key)))

    def _computed(self, key: Tensor) -> tuple[Any, ...]:
        """Return the arguments of :meth:`Derived.get` for t / d of every key head and p of every head."""
        _, heads, _, width = key.shape
        dtype = compute_dtype(key.dtype)

        def constants() -> tuple[Tensor, Tensor]:
            squared = key_scale(self.log_t.detach(), heads, width, dtype).flatten().square()
            return squared.contiguous(), self.logit_p.detach().to(dtype).sigmoid()

        return constants, (heads, width, dtype), self.log_t, self.logit_p

    def _needs_gradient(self, inputs: Inputs) -> bool:
        tensors = (inputs.query, inputs.key, inputs.value, inputs.geometry_keys, *self.parameters())
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        cache = of_kind(DensityCache, cache)
        self._check(inputs)
        cache.check(inputs.key)
        if "window" in inputs.options:  # no plain step for other mechanisms
            others = {name: x for name, x in inputs.options.items() if name != "window"}
            out = self.prepared_step(inputs, cache) if inputs.change(options=others).is_plain else None
            if out is not None:
                return out
        points = cache.all_points(self.new_points(inputs, cache.length), inputs, self.log_t)
        rows, keys = inputs.query.shape[-2], points.x.shape[1]
        densities = Densities(points.x, points.present, inputs.options["engine"])
        # The last row is the one before the first new key, unless there are other queries than keys. It must
        # have seen the same keys as it would in the window of this call.
        left = (inputs.options.get("window") or (None, None))[0]
        same = rows == inputs.key.shape[-2] and cache.first == first_seen(keys - rows - 1, left)
        before = cache.densities.flatten(0, 1) if same and cache.densities is not None else None
        if points.x.numel() == 0 or inputs.query.numel() == 0:
            last = densities.before(keys)
            if self.inner.by_column:
                result = self.inner.attend(self.with_cached_tokens(inputs, cache.inner))
            else:
                result = self.inner.inner.decode(inputs, cache.inner)
        else:
            whole = fused = None
            if self.inner.by_column or (self._formula_inside is not None and self._by_rows):
                whole = self.with_cached_tokens(inputs, cache.inner)
                fused = None if self._needs_gradient(whole) else self._fused(whole, points, before)
            before = None if before is None else before.to(points.x.dtype)
            if fused is not None:
                result, last = fused
            elif whole is not None and "window" not in inputs.options:
                result, last = attend_by_rows(self, whole, densities, before, keys - rows)
            else:
                table, last = densities.of_last_rows(before, rows, inputs.options.get("window"))
                if whole is None:
                    result = self._at_once(inputs, table, cache.inner)
                else:
                    result = self._at_once(whole, table)
        # Keys that leave a window take away what they added: in float32 a crowd would leave its rounding.
        last = last.double() if last.is_cpu else last.to(points.x.dtype)
        cache.advance(points.shaped(last), inputs, points.present is None, first_seen(keys - 1, left))
        return result

    def extra_repr(self) -> str:
        p, t = self.logit_p.detach().sigmoid(), self.log_t.detach().exp()
        return f"p={p.mean():.3g}, t={t.mean():.3g}"


def first_seen(own: int, left: int | None) -> int:
    """Return the first key that a causal row with this key of its own sees, in a window to the left."""
    return 0 if left is None else max(own - left, 0)


def _window(call: Call, inputs: Inputs) -> tuple[int, int] | None:
    """Return (a, b) if row i of a call sees the keys i + a to i + b; None without a window."""
    if call.spans is None:
        return None
    rows, keys, (left, right) = call.q.shape[2], call.k.shape[2], inputs.options["window"]
    own = keys - rows if call.causal_offset is None else call.causal_offset
    if call.causal_offset is not None:
        right = 0
    # No limit: so far away that no row reaches it.
    return (-rows - keys if left is None else own - left, rows + keys if right is None else own + right)


class Densities(RowWeights):
    """The densities of keys in the prefix of every row."""

    def __init__(self, x: Tensor, present: Tensor | None, engine: str) -> None:
        self.x, self.present, self.engine = x, present, engine

    def before(self, keys: int) -> Tensor:
        n = self.x.shape[1]
        if keys <= 0:
            return self.x.new_zeros(self.x.shape[:2])
        blocks = [(low, min(low + ROWS, keys)) for low in range(0, keys, ROWS)]
        run: Any = self._sum
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            run = partial(checkpoint, self._sum, use_reentrant=False)  # computed again in the backward pass
        sums = [run(low, high, keys) for low, high in blocks]
        return pad(torch.cat(sums, dim=1), (0, n - keys))

    def _sum(self, low: int, high: int, keys: int) -> Tensor:
        return self._similar(slice(low, high), slice(keys)).sum(-1)

    def block(self, first: int, seen: int, carry: Tensor) -> Tensor:
        similar = self._similar(slice(first, seen), slice(seen))
        # New keys among those before the block, in which the others have the densities carried.
        start = torch.cat([carry[:, :first], similar[:, :, :first].sum(-1)], dim=1)
        # A product with a triangle: cumsum along the rows takes longer, above all its gradient.
        return start[:, None] + similar.new_ones(seen - first, seen - first).tril() @ similar

    def table(self, before: Tensor | None, rows: int, offset: int) -> Tensor:
        """Return densities (systems, rows, keys): row i has those of the first i + offset + 1 keys."""
        keys = self.x.shape[1]
        first, seen = min(max(offset, 0), keys), min(max(rows + offset, 0), keys)
        carry = self.before(first) if before is None else pad(before, (0, keys - before.shape[1]))
        parts = [carry[:, None].expand(-1, max(min(-offset, rows), 0), -1)]  # rows before the first key
        for low in range(first, seen, ROWS):
            high = min(low + ROWS, seen)
            part = pad(self.block(low, high, carry), (0, keys - high))
            parts, carry = [*parts, part], part[:, -1]
        done = sum(part.shape[1] for part in parts)
        return torch.cat([*parts, carry[:, None].expand(-1, rows - done, -1)], dim=1)

    def in_window(self, window: tuple[int, int], rows: int) -> Tensor:
        """Return densities (systems, rows, keys): row i has those of the keys i + a to i + b in a window (a,
        b). Nothing is taken away from a sum here, which would leave its rounding."""
        keys, parts, (a, b) = self.x.shape[1], [], window
        for low in range(0, rows, ROWS):
            high = min(low + ROWS, rows)
            part = slice(*(min(max(end, 0), keys) for end in (low + a, high + b)))
            i, j = (
                torch.arange(*ends, device=self.x.device) for ends in ((low, high), (part.start, part.stop))
            )
            seen = (j >= i[:, None] + a) & (j <= i[:, None] + b)
            table = seen.to(self.x.dtype) @ self._similar(part, part)
            parts.append(pad(table, (part.start, keys - part.stop)))
        return torch.cat(parts, dim=1)

    def of_last_rows(
        self, before: Tensor | None, rows: int, window: tuple[int | None, Any] | None
    ) -> tuple[Tensor, Tensor]:
        """Return those of the last, causal rows, and what to go on with: densities in the last row, and 1
        for keys before its window that are not masked."""
        keys, own = self.x.shape[1], self.x.shape[1] - rows
        if window is None:
            table = self.table(before, rows, own)
            return table, table[:, -1]
        left = window[0]
        table = self.in_window((-rows - keys if left is None else own - left, own), rows)
        left_behind = torch.arange(keys, device=table.device) < first_seen(keys - 1, left)
        there = table.new_ones(table[:, -1].shape) if self.present is None else self.present.to(table.dtype)
        return table, torch.where(left_behind, there, table[:, -1])

    def padded(self, more: int) -> Densities:
        x, present = pad(self.x, (0, 0, 0, more)), self.present
        if present is None:
            present = torch.ones(self.x.shape[:2], dtype=torch.bool, device=x.device)
        return Densities(x, pad(present, (0, more)), self.engine)

    @full_precision
    def _similar(self, new: slice, others: slice) -> Tensor:
        """Return the similarities of some keys to others; absent keys are similar to none."""
        engine = "torch" if torch.compiler.is_compiling() else self.engine
        similar = gaussian(self.x[:, new], self.x[:, others], engine)
        if self.present is None:
            return similar
        return similar * (self.present[:, new, None] & self.present[:, None, others])


class DensityCache(Cache):
    """The cache of the mechanism inside, and the density of every key in the last row that saw it; 0 for keys
    that are masked. Distances are those of the keys in the cache, or of ``geometry_keys``, which it keeps
    then.
    """

    held = ("densities",)

    def __init__(self, batch: int, inner: Cache) -> None:
        super().__init__(batch)
        self.inner = inner
        self.densities: Tensor | None = None
        """(batch, key heads, length), in float64 on the CPU"""
        self.first = 0
        """The first key that the last row saw: those before have left the window."""
        self.geometry: KeyValueCache | None = None
        self.all_present = True
        self.step: DensityStep | None = None
        """The last step of decoding, prepared to be repeated."""

    @property
    def parts(self) -> tuple[Cache, ...]:
        return (self.inner,) if self.geometry is None else (self.inner, self.geometry)

    @property
    def keeps_keys(self) -> bool:
        return True

    def all_points(self, new: Points, inputs: Inputs, log_t: Tensor) -> Points:
        """Return the points of all keys: those in the cache, and the new ones."""
        if self.densities is None or not self.length:
            return new
        if (self.geometry is None) != (inputs.geometry_keys is None):
            raise ValueError(
                "argument 'geometry_keys' must be given in every step of a cache, or in none; this cache was"
                f" filled {'without' if self.geometry is None else 'with'} it"
            )
        holder = self.inner if self.geometry is None else self.geometry
        keys = of_kind(KeyValueCache, holder).keys_and_values()[0].to(new.x.dtype)
        present = None
        if not self.all_present or new.present is not None:
            earlier, there = (self.densities > 0).flatten(0, 1), new.present
            keys = torch.where(earlier.view(keys.shape[:3])[..., None], keys, 0.0)
            there = earlier.new_ones(new.x.shape[:2]) if there is None else there
            present = torch.cat([earlier, there], dim=1)
        scale = key_scale(log_t, keys.shape[1], keys.shape[-1], keys.dtype)
        return Points(torch.cat([(keys * scale).flatten(0, 1), new.x], dim=1), present, new.leading)

    def step_by(
        self, formula: Formula, inputs: Inputs, constants: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Append one token and attend by one call of compiled code; None, with nothing appended, if it
        cannot. ``constants`` returns those of :meth:`DensityStep.run` for the points given."""
        points, inner, before = inputs.geometry_keys, self.inner, self.densities
        usual = type(inner) is KeyValueCache and self.all_present and before is not None and self.length > 0
        if not usual or (self.geometry is None) != (points is None):
            return None
        assert isinstance(inner, KeyValueCache) and before is not None
        if points is not None and points.shape != (*inputs.key.shape[:3], points.shape[-1]):
            return None
        first = self._first_of_step(formula, inputs)
        if first is None:
            return None
        tokens = inputs.tensors
        options = inputs.options["scale"], inputs.options["enable_gqa"]
        geometry = None if self.geometry is None else self.geometry.buffers[0]
        step = self.step
        if step is None or not step.serves(formula, inner.buffers, options, geometry):
            step = self.step = DensityStep.prepare(tokens, formula, options, inner.buffers, geometry)
            if step is None:
                return None
        window = first, self.first if first > self.first else None
        result = step.run(tokens, points, before, constants(inputs.key if points is None else points), window)
        if result is None:
            self.step = None  # inputs of another shape, or a full buffer
            return None
        (out, self.densities), self.first = result, first
        self.length = inner.length = self.length + 1
        if self.geometry is not None:
            self.geometry.length = self.length
        return out

    def _first_of_step(self, formula: Formula, inputs: Inputs) -> int | None:
        """Return the first key that a new token sees; None if a prepared step cannot go on to its row."""
        left = None
        if "window" in inputs.options:
            window = inputs.options["window"]
            usual = isinstance(window, (tuple, list)) and len(window) == 2
            if not usual or not all(x is None or (type(x) is int and x >= 0) for x in window):
                return None  # the general path raises
            left = window[0]
        first = first_seen(self.length, left)
        if first and formula.uses & {"i", "j"}:  # a step sees the keys from the first on, as if it were 0
            return None
        return first if first - self.first in (0, 1) else None

    def advance(self, densities: Tensor, inputs: Inputs, all_present: bool, first: int) -> None:
        """Store the densities of all keys, once the mechanism inside has appended the new ones."""
        if inputs.geometry_keys is not None:
            if self.geometry is None:
                self.geometry = KeyValueCache(self.batch)
            self.geometry.append(inputs.geometry_keys, inputs.geometry_keys[..., :0])
        # A new tensor: a snapshot keeps the old one.
        self.densities, self.all_present, self.first = densities, all_present, first
        self.length = densities.shape[-1]


def definition(inner: Definition) -> Definition:
    """The inner mechanism with the float mask -p log(rho_ij), which multiplies weight and mass."""

    def density(call: WrittenCall, layer: Layer) -> Defined:
        batch, heads, keys, width = call.key.shape
        t = layer.log_t.reshape(heads, -1).mean(-1).exp()[:, None, None]
        lengths = call.key.square().sum(-1)
        squares = lengths[..., :, None] + lengths[..., None, :] - 2 * call.key @ call.key.mT
        similar = call.move((-t / width * squares).exp())
        there = call.there.reshape(batch, heads, -1, keys).any(2)[:, :, None]
        counted = there & (torch.arange(keys) <= call.rows[:, None]) if call.causal else there
        rho = torch.where(there, counted.to(similar.dtype) @ similar, 1.0)
        pair = max(part.key_head_multiple for part in layer.parts)  # neighbours that are repeated together
        rho = (
            rho.unflatten(1, (-1, pair)).repeat_interleave(call.query.shape[1] // heads, dim=1).flatten(1, 2)
        )
        every = call.query.shape[1] // len(layer.logit_p)
        p = layer.logit_p.sigmoid().repeat_interleave(every)[:, None, None]
        log = torch.where(call.visible, rho, 1.0).log()
        return inner(call.change(bias=call.bias - p * log, strength=True), layer.inner.inner)

    return density


_SUMMARY = "every key divided by the number of its near-duplicates in the row: a crowd counts as one"
family(
    "density",
    lambda layer_spec, base, **options: Density(Pointwise(base, layer_spec), **options),
    summary=_SUMMARY,
    paper="after Coifman and Lafon 2006",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE),
    base="softmax",
    takes=Density,
)
modifier("density", Density, summary=_SUMMARY, definition=definition)
