"""Mechanisms that others bring: ``unsoft.register``, and packages that register by an entry point."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsoft.errors import PluginWarning
from unsoft.formula import Formula, Interval, Properties
from unsoft.formula.formula import formula_text
from unsoft.modules import registry
from unsoft.modules.pointwise import field_family
from unsoft.modules.registry import parts_of
from unsoft.modules.spec import Factory, Family

if TYPE_CHECKING:
    from unsoft.modules.module import Mechanism
    from unsoft.modules.pointwise import FieldSource

PLUGINS = "unsoft.mechanisms"
"""The group of entry points by which other packages bring mechanisms."""
_homes: dict[str, str] = {}  # of mechanisms that others registered: the module that did


def register(
    name: str,
    mechanism: Formula | Factory | type[Mechanism],
    *,
    summary: str = "",
    paper: str | None = None,
    argument: str | None = None,
    definition: Callable[..., Any] | None = None,
    fields_from: Callable[..., FieldSource] | None = None,
    **promises: Any,
) -> None:
    """Register a mechanism of your own under a new name, which then works wherever a name does.

    ``mechanism`` is a formula, a function of one number that makes one, or a class: a subclass of
    :class:`unsoft.nn.Mechanism`, made as ``cls(layer_spec, **options)``. Of a class, ``argument`` is the
    keyword that a number in brackets sets ("mine(3)"), and ``promises`` says what is true of its weights:
    ``signed=``, ``row_sum=``, ``l1=``, ``sparse=``, ``needs_length=``, ``continuous=`` (see
    ``unsoft.Formula.properties``); ``unsoft.testing.check_mechanism(name)`` holds it to them, and to its
    ``definition`` in plain torch if there is one (unsoft.modules.definition says what that gets and
    returns).

    ``fields_from`` is for a formula with fields: a class of :class:`unsoft.nn.FieldSource` that computes them
    from queries, keys or the hidden state.

    Names live as long as the process, or until ``unregister(name)``. A saved model remembers the module that
    called this function, so that loading it elsewhere can say what has to be imported first. A package can do
    that for its users by an entry point of the group ``unsoft.mechanisms`` that names the module.

    >>> import torch, unsoft
    >>> class Average(unsoft.nn.WrittenOut):
    ...     "The same weight for every key."
    ...     def weights(self, logits, visible):
    ...         return visible.to(logits.dtype) / visible.sum(-1, keepdim=True).clamp(min=1)
    >>> unsoft.register("average", Average, row_sum="1", l1="1", signed=False)
    >>> unsoft.attention(*(torch.ones(1, 2, 3, 4) for _ in range(3)), "average").sum()
    tensor(24.)
    >>> unregister("average")
    >>> register("cog", Formula("s"))
    Traceback (most recent call last):
    ValueError: name: a mechanism called 'cog' exists already
    """
    registry.discover()
    home = sys._getframe(1).f_globals.get("__name__", "__main__")
    if fields_from is not None and not isinstance(mechanism, Formula):
        raise TypeError(
            f"register: argument 'fields_from' is for formulas, not for {type(mechanism).__name__}; a class"
            " computes what it needs itself"
        )
    if isinstance(mechanism, type):
        family_of_class = _family_of(name, mechanism, summary, paper, argument, promises)
        registry.builtin(name, family_of_class, definition=definition)
    elif promises or argument or paper or summary:
        raise TypeError(
            "register: summary, paper, argument and promises are for classes; a formula has them of its own"
        )
    elif isinstance(mechanism, Formula) and fields_from is not None:
        field_family(name, mechanism, fields_from=fields_from, definition=definition)
    else:
        registry.builtin(name, mechanism, definition=definition)
    _homes[name] = home


def _family_of(
    name: str, cls: type, summary: str, paper: str | None, argument: str | None, promises: dict[str, Any]
) -> Family:
    from unsoft.modules.module import Mechanism

    if not issubclass(cls, Mechanism):
        raise TypeError(
            f"mechanism: {cls.__name__} must be a subclass of unsoft.nn.Mechanism (an nn.Module that knows"
            " masks, caches and layers), or of unsoft.nn.WrittenOut, which needs no more than a method"
            " weights(logits, visible)"
        )
    known = [field.name for field in fields(Properties)]
    for promise in promises:
        if promise not in known:
            raise TypeError(f"register: unknown promise {promise!r} (known: {', '.join(known)})")
    sums: dict[str, Any] = {
        name: Interval.read(promises[name]) for name in ("row_sum", "l1") if name in promises
    }
    properties = Properties(**promises | sums)
    first_line = inspect.cleandoc(cls.__doc__ or name).partition("\n")[0]
    return Family(name, cls, summary or first_line, properties, None, paper, argument)


def unregister(name: str) -> None:
    """Remove a name that :func:`register` added, for example to run a notebook cell again."""
    if name not in _homes:
        raise ValueError(f"name: {name!r} was not given by unsoft.register")
    del _homes[name]
    registry.forget(name)


def foreign_homes(text: str) -> dict[str, str]:
    """Return the registered mechanisms in a text such as "gated+mine(3)" that are not built in, with the
    modules that registered them."""
    parts = [registry.split_name(text, part)[0] for part in parts_of(text)]
    return {name: _homes[name] for name in parts if name in _homes}


def self_contained(text: str) -> str:
    """Return a name in which formulas that others registered are written out in braces.

    Such a name needs no registration. Classes cannot be written out: their names stay.

    >>> register("mine", Formula("s/n"))
    >>> self_contained("gated+mine")
    'gated+{weight=s/n;bias=strength;name=mine}'
    >>> unregister("mine")
    """
    return "+".join(_written_out(text, part) for part in parts_of(text))


def _written_out(text: str, part: str) -> str:
    if registry.split_name(text, part)[0] in _homes:
        spec = registry.resolve(part)
        if isinstance(spec, Formula) and not spec.fields:
            return f"{{{formula_text(spec.change(name=part))}}}"
    return part


def import_plugin(name: str) -> None:
    """Import a module by its name, or a file by its path; it registers mechanisms or tasks.

    Raises what the module raises, ImportError or OSError if it cannot be found.
    """
    path = Path(name)
    if path.suffix != ".py":
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def load_plugins() -> None:
    """Load the mechanisms of installed packages; :func:`unsoft.modules.registry.discover` calls it once."""
    for entry in metadata.entry_points(group=PLUGINS):
        _load_plugin(entry)


def _load_plugin(entry: metadata.EntryPoint) -> None:
    """Load an entry point: its module registers mechanisms, or it is the mechanism itself."""
    try:
        loaded = entry.load()
        if not inspect.ismodule(loaded) and entry.name not in registry.names():
            register(entry.name, loaded)
            _homes[entry.name] = entry.module
    except Exception as error:  # one package that does not work must not take all mechanisms away
        text = (
            f"the plug-in {entry.name!r} ({entry.value}) could not be loaded: {type(error).__name__}: {error}"
        )
        warnings.warn(text, PluginWarning, stacklevel=2)
