"""Run the test suite for one mechanism: every property, on every engine."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unsoft import engines as all_engines
from unsoft.errors import MechanismError
from unsoft.formula import Formula
from unsoft.modules.registry import resolve
from unsoft.modules.spec import MechanismSpec
from unsoft.testing import agreement, edges, invariance, visibility  # noqa: F401  (they fill THEMES)
from unsoft.testing.case import Case, draw
from unsoft.testing.check import THEMES, Check
from unsoft.testing.definitions import definition_of
from unsoft.testing.family import FAMILY_THEMES, check_family
from unsoft.testing.report import NotApplicable, Report, Row, tested
from unsoft.testing.sizes import CHECKS, cases_for, module_checks, size_rows

__all__ = ["THEMES", "check_mechanism"]


def check_mechanism(
    mechanism: str | Formula,
    *,
    engines: Sequence[str] | None = None,
    seed: int = 0,
    quick: bool = False,
    only: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    thorough: bool = False,
    case: str | None = None,
) -> Report:
    """Test that a mechanism has every property on every engine; raise MechanismError if not.

    Takes about half a minute, with ``quick`` a few seconds, ``thorough`` some minutes.

    >>> import unsoft
    >>> own = unsoft.Formula("tanh(s)/n")
    >>> report = check_mechanism(own, engines=["dense"], quick=True, only=["edges", "decoding"])
    >>> print(report)
    tanh(s)/n: ... comparisons, all hold
    property                    engine  cases  finding
    decoding: decode = prefill  dense      10  ok, ...% of the tolerance
    edges: dead rows            dense ...

    mechanism
        A name (see ``unsoft.mechanisms()``; "logn+gpam" too) or a Formula of your own.
    engines
        Names of engines; by default all that support the mechanism and are available here, "auto" included.
        Single cases that an engine does not support are left out.
    seed
        Seed of the random inputs and of the sizes. The same seed gives the same inputs.
    quick
        Fewer and smaller cases.
    only
        Themes to run, of: parity, gradients, causality, decoding, masking, edges, nonfinite, equivariance,
        dtypes, dropout, purity, promises, sizes. Mechanisms that are modules have some of them,
        and "engines".
    options
        Keywords of the mechanism's class, as ``unsoft.mechanism`` takes them:
        ``{"where": "mass"}`` for magnitude.
    thorough
        In the theme "sizes", every pair of lengths, widths, dtypes, masks ... on every engine, instead of a
        sample in which every one of them occurs.
    case
        One case of the theme "sizes", in the form that a failure prints: "length=129 width=96 dtype=float32".
    """
    resolved = resolve(mechanism)
    formula = resolved if isinstance(resolved, Formula) else None
    title = mechanism if isinstance(mechanism, str) else mechanism.name or str(mechanism.weight)
    options = dict(options or {})
    if formula is not None and options:
        raise ValueError(f"options: {title!r} is a formula and has none; got {', '.join(options)}")
    names = _engine_names(formula, engines)
    known = FAMILY_THEMES if formula is None else [*THEMES, "sizes"]
    themes = _themes("sizes" if case is not None else only, known)
    rows: list[Row] = []
    if formula is not None:
        rows += _formula_rows(formula, names, themes, seed, quick)
    elif isinstance(resolved, MechanismSpec):
        rows += check_family(resolved, seed, options, themes)
    if "sizes" in themes and formula is not None and formula.fields:
        reason = (
            "a formula whose fields are arguments has no module of its own; register it with fields_from="
        )
        rows += [Row("sizes", check, "auto", 0, None, reason) for check in CHECKS]
    elif "sizes" in themes:
        spec = resolved if isinstance(resolved, MechanismSpec) else MechanismSpec(title, None, resolved)
        definition = definition_of(mechanism)
        if definition is None and formula is not None:
            definition = definition_of(formula)
        one = None if case is None else (Case.parse(case),)
        cases = one or cases_for(spec, seed, quick=quick, thorough=thorough)
        checks = module_checks(spec, definition, cases, seed, options)
        rows += size_rows(checks, names, every=thorough or engines is not None or case is not None)
    report = Report(title, seed, tuple(rows))
    if not report.ok:
        raise MechanismError(
            _explanation(report, mechanism, {"quick": quick, "options": options, "thorough": thorough})
        )
    return report


def _formula_rows(
    formula: Formula, names: list[str], themes: list[str], seed: int, quick: bool
) -> Iterator[Row]:
    for theme in themes:
        memory: dict[object, Any] = {}  # the engines of a theme share inputs and references
        for promise in THEMES.get(theme, []):
            for engine in names:
                if promise.engines is None or engine in promise.engines:
                    check = Check(formula, engine, seed, quick, memory)
                    yield tested(theme, promise.name, engine, promise.measures(check))


def _explanation(report: Report, mechanism: str | Formula, options: Mapping[str, Any]) -> str:
    """Return the failures, the call that repeats the first one, and the whole table."""
    first = report.failures[0]
    what = repr(mechanism) if isinstance(mechanism, str) else f"unsoft.{mechanism!r}"
    arguments = {
        "engines": [first.engine] if first.engine in all_engines.engine_names() else None,
        "seed": report.seed,
        **options,
        **({"case": first.worst.case} if first.worst and first.worst.case else {"only": first.theme}),
    }
    keywords = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value or name == "seed")
    lines = [f"{report.mechanism}: {len(report.failures)} of {len(report.rows)} checks failed"]
    lines += [f"  {row.theme}: {row.promise} on {row.engine}: {row.finding}" for row in report.failures]
    lines += [
        "again, the first one (Python):",
        f"  unsoft.testing.check_mechanism({what}, {keywords})",
        "",
        str(report),
    ]
    return "\n".join(lines)


def _engine_names(formula: Formula | None, engines: Sequence[str] | None) -> list[str]:
    if isinstance(engines, str):
        raise TypeError(f"engines: expected a list of names such as [{engines!r}], not one name")
    if engines is None:
        return [name for name in all_engines.engine_names() if formula is None or _supports(name, formula)]
    for name in engines:
        all_engines.check_name(name)
    return list(engines)


def _supports(engine: str, formula: Formula) -> bool:
    """Return True if an engine supports the plainest call of a formula."""
    try:
        Check(formula, engine).require(draw(Case(), formula, seed=0), torch.float32, engine)
    except NotApplicable:
        return False
    return True


def _themes(only: str | Sequence[str] | None, known: Sequence[str]) -> list[str]:
    wanted = [only] if isinstance(only, str) else list(known) if only is None else list(only)
    for theme in wanted:
        if theme not in known:
            raise ValueError(f"only: unknown theme {theme!r} (known: {', '.join(known)})")
    return [theme for theme in known if theme in wanted]
