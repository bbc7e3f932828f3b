"""The list of mechanisms. Each file of the folder above registers its own; adding a file is enough.

A name stands for a formula, or for a family: a module with weights or a state of its own. Modifiers stand
before a name, joined by "+", and act from right to left: on the formula, or around the module.

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

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from unsoft.formula import Formula
from unsoft.formula.analysis import Properties
from unsoft.modules.inline import parts_of, written
from unsoft.modules.spec import AppliedModifier, Factory, Family, MechanismSpec, Modifier
from unsoft.tracing import constant_in_graph

if TYPE_CHECKING:
    from unsoft.modules.module import Mechanism

_FOLDER = "unsoft.mechanisms"
_registered: dict[str, Formula | Factory | Family] = {}
_modifiers: dict[str, Modifier] = {}
_definitions: dict[str, Callable[..., Any]] = {}
_promises: dict[str, Properties] = {}
_made: dict[str, Formula | MechanismSpec] = {}  # by the text asked for, such as "polynomial(3)"
_discovery = threading.RLock()
_discovered: list[bool] = []
_LONGEST_NAME = 64
"""Characters; names are parts of file names and columns of tables."""
_CALL = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)\s*(?:\(\s*([-+0-9.eE]*)\s*\))?\s*")


def builtin(
    name: str,
    mechanism: Formula | Factory | Family,
    *,
    promises: Properties | None = None,
    definition: Callable[..., Any] | None = None,
) -> None:
    """What the files of the folder call: ``unsoft.register`` without looking for other files first.

    ``promises`` of a formula are stated by hand, beside those that are found by analysing it; ``definition``:
    see definition.py.
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
    if promises is not None:
        _promises[name] = promises


def forget(name: str) -> None:
    """Takes a name away, and everything that was made by it."""
    for names in (_registered, _definitions, _promises):
        names.pop(name, None)
    for text in [text for text in _made if name in text]:
        del _made[text]


def definition(name: str) -> Callable[..., Any] | None:
    """The definition that the file of a mechanism or modifier holds."""
    discover()
    return _definitions.get(name)


def promises(name: str) -> Properties | None:
    """What the file of a formula says of it."""
    discover()
    return _promises.get(name)


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
    """Adds a mechanism that is a module: ``build(layer_spec, **options)``."""
    made = Family(name, build, summary, properties, base, paper, argument, takes)
    builtin(name, made, definition=definition)


def formula_modifier(
    name: str, change: Callable[..., Formula], *, summary: str, definition: Callable[..., Any] | None = None
) -> None:
    """Adds a modifier that makes a formula from a formula, and optionally a number."""
    _add_modifier(Modifier(name, change, True, summary), definition)


def module_modifier(
    name: str, change: Callable[..., Mechanism], *, summary: str, definition: Callable[..., Any] | None = None
) -> None:
    """Adds a modifier that stands around a module; a family of the same name is what it is around its usual
    base."""
    _add_modifier(Modifier(name, change, False, summary), definition)


def _add_modifier(modifier: Modifier, definition: Callable[..., Any] | None) -> None:
    if modifier.name in _modifiers or isinstance(_registered.get(modifier.name), Formula):
        raise ValueError(f"name: a mechanism or modifier called {modifier.name!r} exists already")
    _modifiers[modifier.name] = modifier
    if definition is not None:
        _definitions[modifier.name] = definition


def modifiers() -> list[Modifier]:
    """All modifiers in alphabetical order."""
    discover()
    return [_modifiers[name] for name in sorted(_modifiers)]


def resolve_formula(mechanism: str | Formula) -> Formula:
    """:func:`resolve` where only a formula will do."""
    found = resolve(mechanism)
    if isinstance(found, MechanismSpec):
        raise ValueError(
            f"mechanism: {found.name!r} is not a formula; make a module of it with unsoft.mechanism(...)"
        )
    return found


def resolve(mechanism: str | Formula) -> Formula | MechanismSpec:
    """What a mechanism given by name ("cog", "polynomial(3)", "logn+gpam") or directly stands for."""
    if isinstance(mechanism, Formula):
        return mechanism
    if not isinstance(mechanism, str):
        raise TypeError(f"mechanism: expected a name or a Formula, not {type(mechanism).__name__}")
    _prepare(mechanism)
    return _made[mechanism]


@constant_in_graph
def _prepare(text: str) -> bool:
    """Makes the formula called ``text`` unless that has been done."""
    if text not in _made:
        _made[text] = _make(text)
    return True


# As torch.compiler.assume_constant_result does (which would import all of dynamo): a compiled caller runs
# this while it is traced, and then sees no more than a look-up in a dictionary.


def _make(text: str) -> Formula | MechanismSpec:
    if not _found_in_its_file(text):
        discover()
    *before, base = parts_of(text)
    found = written(base) or _base(text, base)
    for part in reversed(before):
        found = _modified(text, part, found)
    if isinstance(found, MechanismSpec):
        return replace(found, name=text)
    return found


def split_name(text: str, part: str) -> tuple[str, float | int | None, bool]:
    """Name, number in brackets, and whether there were brackets."""
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
    found = _registered[name]
    if isinstance(found, Formula):
        if brackets:
            raise ValueError(f"mechanism: {name} takes no number in brackets; write {name!r}, not {text!r}")
        return found
    if isinstance(found, Family):
        if number is not None and found.argument is None:
            raise ValueError(f"mechanism: {name} takes no number in brackets; write {name!r}, not {text!r}")
        base = None if found.base is None else resolve_formula(found.base)
        return MechanismSpec(name, found, base, number)
    return found() if number is None else found(number)


def _modified(text: str, part: str, found: Formula | MechanismSpec) -> Formula | MechanismSpec:
    name, number, _ = split_name(text, part)
    if name not in _modifiers:
        known = ", ".join(sorted(_modifiers))
        near = difflib.get_close_matches(name.lower(), _modifiers, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"mechanism: unknown modifier {name!r} in {text!r}{hint} (known: {known})")
    modifier = _modifiers[name]
    arguments = () if number is None else (number,)
    if not modifier.of_formula:
        spec = found if isinstance(found, MechanismSpec) else MechanismSpec(text, None, found)
        return replace(spec, modifiers=(*spec.modifiers, AppliedModifier(modifier.change, arguments)))
    if isinstance(found, Formula):
        return cast("Formula", modifier.change(found, *arguments))
    if found.formula is None or found.modifiers:
        raise ValueError(
            f"mechanism: in {text!r}, {name} rewrites a formula and must stand directly before one (or before"
            " a family that runs one)"
        )
    return replace(found, formula=modifier.change(found.formula, *arguments))


def names() -> list[str]:
    """Names of all mechanisms in alphabetical order."""
    discover()
    return sorted(_registered)


def takes_number(name: str) -> bool:
    """Is it made by a function of one number, as polynomial(p) is?"""
    return not isinstance(_registered[name], (Formula, Family))


def label(name: str) -> str:
    """The name, with the argument of a parametrised mechanism: "polynomial(p)"."""
    found = _registered[name]
    if isinstance(found, Formula):
        return name
    if isinstance(found, Family):
        return name if found.argument is None else f"{name}({found.argument})"
    return f"{name}({', '.join(inspect.signature(found).parameters)})"


def _found_in_its_file(name: str) -> bool:
    """Imports the file called like the mechanism, if there is one;
    importing all of them would take longer."""
    file = name.replace("-", "_")
    with _discovery:
        if _discovered or not file.isidentifier():
            return False
        if importlib.util.find_spec(f"{_FOLDER}.{file}") is not None:
            importlib.import_module(f"{_FOLDER}.{file}")
        return name in _registered


def discover() -> None:
    """Imports every file of the folder once; each of them adds its mechanism."""
    with _discovery:
        if not _discovered:
            for module in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__, f"{_FOLDER}."):
                if not module.ispkg:
                    importlib.import_module(module.name)
            _discovered.append(True)
            from unsoft.modules.plugins import load_plugins

            load_plugins()


def _unknown(text: str, name: str) -> str:
    near = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.4)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    return f"mechanism: unknown name {text!r}{suggestion} (known: {', '.join(names())})"
