"""The test suite for mechanisms that are modules: the same properties, tested through the module.

Computed in float64 with parameters moved away from their initial values, to detect parameters without effect.
The reference is the mechanism with its weights written out (``return_weights=True``), which
``tests/mechanisms`` compares with each paper's definition. It is compared with the fast form, decoding, masks
and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from unsoft.engines import engine_names
from unsoft.modules.spec import LayerSpec, MechanismSpec
from unsoft.testing.invariance import outside
from unsoft.testing.report import Measure, NotApplicable, Row, close, equal, fact, tested
from unsoft.testing.sizes import build_layer, learnable

HEADS, WIDTH, LENGTH, BATCH = 4, 6, 70, 2
_SLACK = 64.0
"""Sizes here are those of results, not of the terms they are sums of: this allows for cancellation."""

Tensors = tuple[Tensor, Tensor, Tensor]


class ModuleInputs:
    """A module with random inputs."""

    dtype = torch.float64

    def __init__(self, spec: MechanismSpec, seed: int, options: Mapping[str, Any]) -> None:
        self.generator, self.spec = torch.Generator().manual_seed(seed), spec
        self.module = build_layer(spec, LayerSpec(HEADS, WIDTH), options, seed).to(self.dtype)
        self.causal_only = self.module.causal_only

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.dtype)

    def inputs(self) -> Tensors:
        heads = (self.module.query_heads, HEADS, HEADS)
        q, k, v = (self.random(BATCH, h, LENGTH, WIDTH) for h in heads)
        return q, k, v

    def near(self, label: str, result: Tensor, reference: Tensor, terms: float = 0.0) -> Measure:
        """Compare a result; ``terms`` is the size of the terms of the reference, if larger than itself."""
        size = _SLACK * (reference.abs() + reference.square().mean().sqrt() + terms)
        return close(label, result.detach(), reference.detach(), size.detach(), self.dtype)


def _written_out(x: ModuleInputs) -> Iterator[Measure]:
    for alignment in (True,) if x.causal_only else (True, False):
        inputs = tuple(t.requires_grad_() for t in x.inputs())
        fast = x.module(*inputs, is_causal=alignment)
        written, weights = x.module(*inputs, is_causal=alignment, return_weights=True)
        yield x.near("output", fast, written)
        if alignment:
            yield equal("weights of the future", weights.detach().triu(1), 0.0)
        upstream = x.random(*fast.shape)
        variables = [*inputs, *learnable(x.module).values()]
        of_fast, of_written = (
            torch.autograd.grad(y, variables, upstream, allow_unused=True) for y in (fast, written)
        )
        # The gradient of a parameter is a sum over all tokens, of terms as large as the gradients of the
        # inputs.
        terms = sum(float(b.norm()) for b in of_written[: len(inputs)] if b is not None)
        for number, (a, b) in enumerate(zip(of_fast, of_written, strict=True)):
            yield fact("the same inputs have a gradient", (a is None) == (b is None))
            if a is not None and b is not None:
                yield x.near("gradient", a, b, terms if number >= len(inputs) else 0.0)


def _decoding(x: ModuleInputs) -> Iterator[Measure]:
    q, k, v = x.inputs()
    whole = x.module(q, k, v, is_causal=True)
    for cuts in ([0, 1, 2, LENGTH], [0, 33, 34, 35, LENGTH], list(range(0, LENGTH + 1, 7))):
        cache = x.module.new_cache(BATCH)
        with torch.no_grad():
            pieces = [
                x.module(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], cache=cache)
                for a, b in zip(cuts, cuts[1:], strict=False)
            ]
        yield x.near("decoding in pieces", torch.cat(pieces, dim=2), whole)
        yield fact("the cache has seen every token", cache.length == LENGTH and cache.nbytes > 0)


def _future(x: ModuleInputs) -> Iterator[Measure]:
    q, k, v = x.inputs()
    before = x.module(q, k, v, is_causal=True).detach()
    for t in (q, k, v):
        t[:, :, 40:] = 3 * x.random(*t[:, :, 40:].shape)
    after = x.module(q, k, v, is_causal=True).detach()
    yield equal("rows before a change", after[:, :, :40], before[:, :, :40])
    yield fact("rows after it change", not torch.equal(after[:, :, 40:], before[:, :, 40:]))


def _masked(x: ModuleInputs) -> Iterator[Measure]:
    q, k, v = x.inputs()
    options: dict[str, Any] = {"is_causal": True} if x.causal_only else {}
    expected = x.module(q, k[:, :, :60], v[:, :, :60], **options)
    mask = torch.arange(LENGTH).expand(BATCH, 1, 1, LENGTH) < 60
    k[:, :, 60:], v[:, :, 60:] = torch.nan, torch.inf
    yield x.near("keys masked, holding NaN", x.module(q, k, v, mask, **options), expected)
    nothing = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    q, k, v = (t.requires_grad_() for t in x.inputs())
    out = x.module(q, k, v, nothing, is_causal=True)
    yield equal("rows that see nothing", out.detach(), 0.0)
    (gradient,) = torch.autograd.grad(out.sum(), (v,))
    yield equal("their gradient", gradient, 0.0)


def _precision(x: ModuleInputs) -> Iterator[Measure]:
    q, k, v = x.inputs()
    exact = x.module(q, k, v, is_causal=True)
    for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        narrow = x.module(*(t.to(dtype) for t in (q, k, v)), is_causal=True)
        yield fact(f"{dtype} comes back", narrow.dtype == dtype)
        off = (narrow.detach().double() - exact.detach()).norm() / exact.detach().norm()
        yield Measure(f"{dtype}", float(off), allowed)


def _equivariance(x: ModuleInputs) -> Iterator[Measure]:
    q, k, v = x.inputs()
    out = x.module(q, k, v, is_causal=True)
    yield x.near("one sequence alone", x.module(q[1:], k[1:], v[1:], is_causal=True), out[1:])
    yield equal("again", x.module(q, k, v, is_causal=True).detach(), out.detach())


def _engines(x: ModuleInputs) -> Iterator[Measure]:
    """``engine=`` has an effect: unknown engines and those that do not support the mechanism raise."""
    q, k, v = x.inputs()
    with torch.no_grad():
        expected = x.module(q, k, v, is_causal=True)
        yield fact("an unknown engine raises ValueError", _output_of(x, (q, k, v), "no such engine") is None)
        for name in engine_names():
            output = _output_of(x, (q, k, v), name)
            if output is not None:
                yield x.near(f"engine={name!r}", output, expected)
        if not x.module.formulas:
            yield fact(
                "engine='sdpa', which computes softmax, raises ValueError",
                _output_of(x, (q, k, v), "sdpa") is None,
            )


def _output_of(x: ModuleInputs, tensors: Tensors, engine: str) -> Tensor | None:
    """Return the output, or None if a ValueError that names the argument says the engine is unsupported."""
    try:
        return cast(Tensor, x.module(*tensors, is_causal=True, engine=engine))
    except ValueError as error:
        if "engine" not in str(error):
            raise
        return None


def _promises(x: ModuleInputs) -> Iterator[Measure]:
    """The weights have the sums, signs and exact zeros that the list of mechanisms states."""
    promised = x.spec.properties
    if x.spec.modifiers:
        raise NotApplicable("the list describes the mechanism inside, before it is wrapped")
    q, k, v = x.inputs()
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(0 if x.module.sees_itself else -1)
    allowed = 64 * torch.finfo(x.dtype).eps * LENGTH**0.5
    for size in (1.0, 4.0):
        _, weights = x.module(size * q, size * k, v, is_causal=True, return_weights=True)
        weights = weights.detach()
        alive = weights.abs().sum(-1) > 0
        for what, interval, total in (
            ("sum", promised.row_sum, weights.sum(-1)),
            ("sum of absolute values", promised.l1, weights.abs().sum(-1)),
        ):
            low, high = (
                torch.as_tensor(bound, dtype=x.dtype).expand(alive.shape)[alive]
                for bound in (interval.of_module(x.module) if interval.of_module else interval.ends(LENGTH))
            )
            yield Measure(f"the {what} of a row is {interval}", outside(total[alive], low, high), allowed)
        if not promised.signed:
            yield fact("there are no negative weights", bool((weights >= 0).all()))
        if size == 1.0:  # larger logits may underflow
            zeros = bool(((weights == 0) & seen & alive[..., None]).any())
            what = f"there are {'' if promised.sparse else 'no '}weights that are exactly 0"
            yield fact(what, zeros == promised.sparse)


PROPERTIES: dict[str, tuple[str, Callable[[ModuleInputs], Iterator[Measure]]]] = {
    "parity": ("fast form = weights written out", _written_out),
    "decoding": ("pieces = whole", _decoding),
    "causality": ("the future", _future),
    "masking": ("masked = removed, dead rows", _masked),
    "dtypes": ("float32, bfloat16", _precision),
    "equivariance": ("batch, determinism", _equivariance),
    "engines": ("used or unsupported", _engines),
    "promises": ("row sums, signs, zeros", _promises),
}
FAMILY_THEMES = [*PROPERTIES, "sizes"]
"""The themes that :func:`unsoft.testing.check_mechanism` has for modules."""


def check_family(
    spec: MechanismSpec,
    seed: int,
    options: Mapping[str, Any] | None = None,
    themes: Sequence[str] = FAMILY_THEMES,
) -> list[Row]:
    """Run the test suite for a mechanism that is a module, without its theme "sizes"."""

    def measures(function: Callable[[ModuleInputs], Iterator[Measure]]) -> Iterator[Measure]:
        yield from function(ModuleInputs(spec, seed, options or {}))

    return [
        tested(theme, promise, "module", measures(function))
        for theme, (promise, function) in PROPERTIES.items()
        if theme in themes
    ]
