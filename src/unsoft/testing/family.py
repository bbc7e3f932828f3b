"""The test suite for mechanisms that are modules: the same properties, tested through the module.

Computed in float64 with parameters moved away from their initial values, to detect parameters without effect.
The reference is the mechanism with its weights written out (``return_weights=True``), which
``tests/mechanisms`` compares with each paper's definition. It is compared with the fast form, decoding, masks
and gradients.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from unsoft.engines import engine_names
from unsoft.modules.spec import MechanismSpec
from unsoft.testing.case import DOUBLE, Case
from unsoft.testing.invariance import outside
from unsoft.testing.report import Measure, NotApplicable, Row, close, equal, fact, tested
from unsoft.testing.sizes import ModuleCheck, learnable, size_measures

_CASE = Case(70, 70, 6, 6, batch=2, heads=4, kv_heads=4, causal=True)
_SLACK = 64.0
"""Sizes here are those of results, not of the terms they are sums of: this allows for cancellation."""

Tensors = tuple[Tensor, Tensor, Tensor]


def _draw(x: ModuleCheck) -> Tensors:
    """Return random queries, keys and values of the case; other numbers than those of the theme "sizes"."""
    heads = (x.layer.query_heads, x.case.kv_heads, x.case.kv_heads)
    shapes = [(x.case.batch, h, x.case.length, x.case.width) for h in heads]
    q, k, v = (_random(f"{x.seed} {number}", *shape) for number, shape in enumerate(shapes))
    return q, k, v


def _random(seed: str, *shape: int) -> Tensor:
    source = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(shape, generator=source, dtype=DOUBLE)


def _near(label: str, result: Tensor, reference: Tensor, terms: float = 0.0) -> Measure:
    """Compare a result; ``terms`` is the size of the terms of the reference, if larger than itself."""
    size = _SLACK * (reference.abs() + reference.square().mean().sqrt() + terms)
    return close(label, result.detach(), reference.detach(), size.detach(), DOUBLE)


def _written_out(x: ModuleCheck) -> Iterator[Measure]:
    for alignment in (True,) if x.layer.causal_only else (True, False):
        inputs = tuple(t.requires_grad_() for t in _draw(x))
        fast = x.layer(*inputs, is_causal=alignment)
        written, weights = x.layer(*inputs, is_causal=alignment, return_weights=True)
        yield _near("output", fast, written)
        if alignment:
            yield equal("weights of the future", weights.detach().triu(1), 0.0)
        upstream = _random("upstream", *fast.shape)
        variables = [*inputs, *learnable(x.layer).values()]
        of_fast, of_written = (
            torch.autograd.grad(y, variables, upstream, allow_unused=True) for y in (fast, written)
        )
        # The gradient of a parameter is a sum over all tokens, of terms as large as the gradients of the
        # inputs.
        terms = sum(float(b.norm()) for b in of_written[: len(inputs)] if b is not None)
        for number, (a, b) in enumerate(zip(of_fast, of_written, strict=True)):
            yield fact("the same inputs have a gradient", (a is None) == (b is None))
            if a is not None and b is not None:
                yield _near("gradient", a, b, terms if number >= len(inputs) else 0.0)


def _decoding(x: ModuleCheck) -> Iterator[Measure]:
    """A module without a definition is its own reference: here the whole sequence, without a cache."""
    checks = [replace(x, seed=f"{x.seed} {number}") for number in range(3)]
    yield from size_measures("decoding = definition", checks, "auto")


def _future(x: ModuleCheck) -> Iterator[Measure]:
    q, k, v = _draw(x)
    before = x.layer(q, k, v, is_causal=True).detach()
    for t in (q, k, v):
        t[:, :, 40:] = 3 * _random("future", *t[:, :, 40:].shape)
    after = x.layer(q, k, v, is_causal=True).detach()
    yield equal("rows before a change", after[:, :, :40], before[:, :, :40])
    yield fact("rows after it change", not torch.equal(after[:, :, 40:], before[:, :, 40:]))


def _masked(x: ModuleCheck) -> Iterator[Measure]:
    q, k, v = _draw(x)
    options: dict[str, Any] = {"is_causal": True} if x.layer.causal_only else {}
    expected = x.layer(q, k[:, :, :60], v[:, :, :60], **options)
    length = x.case.length
    mask = torch.arange(length).expand(x.case.batch, 1, 1, length) < 60
    k[:, :, 60:], v[:, :, 60:] = torch.nan, torch.inf
    yield _near("keys masked, holding NaN", x.layer(q, k, v, mask, **options), expected)
    nothing = torch.zeros(length, length, dtype=torch.bool)
    q, k, v = (t.requires_grad_() for t in _draw(x))
    out = x.layer(q, k, v, nothing, is_causal=True)
    yield equal("rows that see nothing", out.detach(), 0.0)
    (gradient,) = torch.autograd.grad(out.sum(), (v,))
    yield equal("their gradient", gradient, 0.0)


def _precision(x: ModuleCheck) -> Iterator[Measure]:
    checks = [replace(x, case=replace(x.case, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    yield from size_measures("output and gradients = definition", checks, "auto")


def _equivariance(x: ModuleCheck) -> Iterator[Measure]:
    q, k, v = _draw(x)
    out = x.layer(q, k, v, is_causal=True)
    yield _near("one sequence alone", x.layer(q[1:], k[1:], v[1:], is_causal=True), out[1:])
    yield equal("again", x.layer(q, k, v, is_causal=True).detach(), out.detach())


def _engines(x: ModuleCheck) -> Iterator[Measure]:
    """``engine=`` has an effect: unknown engines and those that do not support the mechanism raise."""
    q, k, v = _draw(x)
    with torch.no_grad():
        expected = x.layer(q, k, v, is_causal=True)
        yield fact("an unknown engine raises ValueError", _output_of(x, (q, k, v), "no such engine") is None)
        for name in engine_names():
            output = _output_of(x, (q, k, v), name)
            if output is not None:
                yield _near(f"engine={name!r}", output, expected)
        if not x.layer.formulas:
            yield fact(
                "engine='sdpa', which computes softmax, raises ValueError",
                _output_of(x, (q, k, v), "sdpa") is None,
            )


def _output_of(x: ModuleCheck, tensors: Tensors, engine: str) -> Tensor | None:
    """Return the output, or None if a ValueError that names the argument says the engine is unsupported."""
    try:
        return cast(Tensor, x.layer(*tensors, is_causal=True, engine=engine))
    except ValueError as error:
        if "engine" not in str(error):
            raise
        return None


def _promises(x: ModuleCheck) -> Iterator[Measure]:
    """The weights have the sums, signs and exact zeros that the list of mechanisms states."""
    promised = x.spec.properties
    if x.spec.modifiers:
        raise NotApplicable("the list describes the mechanism inside, before it is wrapped")
    (q, k, v), length = _draw(x), x.case.length
    seen = torch.ones(length, length, dtype=torch.bool).tril(0 if x.layer.sees_itself else -1)
    allowed = 64 * torch.finfo(DOUBLE).eps * length**0.5
    for size in (1.0, 4.0):
        _, weights = x.layer(size * q, size * k, v, is_causal=True, return_weights=True)
        weights = weights.detach()
        alive = weights.abs().sum(-1) > 0
        for what, interval, total in (
            ("sum", promised.row_sum, weights.sum(-1)),
            ("sum of absolute values", promised.l1, weights.abs().sum(-1)),
        ):
            low, high = (
                torch.as_tensor(bound, dtype=DOUBLE).expand(alive.shape)[alive]
                for bound in (interval.of_module(x.layer) if interval.of_module else interval.ends(length))
            )
            yield Measure(f"the {what} of a row is {interval}", outside(total[alive], low, high), allowed)
        if not promised.signed:
            yield fact("there are no negative weights", bool((weights >= 0).all()))
        if size == 1.0:  # larger logits may underflow
            zeros = bool(((weights == 0) & seen & alive[..., None]).any())
            what = f"there are {'' if promised.sparse else 'no '}weights that are exactly 0"
            yield fact(what, zeros == promised.sparse)


PROPERTIES: dict[str, tuple[str, Callable[[ModuleCheck], Iterator[Measure]]]] = {
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
    check = ModuleCheck(spec, None, _CASE, str(seed), options or {})
    return [
        tested(theme, promise, "module", function(check))
        for theme, (promise, function) in PROPERTIES.items()
        if theme in themes
    ]
