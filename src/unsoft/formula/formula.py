"""The formula of an attention mechanism.

    a_ij = weight(s_ij) / norm( sum_j mass(s_ij) + offset_mass )        m_i = max_j peak(s_ij)

>>> swishmax = Formula(weight="s*exp(s - m)", mass="abs(s)*exp(s - m)", peak="s")
>>> swishmax.signed, swishmax.bias
(True, 'strength')
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from unsoft.errors import FormulaError
from unsoft.formula import analysis, invariance, javascript, torch_code
from unsoft.formula.expr import Expr, symbol
from unsoft.formula.fields import Symbols, read_fields, used
from unsoft.formula.latex import formula_latex
from unsoft.formula.reading import guarded, read_bias, read_params, read_part
from unsoft.formula.row import weights_of_row
from unsoft.formula.substitute import substitute
from unsoft.tracing import outside_transforms

_PARTS = ("weight", "mass", "peak", "norm", "offset_mass")
_ABOUT = ("name", "title", "paper", "summary")
_by_key: WeakValueDictionary[str, Formula] = WeakValueDictionary()


class Facts(NamedTuple):
    """Facts about a formula that are already known, so that the milliseconds of analysis are saved.

    For the built-in mechanisms, whose facts a test compares with what is found.
    """

    signed: bool
    mass_degree: float = 1.0


class Formula:
    """A pointwise attention mechanism, written once and used by every engine.

    Each of ``weight``, ``mass``, ``peak``, ``norm`` and ``offset_mass`` is formula text, a number, an
    :class:`Expr` or a SymPy expression in the symbols s (logit), m (row peak, if ``peak`` is given), n
    (number of visible keys), i and j (positions), z (in ``norm``: the summed mass) and the names of
    ``params``, a mapping from name to default value. ``norm`` may also be the bare name of a function, such
    as "sqrt". Without ``mass`` the weights are not normalised. A mass of exponentials needs a ``peak``.

    ``fields`` names numbers that a call gives for each query and each key: {"c": "query+key"}, or "query", or
    "key". The text writes them c_i (of the query) and c_j (of the key). q2 and k2, the squared lengths of
    query and key times the scale of the logits, need not be declared.

    ``bias`` says what an additive float mask b does: "logit" adds it to s, "strength" multiplies weight and
    mass by exp(b), which moves the strength of a weight and never its sign. The default is "strength" for
    signed formulas. An expression of s, such as "s*log(n)", has b added to it wherever it occurs; no other s
    may occur.

    >>> Formula("exp(s - m)", "exp(s - m)", "s") == Formula(weight="exp(s-m)", mass="exp( s - m )", peak="s")
    True
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
    """The symbols of fields that occur, of queries and of keys, q2 and k2 included."""
    bias: str
    mask_target: Expr | None
    """What a float mask is added to: s for the bias "logit", None for "strength"."""
    name: str | None
    title: str | None
    paper: str | None
    summary: str | None
    safe_weight: Expr
    """The weight, guarded where needed so that a NaN logit always gives a NaN weight."""
    safe_mass: Expr | None
    """The mass, guarded likewise."""
    signed: bool
    """Can a weight be negative (with the default parameters)?"""
    mass_degree: float
    """The p for which mass scales as exp(-p m) when weight scales as exp(-m)."""
    uses: frozenset[str]
    """All symbols and parameters that occur anywhere."""
    key: str
    """Everything that decides the numbers (not names, papers) as one canonical line of JSON."""

    @outside_transforms()  # a formula is tried out on numbers of its own
    def __init__(
        self,
        weight: Any,
        mass: Any = None,
        peak: Any = None,
        norm: Any = None,
        offset_mass: Any = None,
        params: Mapping[str, float] | None = None,
        *,
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
        if mass is None and (norm is not None or offset_mass is not None):
            raise FormulaError("mass: norm and offset_mass act on the summed mass, but no mass is given")
        own["params"] = MappingProxyType(read_params(params))
        own["fields"] = named = MappingProxyType(read_fields(fields, self.params))
        for part, given in zip(_PARTS, (weight, mass, peak, norm, offset_mass), strict=True):
            own[part] = (
                None if given is None else read_part(part, given, self.params, peak is not None, named)
            )
        own["symbols"] = used(named, [own[part] for part in _PARTS if own[part] is not None])
        if facts is None:
            own["mass_degree"] = invariance.mass_degree(self.mass, self.norm, self.params, self.symbols)
            parts = {part: own[part] for part in _PARTS}
            if self.peak is not None:
                invariance.check(parts, self.mass_degree, self.params, self.symbols)
            elif self.mass is not None:
                invariance.check_without_peak(parts, self.params, self.symbols)
        else:
            own["mass_degree"] = facts.mass_degree
        # All computed now rather than when asked for: compiled code may read them, but not make them.
        own["safe_weight"] = guarded(self.weight)
        own["safe_mass"] = None if self.mass is None else guarded(self.mass)
        own["uses"] = frozenset().union(*(own[part].symbols for part in _PARTS if own[part] is not None))
        if unused := sorted(set(self.params) - self.uses):
            raise FormulaError(
                f"params: {', '.join(map(repr, unused))} occurs nowhere in the formula; use it or"
                " leave it out"
            )
        own["signed"] = analysis.is_signed(self) if facts is None else facts.signed
        bias = ("strength" if self.signed else "logit") if bias is None else bias
        of_entries = [part for part in (self.weight, self.mass, self.peak) if part is not None]
        own["mask_target"] = target = read_bias(bias, of_entries, self.params, named)
        own["bias"] = {None: "strength", symbol("s"): "logit"}.get(target, str(target))
        numeric = {field: value for field, value in self.to_dict().items() if field not in _ABOUT}
        own["key"] = json.dumps(numeric, sort_keys=True)
        _by_key.setdefault(self.key, self)  # an equal formula that lives shorter must not take its place

    def row(self, logits: Tensor, **values: Tensor | float) -> Tensor:
        """Weights of a row of visible keys; the last dimension of ``logits`` runs over the keys.

        ``values`` may give parameters other than their defaults, and i, the row's position (default: the last
        key's); they must give the fields: c_i a number, c_j one for each key.

        >>> import torch
        >>> Formula("max(s, 0)/n").row(torch.tensor([2.0, -1.0]))
        tensor([1., 0.])
        """
        return weights_of_row(self, logits, values)

    def with_logit(self, logit: Expr) -> Formula:
        """The formula of a changed logit, an expression of s. A float mask is added after the change.

        >>> sharper = Formula("exp(s - m)", "exp(s - m)", "s").with_logit(2*symbol("s"))
        >>> sharper.weight, sharper.bias
        (Expr('exp(2*s - m)'), '2*s')
        """

        def of(part: Expr | None) -> Expr | None:
            return None if part is None else substitute(part, "s", logit)

        bias = "strength" if self.mask_target is None else substitute(self.mask_target, "s", logit)
        return self.change(weight=of(self.weight), mass=of(self.mass), peak=of(self.peak), bias=bias)

    def change(self, **parts: Any) -> Formula:
        """The formula with other parts, params, fields or bias, and without a name.

        >>> Formula("tanh(s)", name="mine").change(weight="tanh(2*s)")
        Formula(weight='tanh(2*s)', bias='strength')
        """
        own = {part: self.__dict__[part] for part in (*_PARTS, "params", "fields", "bias")}
        return Formula(**own | parts)

    def torch_source(self) -> str:
        """Readable Python: a torch function from logits to weights. For people; unsoft never executes it."""
        return torch_code.formula_source(self)

    def javascript_source(self) -> str:
        """A JavaScript arrow function from an array of logits to an array of weights."""
        return javascript.formula_source(self)

    def latex(self) -> str:
        """The definition in LaTeX."""
        return formula_latex(self)

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
        """What the formula promises, found by analysing it."""
        return analysis.analyse(self)

    @staticmethod
    def from_key(key: str) -> Formula:
        """The formula of a :attr:`key`; the same object as long as it lives."""
        known = _by_key.get(key)
        return Formula.from_dict(json.loads(key)) if known is None else known

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary (text, numbers) that :meth:`from_dict` turns back into an equal formula."""
        parts = {part: str(self.__dict__[part]) for part in _PARTS if self.__dict__[part] is not None}
        about = {field: self.__dict__[field] for field in _ABOUT if self.__dict__[field] is not None}
        params = {"params": dict(self.params)} if self.params else {}
        fields = {"fields": dict(self.fields)} if self.fields else {}
        return parts | params | fields | {"bias": self.bias} | about

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Formula:
        """The inverse of :meth:`to_dict`."""
        return Formula(**content)
