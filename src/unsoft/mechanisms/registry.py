"""The list of mechanisms. Each file beside this one registers its own; adding a file is enough.

>>> resolve("relu2").weight
Expr('max(s, 0)**2/n')
>>> resolve("polynomial(2)").weight
Expr('s**2/sqrt(n)')
"""

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Callable

from unsoft.formula import Formula

Factory = Callable[..., Formula]

_registered: dict[str, Formula | Factory] = {}
_made: dict[str, Formula] = {}  # by the text asked for, such as "polynomial(3)"
_discovery = threading.RLock()
_discovered: list[bool] = []
_CALL = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)\s*(?:\(\s*([-+0-9.eE]*)\s*\))?\s*")


def register(name: str, mechanism: Formula | Factory) -> None:
    """Adds a mechanism of your own, a formula or a function of one number that makes one, under a new name.

    >>> register("cog", Formula("s"))
    Traceback (most recent call last):
    ValueError: name: a mechanism called 'cog' exists already
    """
    discover()
    builtin(name, mechanism)


def builtin(name: str, mechanism: Formula | Factory) -> None:
    """What the files of this folder call: :func:`register` without looking for other files first."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise ValueError(
            f"name: expected lower case letters, digits, - and _, starting with a letter, not {name!r}"
        )
    if not isinstance(mechanism, Formula) and not callable(mechanism):
        raise TypeError(
            f"mechanism: expected a Formula or a function that makes one, not {type(mechanism).__name__}"
        )
    if name in _registered:
        raise ValueError(f"name: a mechanism called {name!r} exists already")
    _registered[name] = mechanism


def resolve(mechanism: str | Formula) -> Formula:
    """The formula of a mechanism given by name ("cog", "polynomial(3)") or directly."""
    if isinstance(mechanism, Formula):
        return mechanism
    if not isinstance(mechanism, str):
        raise TypeError(f"mechanism: expected a name or a Formula, not {type(mechanism).__name__}")
    _prepare(mechanism)
    return _made[mechanism]


def _prepare(text: str) -> bool:
    """Makes the formula called ``text`` unless that has been done."""
    if text not in _made:
        _made[text] = _make(text)
    return True


# As torch.compiler.assume_constant_result does (which would import all of dynamo): a compiled caller runs
# this while it is traced, and then sees no more than a look-up in a dictionary.
_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _make(text: str) -> Formula:
    match = _CALL.fullmatch(text)
    name, argument = match.groups() if match else (text, None)
    if name not in _registered and not _found_in_its_file(name):
        discover()
    if name not in _registered:
        raise ValueError(_unknown(text, name))
    found = _registered[name]
    if isinstance(found, Formula):
        if argument is not None:
            raise ValueError(f"mechanism: {name} takes no number in brackets; write {name!r}, not {text!r}")
        return found
    if not argument:
        return found()
    try:
        number = float(argument)
    except ValueError:
        raise ValueError(
            f"mechanism: {argument!r} in {text!r} is not a number; write for example '{name}(2)'"
        ) from None
    return found(int(number) if number.is_integer() else number)


def names() -> list[str]:
    """Names of all mechanisms in alphabetical order."""
    discover()
    return sorted(_registered)


def label(name: str) -> str:
    """The name, with the argument of a parametrised mechanism: "polynomial(p)"."""
    found = _registered[name]
    if isinstance(found, Formula):
        return name
    return f"{name}({', '.join(inspect.signature(found).parameters)})"


def _found_in_its_file(name: str) -> bool:
    """Imports the file called like the mechanism, if there is one; importing all of them would take longer."""
    with _discovery:
        if _discovered or not name.isidentifier():
            return False
        if importlib.util.find_spec(f"{__package__}.{name}") is not None:
            importlib.import_module(f"{__package__}.{name}")
        return name in _registered


def discover() -> None:
    """Imports every file of this folder once; each of them adds its mechanism."""
    with _discovery:
        if not _discovered:
            package = sys.modules[__package__]
            for module in pkgutil.iter_modules(package.__path__, f"{__package__}."):
                importlib.import_module(module.name)
            _discovered.append(True)


def _unknown(text: str, name: str) -> str:
    near = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.4)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    return f"mechanism: unknown name {text!r}{suggestion} (known: {', '.join(names())})"
