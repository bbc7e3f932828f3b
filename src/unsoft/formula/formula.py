"""The formula of an attention mechanism.

    a_ij = weight(s_ij) / norm( sum_j mass(s_ij) + offset_mass )        m_i = max_j peak(s_ij)

>>> swishmax = Formula(weight="s*exp(s - m)", mass="abs(s)*exp(s - m)", peak="s")
>>> swishmax.signed, swishmax.bias
(True, 'strength')
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unsoft.errors import FormulaError
from unsoft.formula import invariance
from unsoft.formula.expr import COMPARISONS, FUNCTIONS, Expr, make, number, postorder, symbol
from unsoft.formula.parse import parse
from unsoft.formula.row import weights_of_row

if TYPE_CHECKING:
    from unsoft.formula.analysis import Properties

_SYMBOLS = {  # the symbols each part may use, besides the parameters
    "weight": "smnij",
    "mass": "smnij",
    "peak": "snij",
    "norm": "zmni",
    "offset_mass": "mni",
}
_BIASES = ("logit", "strength")
_RESERVED = frozenset({"s", "m", "n", "i", "j", "z", *FUNCTIONS})


class Formula:
    """A pointwise attention mechanism, written once and used by every engine.

    Each of ``weight``, ``mass``, ``peak``, ``norm`` and ``offset_mass`` is formula text, a number, an :class:`Expr` or
    a SymPy expression in the symbols s (logit), m (row peak, if ``peak`` is given), n (number of visible keys), i and j
    (positions), z (in ``norm``: the summed mass) and the names of ``params``, a mapping from name to default value.
    ``norm`` may also be the bare name of a function, such as "sqrt". Without ``mass`` the weights are not normalised.

    ``bias`` says what an additive float mask b does: "logit" adds it to s, "strength" multiplies weight and mass by
    exp(b), which moves the strength of a weight and never its sign. The default is "strength" for signed formulas.

    >>> Formula("exp(s - m)", "exp(s - m)", "s") == Formula(weight="exp(s-m)", mass="exp( s - m )", peak="s")
    True
    >>> Formula("exp(s)", "exp(s - m)", "s")
    Traceback (most recent call last):
    unsoft.errors.FormulaError: weight: the row peak m does not cancel. ...
    """

    weight: Expr
    mass: Expr | None
    peak: Expr | None
    norm: Expr | None
    offset_mass: Expr | None
    safe_weight: Expr  # weight and mass, guarded where needed so that a NaN logit always gives a NaN
    safe_mass: Expr | None
    params: Mapping[str, float]
    mass_degree: float
    bias: str

    def __init__(
        self,
        weight: Any,
        mass: Any = None,
        peak: Any = None,
        norm: Any = None,
        offset_mass: Any = None,
        params: Mapping[str, float] | None = None,
        *,
        bias: str | None = None,
        name: str | None = None,
        title: str | None = None,
        paper: str | None = None,
        summary: str | None = None,
    ) -> None:
        own = self.__dict__
        own["params"] = MappingProxyType(_checked_params(params))
        given = {"weight": weight, "mass": mass, "peak": peak, "norm": norm, "offset_mass": offset_mass}
        if weight is None:
            raise TypeError("weight: a formula needs at least a weight, such as 'exp(s - m)'")
        for part in given:
            own[part] = None if given[part] is None else self._read(part, given[part], peak is not None)
        own.update(name=name, title=title or name, paper=paper, summary=summary)
        if mass is None and (norm is not None or offset_mass is not None):
            raise FormulaError("mass: norm and offset_mass act on the summed mass, but no mass is given")
        own["mass_degree"] = invariance.mass_degree(self.mass, self.norm, self.params)
        if self.peak is not None:
            parts = {part: own[part] for part in ("weight", "mass", "offset_mass", "norm")}
            invariance.check(parts, self.mass_degree, self.params)
        if bias not in (None, *_BIASES):
            raise ValueError(f"bias: expected 'logit', 'strength' or None, not {bias!r}")
        own["bias"] = bias or ("strength" if self.signed else "logit")
        own.update(safe_weight=_guarded(self.weight), safe_mass=self.mass and _guarded(self.mass))

    def _read(self, part: str, given: Any, has_peak: bool) -> Expr:
        symbols = [*_SYMBOLS[part], *self.params]
        if not has_peak and "m" in symbols:
            symbols.remove("m")
        if part == "norm" and given in FUNCTIONS and FUNCTIONS[given] == 1:
            given = make(given, symbol("z"))
        return parse(_as_text(part, given), symbols, argument=part)

    def row(self, logits: Tensor, **values: Tensor | float) -> Tensor:
        """Weights of a row of visible keys; the last dimension of ``logits`` runs over the keys.

        ``values`` may give parameters other than their defaults, and i, the position of the row (default: the last key's).

        >>> import torch
        >>> Formula("max(s, 0)/n").row(torch.tensor([2.0, -1.0]))
        tensor([1., 0.])
        """
        return weights_of_row(self, logits, values)

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"a Formula cannot be changed (attribute {attribute!r}); make a new one")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        parts = ", ".join(f"{field}={value!r}" for field, value in self.to_dict().items())
        return f"Formula({parts})"

    def __reduce__(self) -> tuple:
        return Formula.from_dict, (self.to_dict(),)

    @cached_property
    def uses(self) -> frozenset[str]:
        """All symbols and parameters that occur anywhere."""
        parts = (self.weight, self.mass, self.peak, self.norm, self.offset_mass)
        return frozenset().union(*(part.symbols for part in parts if part is not None))

    @cached_property
    def signed(self) -> bool:
        """Can a weight be negative (with the default parameters)?"""
        from unsoft.formula.analysis import is_signed

        return is_signed(self)

    @cached_property
    def properties(self) -> Properties:
        """What the formula promises, found by analysing it."""
        from unsoft.formula.analysis import analyse

        return analyse(self)

    @cached_property
    def key(self) -> str:
        """Everything that decides the numbers, as one canonical line of JSON; names and papers are left out."""
        numeric = self.to_dict()
        for field in ("name", "title", "paper", "summary"):
            numeric.pop(field, None)
        return json.dumps(numeric, sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=512)
    def from_key(key: str) -> Formula:
        """The formula of a :attr:`key`."""
        return Formula.from_dict(json.loads(key))

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary (text, numbers) that :meth:`from_dict` turns back into an equal formula."""
        parts = {part: str(self.__dict__[part]) for part in _SYMBOLS if self.__dict__[part] is not None}
        about = {field: self.__dict__[field] for field in ("name", "title", "paper", "summary")}
        if about["title"] == about["name"]:
            del about["title"]
        about = {field: text for field, text in about.items() if text is not None}
        params = {"params": dict(self.params)} if self.params else {}
        return parts | params | {"bias": self.bias} | about

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Formula:
        """The inverse of :meth:`to_dict`."""
        return Formula(**content)


def _as_text(part: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, Expr):
        return str(given)
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return str(number(given))
    if type(given).__module__.partition(".")[0] == "sympy":
        from unsoft.formula.sympy_bridge import from_sympy

        return str(from_sympy(given))
    raise TypeError(f"{part}: expected formula text, a number, an Expr or a SymPy expression, not {type(given).__name__}")


def _checked_params(params: Mapping[str, float] | None) -> dict[str, float]:
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"params: expected a mapping from name to default value, not {type(params).__name__}")
    checked = {}
    for name, default in sorted((params or {}).items()):
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name in _RESERVED:
            raise FormulaError(
                f"params: {name!r} cannot be the name of a parameter; use letters, digits and _, starting with a"
                f" letter, and none of {' '.join(sorted(_RESERVED))}"
            )
        if isinstance(default, bool) or not isinstance(default, (int, float)) or not math.isfinite(default):
            raise FormulaError(f"params: the default of {name!r} must be a finite number, not {default!r}")
        checked[name] = float(default)
    return checked


def _guarded(expr: Expr) -> Expr:
    """where(s == s, expr, s) if a comparison, or a missing s, could swallow a NaN logit."""
    swallows = "s" not in expr.symbols or any(node.op in COMPARISONS for node in postorder(expr))
    s = symbol("s")
    return make("where", make("eq", s, s), expr, s) if swallows else expr
