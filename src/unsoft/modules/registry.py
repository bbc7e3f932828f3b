"""Mechanisms by name. Each file of unsoft/mechanisms registers its own; adding a file is enough.

A name refers to a formula, or to a family: a module with weights or a state of its own. Modifiers come
before a name, joined by "+", and act from right to left: on the formula, or around the module. A formula in
braces, "logn+{weight=s*exp(s - m);mass=abs(s)*exp(s - m);peak=s}", needs no registration: such a name can be
stored in files and sent to other processes.

>>> resolve("relu2").weight
Expr('max(s, 0)**2/n')
>>> resolve("polynomial(2)").weight
Expr('s**2/sqrt(n)')
>>> resolve("logn(512)+softmax").peak
Expr('s*(log(n)/6.238324625039508)')
>>> resolve("gated+gpam").name
'gated+gpam'
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from unsoft.checks import did_you_mean, shortened
from unsoft.formula import Formula, Properties
from unsoft.modules.spec import AppliedModifier, Factory, Family, MechanismSpec, Modifier
from unsoft.tracing import constant_in_graph

if TYPE_CHECKING:
    from unsoft.modules.module import Mechanism
from unsoft.formula.formula import formula_from_text

_FOLDER = "unsoft.mechanisms"
_registered: dict[str, Formula | Factory | Family] = {}
_modifiers: dict[str, Modifier] = {}
_definitions: dict[str, Callable[..., Any]] = {}
_resolved: dict[str, Formula | MechanismSpec] = {}  # by the whole name, such as "polynomial(3)"
_discovery = threading.RLock()
_all_files_imported = False
_LONGEST_NAME = 64
"""Characters; names are parts of file names and columns of tables."""
_CALL = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)\s*(?:\(\s*([-+0-9.eE]*)\s*\))?\s*")


def builtin(
    name: str, mechanism: Formula | Factory | Family, *, definition: Callable[..., Any] | None = None
) -> None:
    """Register a mechanism from its file in unsoft/mechanisms; ``unsoft.register`` is for users.

    For ``definition`` see definition.py.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise ValueError(
            f"name: expected lower case letters, digits, - and _, starting with a letter, not {name!r}"
        )
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"name: expected at most {_LONGEST_NAME} characters, not {len(name)} ({name[:20]!r}...)"
        )
    if not isinstance(mechanism, (Formula, Family)) and not callable(mechanism):
        raise TypeError(
            "mechanism: expected a Formula, a function that makes one or a class, not"
            f" {type(mechanism).__name__}"
        )
    if name in _registered:
        raise ValueError(f"name: a mechanism called {name!r} exists already")
    _registered[name] = mechanism
    if definition is not None:
        _definitions[name] = definition


def forget(name: str) -> None:
    """Unregister a mechanism and drop everything built from it."""
    for by_name in (_registered, _definitions):
        by_name.pop(name, None)
    for text in [text for text in _resolved if name in text]:
        del _resolved[text]


def definition(name: str) -> Callable[..., Any] | None:
    """Return the function ``definition`` of the file of a mechanism or modifier, or the one registered."""
    discover()
    own: Callable[..., Any] | None = getattr(_file_of(name), "definition", None)
    return _definitions.get(name, own)


def family(
    name: str,
    build: Callable[..., Mechanism],
    *,
    summary: str,
    properties: Properties,
    base: str | Formula | None = None,
    paper: str | None = None,
    argument: str | None = None,
    takes: Callable[..., Any] | None = None,
    definition: Callable[..., Any] | None = None,
) -> None:
    """Register a mechanism that is a module: ``build(layer_spec, **options)``."""
    spec = Family(name, build, summary, properties, base, paper, argument, takes)
    builtin(name, spec, definition=definition)


def modifier(
    name: str,
    change: Callable[..., Any],
    *,
    summary: str,
    of_formula: bool = False,
    definition: Callable[..., Any] | None = None,
) -> None:
    """Register a modifier that wraps a module, or (``of_formula``) makes a formula from a formula and
    optionally a number. A family with the name of a modifier wraps its usual base."""
    if name in _modifiers or isinstance(_registered.get(name), Formula):
        raise ValueError(f"name: a mechanism or modifier called {name!r} exists already")
    _modifiers[name] = Modifier(name, change, of_formula, summary)
    if definition is not None:
        _definitions[name] = definition


def modifiers() -> list[Modifier]:
    """Return all modifiers in alphabetical order."""
    discover()
    return [_modifiers[name] for name in sorted(_modifiers)]


def resolve_formula(mechanism: str | Formula) -> Formula:
    """Return the formula of a mechanism; raise ValueError if it is not a formula."""
    spec = resolve(mechanism)
    if isinstance(spec, MechanismSpec):
        raise ValueError(
            f"mechanism: {spec.name!r} is not a formula; make a module of it with unsoft.mechanism(...)"
        )
    return spec


def resolve(mechanism: str | Formula) -> Formula | MechanismSpec:
    """Return the formula or the specification of a mechanism ("cog", "polynomial(3)", "logn+gpam")."""
    if isinstance(mechanism, Formula):
        return mechanism
    if not isinstance(mechanism, str):
        raise TypeError(f"mechanism: expected a name or a Formula, not {type(mechanism).__name__}")
    _ensure_resolved(mechanism)
    return _resolved[mechanism]


@constant_in_graph  # a compiled caller sees no more than a look-up in a dictionary
def _ensure_resolved(text: str) -> bool:
    if text not in _resolved:
        _resolved[text] = _from_text(text)
    return True


def _from_text(text: str) -> Formula | MechanismSpec:
    with _discovery:
        if _all_files_imported or _file_of(text) is None or text not in _registered:
            discover()  # importing all files takes longer
    *before, base = parts_of(text)
    spec = _formula_in_braces(base) or _base(text, base)
    for part in reversed(before):
        spec = _modified(text, part, spec)
    return replace(spec, name=text) if isinstance(spec, MechanismSpec) else spec


def split_name(text: str, part: str) -> tuple[str, float | int | None, bool]:
    """Split a part of ``text`` into name, number in brackets, and True if it has brackets."""
    match = _CALL.fullmatch(part)
    name, argument = match.groups() if match else (part, None)
    if not argument:
        return name, None, argument is not None
    try:
        number = float(argument)
    except ValueError:
        raise ValueError(
            f"mechanism: {argument!r} in {text!r} is not a number; write for example '{name}(2)'"
        ) from None
    return name, int(number) if number.is_integer() else number, True


def _base(text: str, part: str) -> Formula | MechanismSpec:
    name, number, brackets = split_name(text, part)
    if name in _modifiers and name not in _registered:
        raise ValueError(
            f"mechanism: {name!r} modifies a mechanism and needs one after it, such as '{name}+softmax'"
        )
    if name not in _registered:
        raise ValueError(_unknown(text, name))
    registered = _registered[name]
    takes_none = isinstance(registered, Formula) and brackets
    if isinstance(registered, Family):
        takes_none = number is not None and registered.argument is None
    if takes_none:
        raise ValueError(f"mechanism: {name} takes no number in brackets; write {name!r}, not {text!r}")
    if isinstance(registered, Formula):
        return registered
    if isinstance(registered, Family):
        base = None if registered.base is None else resolve_formula(registered.base)
        return MechanismSpec(name, registered, base, number)
    return registered() if number is None else registered(number)


def _modified(text: str, part: str, inner: Formula | MechanismSpec) -> Formula | MechanismSpec:
    """Return ``inner`` with the modifier ``part`` before it."""
    name, number, _ = split_name(text, part)
    if name not in _modifiers:
        hint = did_you_mean(name.lower(), _modifiers, cutoff=0.4)
        known = hint or f" (known: {', '.join(sorted(_modifiers))})"
        raise ValueError(f"mechanism: unknown modifier {shortened(name)!r} in {shortened(text)!r}{known}")
    modifier = _modifiers[name]
    arguments = () if number is None else (number,)
    if not modifier.of_formula:
        spec = inner if isinstance(inner, MechanismSpec) else MechanismSpec(text, None, inner)
        return replace(spec, modifiers=(*spec.modifiers, AppliedModifier(modifier.change, arguments)))
    if isinstance(inner, Formula):
        return cast("Formula", modifier.change(inner, *arguments))
    if inner.formula is None or inner.modifiers:
        raise ValueError(
            f"mechanism: in {text!r}, {name} rewrites a formula and must stand directly before one (or before"
            " a family that runs one)"
        )
    return replace(inner, formula=modifier.change(inner.formula, *arguments))


def names() -> list[str]:
    """Return the names of all mechanisms in alphabetical order."""
    discover()
    return sorted(_registered)


def takes_number(name: str) -> bool:
    """Return True for a mechanism made by a function of one number, such as polynomial(p)."""
    return not isinstance(_registered[name], (Formula, Family))


def label(name: str) -> str:
    """Return the name, with the argument of a parametrised mechanism: "polynomial(p)"."""
    registered = _registered[name]
    if isinstance(registered, Formula):
        return name
    if isinstance(registered, Family):
        return name if registered.argument is None else f"{name}({registered.argument})"
    return f"{name}({', '.join(inspect.signature(registered).parameters)})"


def _file_of(name: str) -> ModuleType | None:
    """Return the imported file of unsoft/mechanisms that is named like a mechanism or modifier, if any."""
    file = name.replace("-", "_")
    if not file.isidentifier() or importlib.util.find_spec(f"{_FOLDER}.{file}") is None:
        return None
    return importlib.import_module(f"{_FOLDER}.{file}")


def discover() -> None:
    """Import every file of unsoft/mechanisms once, which registers its mechanism, and then the plugins."""
    global _all_files_imported
    with _discovery:
        if not _all_files_imported:
            for module in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__, f"{_FOLDER}."):
                importlib.import_module(module.name)
            _all_files_imported = True
            from unsoft.modules.plugins import load_plugins

            load_plugins()


def _unknown(text: str, name: str) -> str:
    hint = did_you_mean(name.lower(), names())
    return f"mechanism: unknown name {shortened(text)!r}{hint or '; unsoft.mechanisms() lists them'}"


_PLUS = re.compile(r"\+(?![^{}]*\})")


def parts_of(text: str) -> list[str]:
    """Return the modifiers and the mechanism that a name is made of.

    >>> parts_of("logn + {weight=s + 1}")
    ['logn', '{weight=s + 1}']
    """
    return [part.strip() for part in _PLUS.split(text)]


def _formula_in_braces(part: str) -> Formula | None:
    """Return the formula inside braces; None for a part that is a name."""
    return formula_from_text(part[1:-1]) if part.startswith("{") and part.endswith("}") else None


def label_of(text: str) -> str:
    """Return the name to display: a formula in braces by its own name, or else its weight.

    >>> label_of("logn+{name=mine;weight=s/n}"), label_of("{weight=s/n}"), label_of("magnitude+cog")
    ('logn+mine', 's/n', 'magnitude+cog')
    """
    if "{" not in text:
        return text
    parts = [(part, _formula_in_braces(part)) for part in parts_of(text)]
    return "+".join(
        part if formula is None else formula.name or str(formula.weight) for part, formula in parts
    )
