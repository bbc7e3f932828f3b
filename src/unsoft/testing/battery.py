"""The contract battery: every property of the contract, on every engine, for one mechanism."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from unsoft import engines as all_engines
from unsoft.errors import CompilerWarning, MechanismError
from unsoft.formula import Formula
from unsoft.mechanisms.core.registry import resolve
from unsoft.mechanisms.core.spec import Plan
from unsoft.testing import (
    causality,
    decoding,
    dropout,
    dtypes,
    edges,
    equivariance,
    gradients,
    masking,
    nonfinite,
    parity,
    promises,
    purity,
)  # fmt: skip
from unsoft.testing.case import Case, draw
from unsoft.testing.check import Check, NotApplicable, Property
from unsoft.testing.family import check_family
from unsoft.testing.measure import Measure
from unsoft.testing.report import Report, Row, worst_of

THEMES: dict[str, list[Property]] = {
    module.__name__.rpartition(".")[2]: module.PROPERTIES
    for module in (
        parity, gradients, causality, decoding, masking, edges, nonfinite, equivariance, dtypes, dropout, purity,
        promises,
    )
}  # fmt: skip


def check_mechanism(
    mechanism: str | Formula,
    *,
    engines: Sequence[str] | None = None,
    seed: int = 0,
    quick: bool = False,
    only: str | Sequence[str] | None = None,
) -> Report:
    """Checks that a mechanism keeps every promise of unsoft on every engine; if not, raises MechanismError.

    >>> import unsoft
    >>> own = unsoft.Formula("tanh(s)/n")
    >>> report = check_mechanism(own, engines=["dense"], quick=True, only=["edges", "decoding"])
    >>> print(report)
    tanh(s)/n: ... comparisons, all hold
    property                    engine  cases  finding
    decoding: decode = prefill  dense      10  ok, ...% of the tolerance
    edges: dead rows            dense ...

    mechanism
        A name (see ``unsoft.mechanisms()``; "logn+gpam" too) or a Formula of your own. Mechanisms that are modules
        have a battery of their own, without engines and themes.
    engines
        Names of engines; by default all that support the mechanism, "auto" included. Single cases that an
        engine does not support are left out.
    seed
        Of the random inputs. The same seed gives the same inputs.
    quick
        Fewer cases.
    only
        Themes to run, of: parity, gradients, causality, decoding, masking, edges, nonfinite, equivariance,
        dtypes, dropout, purity, promises.
    """
    formula = resolve(mechanism)
    if isinstance(formula, Plan):
        return _checked_family(formula, engines, seed, only)
    names = _engine_names(formula, engines)
    rows = []
    for theme in _themes(only):
        memory: dict[object, Any] = {}  # the engines of a theme share inputs and references
        for promise in THEMES[theme]:
            for engine in names:
                if promise.engines is None or engine in promise.engines:
                    rows.append(_judge(theme, promise, Check(formula, engine, seed, quick, memory)))
    title = mechanism if isinstance(mechanism, str) else formula.name or str(formula.weight)
    report = Report(title, seed, tuple(rows))
    if not report.ok:
        raise MechanismError(_explanation(report, mechanism, quick))
    return report


def _checked_family(
    plan: Plan, engines: Sequence[str] | None, seed: int, only: str | Sequence[str] | None
) -> Report:
    if engines is not None or only is not None:
        raise ValueError(
            f"engines, only: are for formulas; {plan.name!r} is a module and is checked as a whole"
        )
    report = check_family(plan, seed)
    if not report.ok:
        lines = [f"  {row.theme}: {row.promise}: {row.finding}" for row in report.failures]
        again = f"again (Python): unsoft.testing.check_mechanism({plan.name!r}, seed={seed})"
        raise MechanismError(
            "\n".join([f"{plan.name}: {len(lines)} checks failed", *lines, again, "", str(report)])
        )
    return report


def _judge(theme: str, promise: Property, check: Check) -> Row:
    measures: list[Measure] = []
    about: dict[str, Any] = {"theme": theme, "promise": promise.name, "engine": check.engine}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", CompilerWarning
        )  # without a compiler the engine's stand-in is checked
        try:
            measures.extend(promise.measures(check))
        except NotApplicable as reason:
            about["skipped"] = str(reason)
        except Exception as error:  # whatever an engine raises is a finding, not the end of the battery
            about["error"] = f"{type(error).__name__}: {error}"
    return Row(**about, cases=len(measures), worst=worst_of(measures))


def _explanation(report: Report, mechanism: str | Formula, quick: bool) -> str:
    """The failures, how to run the first one again, and the whole table."""
    first = report.failures[0]
    what = repr(mechanism) if isinstance(mechanism, str) else f"unsoft.{mechanism!r}"
    options = f"engines=[{first.engine!r}], seed={report.seed}, quick={quick}, only={first.theme!r}"
    lines = [f"{report.mechanism}: {len(report.failures)} of {len(report.rows)} checks failed"]
    lines += [f"  {row.theme}: {row.promise} on {row.engine}: {row.finding}" for row in report.failures]
    lines += [
        "again, the first one (Python):",
        f"  unsoft.testing.check_mechanism({what}, {options})",
        "",
        str(report),
    ]
    return "\n".join(lines)


def _engine_names(formula: Formula, engines: Sequence[str] | None) -> list[str]:
    if isinstance(engines, str):
        raise TypeError(f"engines: expected a list of names such as [{engines!r}], not one name")
    if engines is None:
        return [name for name in all_engines.engine_names() if _supports(name, formula)]
    for name in engines:
        all_engines.check_name(name)
    return list(engines)


def _supports(engine: str, formula: Formula) -> bool:
    """Does an engine run the plainest call of a formula?"""
    try:
        Check(formula, engine).require(draw(Case(), formula, seed=0), torch.float32, engine)
    except NotApplicable:
        return False
    return True


def _themes(only: str | Sequence[str] | None) -> list[str]:
    wanted = [only] if isinstance(only, str) else list(THEMES) if only is None else list(only)
    for theme in wanted:
        if theme not in THEMES:
            raise ValueError(f"only: unknown theme {theme!r} (known: {', '.join(THEMES)})")
    return [theme for theme in THEMES if theme in wanted]
