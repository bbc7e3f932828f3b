"""Run the test suite for one mechanism: every property, on every engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unsoft import engines as all_engines
from unsoft.errors import CompilerWarning, MechanismError
from unsoft.formula import Formula
from unsoft.modules.registry import resolve
from unsoft.modules.spec import MechanismSpec
from unsoft.testing.agreement import DROPOUT, DTYPES, GRADIENTS, PARITY
from unsoft.testing.case import Case, draw
from unsoft.testing.check import Check, NotApplicable, Property
from unsoft.testing.definitions import definition_of
from unsoft.testing.edges import EDGES, NONFINITE
from unsoft.testing.family import FAMILY_THEMES, check_family
from unsoft.testing.invariance import EQUIVARIANCE, PROMISES, PURITY
from unsoft.testing.report import Measure, Report, Row, worst_of
from unsoft.testing.sizes import CHECKS, Sizes, cases_for
from unsoft.testing.visibility import CAUSALITY, DECODING, MASKING

THEMES: dict[str, list[Property]] = {
    "parity": PARITY,
    "gradients": GRADIENTS,
    "causality": CAUSALITY,
    "decoding": DECODING,
    "masking": MASKING,
    "edges": EDGES,
    "nonfinite": NONFINITE,
    "equivariance": EQUIVARIANCE,
    "dtypes": DTYPES,
    "dropout": DROPOUT,
    "purity": PURITY,
    "promises": PROMISES,
}


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
        rows += check_family(resolved, seed, options, themes).rows
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
        sizes = Sizes(spec, definition, seed, options, cases)
        rows += size_rows(sizes, names, thorough or engines is not None)
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
                    yield _row(theme, promise, Check(formula, engine, seed, quick, memory))


def size_rows(sizes: Sizes, names: Sequence[str], every: bool = False) -> list[Row]:
    """Return the rows of the theme "sizes".

    "auto" runs all cases; the other engines divide them among themselves, unless ``every`` is True.
    """
    others = () if every else tuple(name for name in names if name != "auto")
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompilerWarning)
        for check in CHECKS:
            for engine in names:
                measures = list(sizes.measures(check, engine, sizes.of(check, engine, others)))
                skipped = "" if measures else "no case of the grid applies"
                rows.append(Row("sizes", check, engine, len(measures), worst_of(measures), skipped))
    return rows


def _row(theme: str, promise: Property, check: Check) -> Row:
    measures: list[Measure] = []
    about: dict[str, Any] = {"theme": theme, "promise": promise.name, "engine": check.engine}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompilerWarning)  # "auto" is checked without a compiler, too
        try:
            measures.extend(promise.measures(check))
        except NotApplicable as reason:
            about["skipped"] = str(reason)
        except Exception as error:  # an exception of an engine is a failed property, not the end of the run
            about["error"] = f"{type(error).__name__}: {error}"
    return Row(**about, cases=len(measures), worst=worst_of(measures))


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
