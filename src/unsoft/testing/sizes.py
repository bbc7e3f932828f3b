"""Theme "sizes": at every size and in every state a mechanism agrees with its definition, with and without
a cache.

The definition is independent of all engines: plain torch from the paper (:mod:`unsoft.testing.definitions`),
or the text of a formula. Sizes and states are those of :mod:`unsoft.testing.grid`.

The tolerance comes from the definition with every input moved by a relative 2^-24 (float64: 2^-40): that
change, times the precision of the dtype, is what rounding may change too. A row of queries and a key are
moved as a whole, so that a logit that is exactly 0 stays 0. Added to it is the precision times the size of
the result and of the terms it is a sum of (docs/numerics.md).
"""

import copy
import math
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from unsoft.modules.definition import Definition, NotDefined, WrittenCall
from unsoft.modules.module import Mechanism
from unsoft.modules.spec import LayerSpec, MechanismSpec
from unsoft.testing.case import DOUBLE, Case, CaseInputs
from unsoft.testing.check import Results, titled
from unsoft.testing.grid import AXES, COMBINED, EVEN_KEY_HEADS, all_pairs, compared_rows, draw_exact, sample
from unsoft.testing.reference import seen_entries
from unsoft.testing.report import Measure, NotApplicable, Row, fact, rms, tested

GATE = 16.0
"""c in RMS(y - r) <= c eps size, with the sizes of :class:`ModuleCheck`."""
_HEADROOM = 0.1
"""Share of a dtype's range that an exact result may use for a finite one to be expected."""
_MOVES = {torch.float64: 2.0**-40, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-24}
"""How far inputs are moved: near the precision itself, since only small changes are proportional."""
_PERTURB = 0.1
"""Parameters are moved this far from their initial values, where one without effect could go unnoticed."""
_UNSUPPORTED = re.compile(r"argument '(attn_mask|is_causal|engine)'|arguments 'attn_mask'")
"""A ValueError with this text is no failure: the mechanism or engine does not support the call."""


def learnable(layer: Mechanism) -> dict[str, Tensor]:
    """Return the parameters that get a gradient."""
    return {name: p for name, p in layer.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class ModuleCheck:
    """A mechanism as a module at one case of the grid, with its reference and tolerances."""

    spec: MechanismSpec
    definition: Definition | None
    """If None, or where it is not defined, the mechanism itself is the reference: float64, no cache."""
    case: Case
    seed: str
    options: Mapping[str, Any]

    @cached_property
    def layer(self) -> Mechanism:
        """The mechanism in the dtype of the case."""
        sizes = LayerSpec(self.case.heads, self.case.width, self.case.value_width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = self.spec.build(sizes, **self.options)
        source = Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in learnable(layer).values():
                parameter.add_(torch.randn(parameter.shape, generator=source), alpha=_PERTURB)
        return layer.to(torch.bfloat16).to(self.case.dtype).eval()  # running means must not move

    @cached_property
    def inputs(self) -> CaseInputs:
        return draw_exact(self.case, self.seed, self.layer.query_heads)

    @cached_property
    def rows(self) -> Tensor:
        """The rows that are compared."""
        return compared_rows(self.case, self.seed)

    @property
    def scale(self) -> float | None:
        """The argument ``scale``: a power of two, so that logits stay exact; None if the default is one."""
        exact = 2.0 ** round(math.log2(self.case.width**-0.5))
        return None if exact == self.case.width**-0.5 else exact

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the call that are not tensors."""
        grouped = self.layer.query_heads != self.case.kv_heads
        return {"is_causal": self.case.causal, "enable_gqa": grouped, "scale": self.scale}

    def _call(self, layer: Mechanism, leaves: Mapping[str, Tensor], **options: Any) -> Tensor:
        """Return the whole output of a layer."""
        mask = leaves.get("mask", self.inputs.visible)
        q, k, v = (leaves[name] for name in ("query", "key", "value"))
        output: Tensor = layer(q, k, v, mask, **self.arguments | options)
        return output

    def run(self, engine: str = "auto") -> Results:
        """Return the mechanism's output, whole and at the compared rows, and all gradients."""
        leaves = self.inputs.copies(self.case.dtype)
        output = self._call(self.layer, leaves, engine=engine)
        grad_out = self.inputs.grad_out.to(output.dtype)
        rows = output.detach()[:, :, self.rows]
        gradients = self._gradients(output, leaves, self.layer, grad_out)
        return {"whole output": output.detach(), "output": rows, **gradients}

    def _gradients(
        self, output: Tensor, leaves: Mapping[str, Tensor], layer: Mechanism, grad_out: Tensor
    ) -> Results:
        """Return all gradients; those of queries at the compared rows, since they are 0 elsewhere."""
        wanted = {**leaves, **learnable(layer)}
        gradients = torch.autograd.grad(output, list(wanted.values()), grad_out, materialize_grads=True)
        results = dict(zip(wanted, gradients, strict=True))
        return results | {"query": results["query"][:, :, self.rows]}

    @cached_property
    def reference(self) -> Results:
        """Output and gradients of the definition."""
        return self._defined(None)

    def decoded(self, pieces: Sequence[tuple[int, int]]) -> Tensor | None:
        """Return the output of the definition when tokens come in pieces; None if it is undefined.

        Which keys are present (magnitude) is known from the rows of the piece that a key comes with: later
        rows are not there yet.
        """
        call = self.written(self.inputs.leaves)
        seen = seen_entries(self.inputs)
        there = torch.cat([seen[:, :, start:end, start:end].any(2) for start, end in pieces], dim=-1)
        if self.definition is None or bool((there == call.there).all()):
            return self.reference["output"]
        try:
            with torch.no_grad():
                return self.definition(call.change(there=there), copy.deepcopy(self._exact_layer))[1]
        except NotDefined:
            return None

    @cached_property
    def sizes(self) -> dict[str, float]:
        """The error that every result may have, in units of the precision."""
        moved = [self._defined(Generator().manual_seed(number)) for number in (2, 3)]
        natural = self._natural_sizes()
        sizes = {}
        for name, exact in self.reference.items():
            if name not in ("weights", "gradient of weights"):
                change = max(rms(other[name] - exact) for other in moved) / _MOVES[self.case.dtype]
                sizes[name] = change + rms(exact) + natural.get(name, natural["parameter"])
        return sizes

    def _natural_sizes(self) -> dict[str, float]:
        """Return the sizes of the terms that results are sums of, because a sum may cancel to 0."""
        leaves, weights, keys = self.inputs.leaves, self.reference["weights"], max(1, self.case.keys)
        q, k, v = (rms(leaves[name]) for name in ("query", "key", "value"))
        g = rms(self.inputs.grad_out[:, :, self.rows])
        scale, entries, w = self.case.width**-0.5, weights.numel(), rms(weights) + 1 / keys
        # The gradient of a weight, sum_c g_c v_c. Gradients of logits are differences of such sums, which
        # cancel where a weight is 1. A gate after the sum (gau's is unbounded) multiplies g.
        by_weight = max(g * v * self.case.value_width**0.5, rms(self.reference["gradient of weights"]))
        # Features of mechanisms other than formulas may be large where queries and keys are small.
        formula = self.spec.formula if self.spec.family is None and not self.spec.modifiers else None
        by_query, by_key = (0.0 if formula is not None else 1 + 1 / (size or 1.0) for size in (q, k))
        shared = max(1.0, entries / max(1, leaves["mask"].numel())) ** 0.5 if "mask" in leaves else 1.0
        # Positions may multiply a parameter.
        reach = keys if formula is None or {"i", "j"} & formula.uses else 1
        return {
            "output": v,
            "value": g,
            "query": by_weight * (scale * k + by_query),
            "key": by_weight * (scale * q + by_key),
            "mask": by_weight * w * shared,
            "parameter": by_weight * w * entries**0.5 * (1 + q + scale * q * k + reach),
        }

    @cached_property
    def _exact_layer(self) -> Mechanism:
        return copy.deepcopy(self.layer).to(DOUBLE)

    def _defined(self, source: Generator | None) -> Results:
        """Return the definition's results, exactly or with every input moved a little."""

        def moved(x: Tensor, *shape: int) -> Tensor:
            if source is None:
                return x
            noise = torch.randn(shape or x.shape, generator=source, dtype=DOUBLE)
            return x * (1 + _MOVES[self.case.dtype] * noise)

        leaves, layer = dict(self.inputs.leaves), copy.deepcopy(self._exact_layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(moved(parameter))
        for name in ("query", "key"):
            leaves[name] = moved(leaves[name], *leaves[name].shape[:3], 1)
        leaves["value"] = moved(leaves["value"])
        if (bias := leaves.get("mask")) is not None:
            leaves["mask"] = torch.where(bias.isinf(), bias, moved(bias.nan_to_num(neginf=0.0)))
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        grad_out = self.inputs.grad_out[:, :, self.rows]
        if min(self.case.batch, self.case.length, self.case.keys) == 0:
            weights = by_weight = grad_out.new_zeros(0)
            output = torch.zeros_like(grad_out)
            gradients = {
                name: torch.zeros_like(leaf) for name, leaf in {**leaves, **learnable(layer)}.items()
            }
            gradients["query"] = gradients["query"][:, :, self.rows]
        else:
            weights, output = self._written_out(leaves, layer, None if source is None else moved)
            upstream, by_weight = moved(grad_out), torch.zeros_like(weights)
            if weights.requires_grad:
                (by_weight,) = torch.autograd.grad(
                    output, weights, upstream, retain_graph=True, materialize_grads=True
                )
            gradients = self._gradients(output, leaves, layer, upstream)
        written = {"weights": weights.detach(), "gradient of weights": by_weight}
        return {"output": output.detach(), **written, **gradients}

    def _written_out(
        self, leaves: Mapping[str, Tensor], layer: Mechanism, rounding: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return weights and output at the compared rows."""
        try:
            if self.definition is not None:
                return self.definition(self.written(leaves).change(rounding=rounding), layer)
        except NotDefined:
            pass
        output = self._call(layer, leaves)[:, :, self.rows]
        keys = self.case.keys  # weights of a size that a sum over keys could have
        return torch.full((*output.shape[:3], keys), 1 / keys, dtype=DOUBLE), output

    def written(self, leaves: Mapping[str, Tensor]) -> WrittenCall:
        """Return the call at the compared rows, in the form that definitions take."""
        offset, rows = self.case.offset, self.rows
        seen, bias = seen_entries(self.inputs), torch.zeros((), dtype=DOUBLE)
        if "mask" in leaves:
            bias = leaves["mask"].masked_fill(leaves["mask"] == -torch.inf, 0.0)
        visible = seen if offset is None else seen.tril(offset)
        tensors = (leaves["query"][:, :, rows], leaves["key"], leaves["value"])
        masks = (visible[:, :, rows], bias.expand(seen.shape)[:, :, rows], seen.any(2))
        positions, scale = (rows + (offset or 0)).to(DOUBLE), self.scale or self.case.width**-0.5
        return WrittenCall(*tensors, *masks, positions, offset is not None, scale)

    def fits(self, reference: Tensor) -> bool:
        """Return True if the exact result is within the range of the dtype."""
        return bool((reference.abs() <= _HEADROOM * torch.finfo(self.case.dtype).max).all())

    def compare(self, name: str, result: Tensor, reference: Tensor, label: str) -> Iterator[Measure]:
        """Compare a result with its reference, unless that is too large for the dtype."""
        if not self.fits(reference):
            return
        yield fact(f"{label} is finite", bool(result.isfinite().all()))
        if self.case.inputs != "denormal":  # whose digits are lost already
            precision = torch.finfo(self.case.dtype)
            tolerance = GATE * precision.eps * self.sizes[name] + precision.smallest_normal
            yield Measure(label, rms(result.double() - reference), tolerance)


def _results(check: ModuleCheck, engine: str) -> Iterator[Measure]:
    """The output and every gradient agree with the definition."""
    case, results = check.case, check.run(engine)
    shape = (case.batch, case.heads, case.length, case.value_width)
    whole = results.pop("whole output")
    yield fact(f"output has shape {shape}, found {tuple(whole.shape)}", whole.shape == shape)
    yield fact(f"output has dtype {case.dtype}, found {whole.dtype}", whole.dtype == case.dtype)
    if check.fits(check.reference["output"]):
        yield fact("every row of the output is finite", bool(whole.isfinite().all()))
    for name, result in results.items():
        yield from check.compare(name, result, check.reference[name], titled(name))


def _decoding(check: ModuleCheck, engine: str) -> Iterator[Measure]:
    """With a cache, in uneven pieces, the output agrees with the definition of the whole sequence.

    A cache of fixed size does not support a mask that differs from row to row, but cannot tell it from
    padding if every piece is one token. So it gets the chance to raise on the whole first.
    """
    case, leaves = check.case, check.inputs.leaves
    if case.causal is not True or case.keys != case.length or case.length == 0:
        return  # a cache is filled from the first token on
    q, k, v = (leaves[name].to(case.dtype) for name in ("query", "key", "value"))
    mask = leaves["mask"].to(case.dtype) if "mask" in leaves else check.inputs.visible
    pieces = _pieces(case.length, f"{check.seed} {case}")
    options = {**check.arguments, "is_causal": False, "engine": engine}
    cache, parts = check.layer.new_cache(case.batch), []
    with torch.no_grad():
        if mask is not None and mask.shape[-2] > 1 and len(pieces) == case.length:
            check.layer(q, k, v, mask, cache=check.layer.new_cache(case.batch), **options)
        for start, end in pieces:
            part = mask
            if mask is not None:  # the rows of the new tokens and the keys so far
                part = (mask if mask.shape[-2] == 1 else mask[..., start:end, :])[..., :end]
            parts.append(check.layer(*(y[:, :, start:end] for y in (q, k, v)), part, cache=cache, **options))
    yield fact("the cache has seen every token", cache.length == case.length)
    yield fact("the cache counts its bytes", cache.nbytes > 0 or case.batch == 0)
    expected = check.decoded(pieces)
    if expected is not None:
        whole = torch.cat(parts, dim=2)[:, :, check.rows]
        yield from check.compare("output", whole, expected, "output with a cache")


def _pieces(length: int, seed: str) -> list[tuple[int, int]]:
    """Cut a sequence into pieces of any size, some of them one token."""
    source = random.Random(zlib.crc32(seed.encode()))
    cuts = {0, length, *(source.randrange(length + 1) for _ in range(3))}
    start = source.randrange(max(1, length - 2))
    cuts |= {min(length, start + step) for step in range(3)}
    ordered = sorted(cuts)
    return list(zip(ordered, ordered[1:], strict=False))


CHECKS: dict[str, Callable[[ModuleCheck, str], Iterator[Measure]]] = {
    "output and gradients = definition": _results,
    "decoding = definition": _decoding,
}


def module_checks(
    spec: MechanismSpec,
    definition: Definition | None,
    cases: tuple[Case, ...],
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> dict[str, list[ModuleCheck]]:
    """Return the checks of each name in :data:`CHECKS`; those of the same case share their reference."""
    by_name = {"output and gradients = definition": cases, "decoding = definition": _decodable(cases)}
    checks = {
        case: ModuleCheck(spec, definition, case, str(seed), options or {})
        for case in dict.fromkeys(case for chosen in by_name.values() for case in chosen)
    }
    return {name: [checks[case] for case in chosen] for name, chosen in by_name.items()}


def size_rows(
    checks: Mapping[str, Sequence[ModuleCheck]], engines: Sequence[str], *, every: bool
) -> list[Row]:
    """Return the rows of the theme "sizes".

    "auto" runs all cases; the other engines divide them among themselves, unless ``every`` is True.
    """
    others = [engine for engine in engines if engine != "auto" and not every]
    rows = []
    for name, all_of_them in checks.items():
        for engine in engines:
            mine = all_of_them
            if engine in others:
                mine = all_of_them[others.index(engine) :: len(others)]
            rows.append(tested("sizes", name, engine, size_measures(name, mine, engine)))
    return rows


def size_measures(name: str, checks: Sequence[ModuleCheck], engine: str) -> Iterator[Measure]:
    """Run one of :data:`CHECKS` at some cases; an exception is a failure of its case only."""
    applies = False
    for check in checks:
        try:
            for measure in CHECKS[name](check, engine):
                applies = True
                yield replace(measure, label=f"{check.case}: {measure.label}", case=str(check.case))
        except Exception as error:
            if not (isinstance(error, ValueError) and _UNSUPPORTED.search(str(error))):
                applies = True
                failure = fact(f"{check.case}: raised {type(error).__name__}: {error}", False)
                yield replace(failure, case=str(check.case))
    if not applies:
        raise NotApplicable("no case of the grid applies")


def _decodable(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return cases in which tokens come one after the other, some of them made so.

    In half of those the mask hides whole keys: caches of fixed size support no others.
    """
    chosen = [case for case in cases if case.causal is True and case.keys == case.length > 0]
    for number, case in enumerate(case for case in cases[len(COMBINED) :: 3] if case.length > 1):
        mask = case.mask if number % 2 else ("left padding", "none", "padding")[number // 2 % 3]
        chosen.append(replace(case, causal=True, keys=case.length, mask=mask))
    return tuple(dict.fromkeys(chosen))


def cases_for(
    spec: MechanismSpec, seed: int, *, quick: bool = False, thorough: bool = False
) -> tuple[Case, ...]:
    """Return a sample for a mechanism; quick: its small cases; thorough: every pair of values."""
    name, layer = spec.name, spec.build(LayerSpec(heads=2, head_dim=2))
    axes = AXES if all(part.key_head_multiple == 1 for part in layer.parts) else EVEN_KEY_HEADS
    if thorough:
        return (*COMBINED, *all_pairs(f"{seed} {name}", axes))
    return (*COMBINED, *(case for case in sample(f"{seed} {name}", axes) if not quick or _is_small(case)))


def _is_small(case: Case) -> bool:
    longest = max(case.length, case.keys)
    return longest <= 300 and longest * case.width <= 300 * 128
