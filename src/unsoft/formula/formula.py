"""The formula of an attention mechanism.

    a_ij = weight(s_ij) / norm( sum_j mass(s_ij) + offset_mass )        m_i = max_j peak(s_ij)

>>> swishmax = Formula(weight="s*exp(s - m)", mass="abs(s)*exp(s - m)", peak="s")
>>> swishmax.signed, swishmax.bias
(True, 'strength')
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from unsoft.checks import did_you_mean, one_of
from unsoft.errors import FormulaError
from unsoft.formula import analysis, display, invariance, javascript, printing
from unsoft.formula.arguments import Symbols, guarded, read_bias, read_fields, read_params, read_part, used
from unsoft.formula.evaluation import evaluate, vanishes
from unsoft.formula.expr import Expr, substitute, symbol
from unsoft.formula.stabilise import Normalise, stabilised, verify
from unsoft.notebook import data_frame
from unsoft.tracing import outside_transforms

_PARTS = ("weight", "mass", "peak", "norm", "offset_mass")
_ABOUT = ("name", "title", "paper", "summary")
TEXT_PARTS = (*_PARTS, "normalise", "bias", "name")
"""Parts that a text may give as NAME=...; other names are parameters."""
_by_key: WeakValueDictionary[str, Formula] = WeakValueDictionary()


class Facts(NamedTuple):
    """Known facts about a formula, which save the milliseconds of analysis.

    Only for the built-in mechanisms: a test compares their facts with the analysis.
    """

    signed: bool
    mass_degree: float = 1.0


class Formula:
    """A pointwise attention mechanism, written once and used by every engine.

    Each of ``weight``, ``mass``, ``peak``, ``norm`` and ``offset_mass`` is formula text, a number, an
    :class:`Expr` or a SymPy expression in the symbols s (logit), m (row peak, if ``peak`` is given), n
    (number of visible keys), i and j (positions), z (in ``norm``: the summed mass) and the names of
    ``params``, a mapping from name to default value. ``norm`` may also be the bare name of a function, such
    as "sqrt". A mass of exponentials needs a ``peak``.

    With ``normalise`` the weight is written as in a paper, and mass, peak and the shift by m are derived:
    "sum" divides by the sum of the row's weights, "abs" by the sum of their absolute values, "square" by the
    root of the sum of their squares, "count" by n. Without ``mass`` and ``normalise`` the weights are not
    normalised. A weight without a stable form raises FormulaError.

    ``fields`` names numbers that a call gives for each query and each key: {"c": "query+key"}, or "query", or
    "key". The text writes them c_i (of the query) and c_j (of the key). q2 and k2, the squared lengths of
    query and key times the scale of the logits, need not be declared.

    ``bias`` selects what an additive float mask b does: "logit" adds it to s, "strength" multiplies weight
    and mass by exp(b), which changes the strength of a weight and never its sign. The default is "strength"
    for signed formulas. An expression of s, such as "s*log(n)", has b added to it wherever it occurs; no
    other s may occur.

    >>> Formula("exp(s - m)", "exp(s - m)", "s") == Formula(weight="exp(s-m)", mass="exp( s - m )", peak="s")
    True
    >>> Formula("tanh(s)*exp(abs(s))", normalise="abs").mass
    Expr('abs(tanh(s))*exp(abs(s) - m)')
    >>> Formula("exp(s)", "exp(s - m)", "s")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    unsoft.errors.FormulaError: weight: the row peak m does not cancel. ...
    >>> Formula("exp(s)", "exp(s)")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    unsoft.errors.FormulaError: mass: exp(s) overflows ... and give peak="s" ...
    """

    weight: Expr
    mass: Expr | None
    peak: Expr | None
    norm: Expr | None
    offset_mass: Expr | None
    params: Mapping[str, float]
    fields: Mapping[str, str]
    symbols: Symbols
    """Symbols of the fields that occur, of queries and of keys, including q2 and k2."""
    bias: str
    mask_target: Expr | None
    """Expression that a float mask is added to: s for the bias "logit", None for "strength"."""
    name: str | None
    title: str | None
    paper: str | None
    summary: str | None
    safe_weight: Expr
    """The weight, guarded where needed so that a NaN logit always gives a NaN weight."""
    safe_mass: Expr | None
    """The mass, guarded likewise."""
    signed: bool
    """True if a weight can be negative (with the default parameters)."""
    mass_degree: float
    """The p for which mass scales as exp(-p m) when weight scales as exp(-m)."""
    uses: frozenset[str]
    """All symbols and parameters that occur anywhere."""
    key: str
    """Everything that determines the numbers (not names, papers) as one canonical line of JSON."""

    @outside_transforms()  # the checks evaluate the formula on tensors of their own
    def __init__(
        self,
        weight: Any,
        mass: Any = None,
        peak: Any = None,
        norm: Any = None,
        offset_mass: Any = None,
        params: Mapping[str, float] | None = None,
        *,
        normalise: Normalise | None = None,
        fields: Mapping[str, str] | None = None,
        bias: str | Expr | None = None,
        name: str | None = None,
        title: str | None = None,
        paper: str | None = None,
        summary: str | None = None,
        facts: Facts | None = None,
    ) -> None:
        own = self.__dict__
        own.update(name=name, title=title or name, paper=paper, summary=summary)
        if weight is None:
            raise TypeError("weight: a formula needs at least a weight, such as 'exp(s - m)'")
        if normalise is not None:
            one_of("Formula", "normalise", normalise, get_args(Normalise))
            if given := [
                part for part, x in (("mass", mass), ("peak", peak), ("norm", norm)) if x is not None
            ]:
                raise FormulaError(f"normalise: it derives {given[0]}, so give one of the two")
        if mass is None and (norm is not None or (offset_mass is not None and normalise in (None, "count"))):
            raise FormulaError("mass: norm and offset_mass act on the summed mass, but no mass is given")
        own["params"] = MappingProxyType(read_params(params))
        own["fields"] = named = MappingProxyType(read_fields(fields, self.params))
        values = dict(zip(_PARTS, (weight, mass, peak, norm, offset_mass), strict=True))
        parts: dict[str, Any] = {
            part: None if value is None else read_part(part, value, self.params, peak is not None, named)
            for part, value in values.items()
        }
        written = parts["weight"]
        if facts is None and mass is None and peak is None:
            parts |= stabilised(written, normalise, parts["offset_mass"], self.params)
        own.update(parts)
        present = [expr for expr in parts.values() if expr is not None]
        own["symbols"] = used(named, present)
        own["mass_degree"] = invariance.mass_degree(self) if facts is None else facts.mass_degree
        if facts is None:
            self._check(written if normalise is not None else None)
        # Computed now and not on first use: compiled code can read attributes, but not create them.
        own["safe_weight"] = guarded(self.weight)
        own["safe_mass"] = None if self.mass is None else guarded(self.mass)
        own["uses"] = frozenset().union(*(expr.symbols for expr in present))
        if unused := sorted(set(self.params) - self.uses):
            raise FormulaError(
                f"params: {', '.join(map(repr, unused))} occurs nowhere in the formula; use it or"
                " leave it out"
            )
        own["signed"] = analysis.is_signed(self) if facts is None else facts.signed
        bias = ("strength" if self.signed else "logit") if bias is None else bias
        per_key = [expr for expr in (self.weight, self.mass, self.peak) if expr is not None]
        own["mask_target"] = target = read_bias(bias, per_key, self.params, named)
        own["bias"] = {None: "strength", symbol("s"): "logit"}.get(target, str(target))
        numeric = {field: value for field, value in self.to_dict().items() if field not in _ABOUT}
        own["key"] = json.dumps(numeric, sort_keys=True)
        if normalise is not None:
            verify(self, written, normalise)
        _by_key.setdefault(self.key, self)  # an equal, shorter-lived formula must not replace it

    def _check(self, written: Expr | None) -> None:
        """Check the range of the parts; ``written`` is the weight that they were derived from, if any."""
        try:
            invariance.check(self)
        except FormulaError as problem:
            if written is None:
                raise
            reason = str(problem).partition(". ")[0]
            raise FormulaError(
                f"weight: {written} cannot be stabilised ({reason}). What would work: give weight, mass and"
                " peak explicitly"
            ) from None

    def row(self, logits: Tensor, **values: Tensor | float) -> Tensor:
        """Return the weights of a row of visible keys; the last dimension of ``logits`` runs over the keys.

        This is the definition of a formula. ``values`` may contain parameters, which replace their defaults,
        and i, the row's position (default: the last key's). It must contain the fields: a number for c_i, one
        for each key for c_j.

        >>> import torch
        >>> Formula("max(s, 0)/n").row(torch.tensor([2.0, -1.0]))
        tensor([1., 0.])
        """
        fields = set(self.symbols.all)
        if unknown := values.keys() - self.params.keys() - fields - {"i"}:
            raise ValueError(
                f"values: {', '.join(sorted(unknown))} is neither a parameter or field of the formula nor i"
            )
        if missing := fields - values.keys():
            raise ValueError(f"values: no value for the field {', '.join(sorted(missing))}")
        count = logits.shape[-1]
        env = {"s": logits, "n": count, "i": count - 1, **self.params, **values}
        # As tensors, so that a part without s is not evaluated in the default dtype.
        env = {name: torch.as_tensor(x, dtype=logits.dtype, device=logits.device) for name, x in env.items()}
        env["j"] = torch.arange(count, dtype=logits.dtype, device=logits.device)
        if self.peak is not None:
            env["m"] = evaluate(self.peak, env).detach().amax(-1, keepdim=True)
        weight = evaluate(self.safe_weight, env)
        if self.safe_mass is None:
            return weight
        of_row = {name: value for name, value in env.items() if name not in ("s", "j", *self.symbols.key)}
        total = evaluate(self.safe_mass, env).sum(-1, keepdim=True)
        if self.offset_mass is not None:
            total = total + evaluate(self.offset_mass, of_row)
        if self.norm is not None:
            total = evaluate(self.norm, of_row | {"z": total})
        vanishing = vanishes(total)
        return torch.where(vanishing, 0, weight / torch.where(vanishing, 1, total))

    def with_logit(self, logit: Expr) -> Formula:
        """Return the formula of a changed logit, an expression of s. A float mask is added after the change.

        >>> sharper = Formula("exp(s - m)", "exp(s - m)", "s").with_logit(2*symbol("s"))
        >>> sharper.weight, sharper.bias
        (Expr('exp(2*s - m)'), '2*s')
        """

        def changed(part: Expr | None) -> Expr | None:
            return None if part is None else substitute(part, "s", logit)

        parts = {name: changed(self.__dict__[name]) for name in ("weight", "mass", "peak")}
        return self.change(**parts, bias=changed(self.mask_target) or "strength")

    def change(self, **parts: Any) -> Formula:
        """Return the formula with other parts, params, fields or bias, and without a name.

        >>> Formula("tanh(s)", name="mine").change(weight="tanh(2*s)")
        Formula(weight='tanh(2*s)', bias='strength')
        """
        own = {part: self.__dict__[part] for part in (*_PARTS, "params", "fields", "bias")}
        return Formula(**own | parts)

    def torch_source(self) -> str:
        """Return a readable torch function from logits to weights. For people; unsoft never executes it."""
        return printing.torch_source(self)

    def javascript_source(self) -> str:
        """Return a JavaScript arrow function from an array of logits to an array of weights."""
        return javascript.formula_source(self)

    def latex(self) -> str:
        """Return the definition in LaTeX."""
        return printing.formula_latex(self)

    def plot(self, *others: Formula) -> Any:
        """Return an Altair chart: the weight of one key against its logit, among fifteen other keys."""
        return display.chart({f._label: display.curve(f.row) for f in (self, *others)})

    def to_pandas(self) -> Any:
        """Return that curve as a DataFrame with the columns logit and weight."""
        values = zip(display.CURVE_LOGITS, display.curve(self.row), strict=True)
        return data_frame([{"logit": s, "weight": a} for s, a in values])

    @property
    def _label(self) -> str:
        return self.name or str(self.weight)

    def _repr_latex_(self) -> str:
        return rf"$\displaystyle {self.latex()}$"

    def _repr_html_(self) -> str:
        # Notebooks typeset mathematics in HTML. A formula with fields has no curve of the logit alone.
        plot = (
            "" if self.symbols.all else display.svg_plot(display.curve(self.row), f"weight of {self._label}")
        )
        title = f"<strong>{escape(self._label)}</strong> {escape(self.summary or '')}"
        return f"<div>{title}<br>{escape(self._repr_latex_())}<br>{plot}</div>"

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"a Formula cannot be changed (attribute {attribute!r}); make a new one")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        parts = ", ".join(f"{field}={value!r}" for field, value in self.to_dict().items())
        return f"Formula({parts})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Formula.from_dict, (self.to_dict(),)

    @cached_property
    def properties(self) -> analysis.Properties:
        """Properties of the weights, determined by analysing the formula."""
        return analysis.analyse(self)

    @staticmethod
    def from_key(key: str) -> Formula:
        """Return the formula of a :attr:`key`; the same object as long as it lives."""
        known = _by_key.get(key)
        return Formula.from_dict(json.loads(key)) if known is None else known

    def to_dict(self) -> dict[str, Any]:
        """Return text and numbers as a dictionary that :meth:`from_dict` turns back into an equal formula."""
        parts = {part: str(self.__dict__[part]) for part in _PARTS if self.__dict__[part] is not None}
        about = {field: self.__dict__[field] for field in _ABOUT if self.__dict__[field] is not None}
        params = {"params": dict(self.params)} if self.params else {}
        fields = {"fields": dict(self.fields)} if self.fields else {}
        return parts | params | fields | {"bias": self.bias} | about

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Formula:
        """Return the formula of a dictionary that :meth:`to_dict` made."""
        return Formula(**content)


def formula_text(formula: Formula) -> str:
    """Return the text that :func:`formula_from_text` reads back as an equal formula; fields have none.

    >>> formula_text(Formula("exp(tau*s - m)", "exp(tau*s - m)", "tau*s", params={"tau": 2.0}))
    'weight=exp(tau*s - m);mass=exp(tau*s - m);peak=tau*s;bias=logit;tau=2.0'
    """
    content = formula.to_dict()
    parts = {part: content[part] for part in TEXT_PARTS if part in content} | dict(formula.params)
    return ";".join(f"{part}={value}" for part, value in parts.items())


def formula_from_text(text: str) -> Formula:
    """Return the formula of "weight=...;mass=...;peak=..." (also norm, offset_mass, normalise, bias, name).

    Other names are parameters. The weight may come first without "weight=". The command line and the names of
    mechanisms use this form.

    >>> formula_from_text("weight=exp(tau*s - m); mass=exp(tau*s - m); peak=tau*s; tau=2").params["tau"]
    2.0
    >>> formula_from_text("exp(s); normalise=sum").peak
    Expr('s')
    """
    parts: dict[str, Any] = {}
    params: dict[str, float] = {}
    for piece in filter(str.strip, text.split(";")):
        name, equals, content = (x.strip() for x in piece.partition("="))
        if not parts and not (equals and name.isidentifier()):
            parts["weight"] = piece.strip()
            continue
        if not equals or not content or name in parts or name in params:
            raise FormulaError(
                f"formula: expected 'weight=...;mass=...;peak=...', each once, but there is {piece.strip()!r}"
            )
        if name in TEXT_PARTS:
            parts[name] = content
            continue
        try:
            params[name] = float(content)
        except ValueError:
            hint = did_you_mean(name, TEXT_PARTS)
            raise FormulaError(
                f"formula: {name!r} is neither a part ({', '.join(TEXT_PARTS)}) nor a parameter with a"
                f" number, in {piece.strip()!r}{hint}"
            ) from None
    if not re.fullmatch(r"[\w .+()-]*", parts.get("name", "")):  # it becomes part of pages and tables
        raise FormulaError(f"formula: a name is made of letters, digits and . + - ( ), not {parts['name']!r}")
    if "weight" not in parts:
        raise FormulaError("formula: it needs at least 'weight=...'")
    return Formula(**parts, params=params)
