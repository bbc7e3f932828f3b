"""The argument MECHANISM: a name, or a formula as written in a paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from unsoft.cli.arguments import wrong
from unsoft.cli.completion import complete_mechanism
from unsoft.cli.terminal import note

_HELP = "A name such as cog or logn+cog (see unsoft list), or a formula such as 'tanh(s)*exp(abs(s))'"


def _argument(help: str) -> Any:
    return typer.Argument(
        metavar="MECHANISM", help=help, show_default=False, autocompletion=complete_mechanism
    )


Name = Annotated[str, _argument(f"{_HELP}.")]
OptionalName = Annotated[str, _argument(f"{_HELP}; default: softmax.")]
Names = Annotated[list[str] | None, _argument(f"{_HELP}; may be repeated.")]


def read_mechanisms(texts: Sequence[str] | None) -> list[str]:
    """Return mechanisms as names, each once; a formula is in braces, with a normaliser.

    A formula with a name can be used again by its name, with modifiers before it.

    >>> read_mechanisms(["cog", "name=mine;weight=s/n", "logn+mine"])
    ['cog', '{name=mine;weight=s/n}', 'logn+{name=mine;weight=s/n}']
    """
    from unsoft.lab.compare.candidate import in_braces, is_name, read_formula
    from unsoft.modules.registry import parts_of

    own: dict[str, str] = {}
    selected = []
    for text in texts or ():
        if is_name(text):
            *modifiers, base = parts_of(text)
            selected.append("+".join((*modifiers, own.get(base, base))))
            continue
        try:
            formula, about = read_formula(text)
        except ValueError as problem:
            raise wrong(str(problem), "'MECHANISM'") from None
        name = formula.name or text
        if name in own:
            raise wrong(f"two formulas are called {name!r}", "'MECHANISM'")
        own[name] = f"{{{text.strip()}}}"
        if about.startswith("normalise="):
            note(about)
            own[name] = in_braces(formula)
        selected.append(own[name])
    return list(dict.fromkeys(selected))


def read_mechanism(text: str) -> str:
    """Return one mechanism as a name.

    >>> read_mechanism("weight=s/n")
    '{weight=s/n}'
    """
    return read_mechanisms([text])[0]
