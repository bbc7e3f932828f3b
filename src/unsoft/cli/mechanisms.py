"""How every command is told which mechanisms: as words, by ``--mechanism``, or as ``--formula``."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unsoft.formula import Formula


def complete_mechanism(incomplete: str) -> list[str]:
    """Names for the shell, from the files alone: torch would take longer than a reader waits."""
    import unsoft

    before, plus, start = incomplete.rpartition("+")
    files = pkgutil.iter_modules([str(Path(unsoft.__file__).parent / "mechanisms")])
    names = (file.name.replace("_", "-") for file in files if not file.ispkg)
    return [before + plus + name for name in names if name.startswith(start)]


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MECHANISM]...",
        help="Names such as cog or magnitude+softmax, see unsoft list; without any, a selection.",
        show_default=False,
        autocompletion=complete_mechanism,
    ),
]
NamesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mechanism",
        "-m",
        help="The same as an option; may be repeated.",
        show_default=False,
        autocompletion=complete_mechanism,
    ),
]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[MECHANISM]",
        help="A name such as cog or magnitude+softmax; see unsoft list.",
        show_default=False,
        autocompletion=complete_mechanism,
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--mechanism",
        "-m",
        help="The same as an option.",
        show_default=False,
        autocompletion=complete_mechanism,
    ),
]
_OWN = '"name=mine;weight=...;mass=...;peak=...;tau=2"; logn+mine puts a modifier before it'
Formulas = Annotated[
    list[str] | None,
    typer.Option("--formula", help=f"One of your own, {_OWN}; may be repeated.", show_default=False),
]
OneFormula = Annotated[
    str | None, typer.Option("--formula", help=f"One of your own, {_OWN}.", show_default=False)
]


def chosen(
    words: Sequence[str] | None, option: Sequence[str] | None, formulas: Sequence[str] | None
) -> list[str]:
    """All mechanisms that were asked for, each as a name; formulas stand in braces, and last.

    A formula with a name may be used by it, with modifiers before it; then it does not stand alone.

    >>> chosen(["cog", "logn+mine"], None, ["name=mine;weight=s/n"])
    ['cog', 'logn+{name=mine;weight=s/n}']
    >>> chosen(None, ["cog"], ["weight=s/n"])
    ['cog', '{weight=s/n}']
    """
    from unsoft.modules.inline import parts_of

    texts: dict[str, str] = {}
    for text in formulas or ():
        name = read_formula(text).name or text
        if name in texts:
            raise typer.BadParameter(f"two formulas are called {name!r}", param_hint="'--formula'")
        texts[name] = f"{{{text.strip()}}}"
    used = set()
    found = []
    for name in dict.fromkeys((*(words or ()), *(option or ()))):
        *before, base = parts_of(name)
        if base in texts:
            used.add(base)
        found.append("+".join((*before, texts.get(base, base))))
    return found + [text for name, text in texts.items() if name not in used]


def chosen_one(word: str | None, option: str | None, formula: str | None, default: str | None = None) -> str:
    """The only mechanism, as a name; a formula stands in braces.

    >>> chosen_one("logn+mine", None, "name=mine;weight=s/n")
    'logn+{name=mine;weight=s/n}'
    """
    found = chosen(*([text] if text is not None else None for text in (word, option, formula)))
    if len(found) > 1:
        raise typer.BadParameter(f"one mechanism is needed, not {len(found)}", param_hint="'MECHANISM'")
    if not found and default is None:
        raise typer.BadParameter(
            "which mechanism? Give a name (unsoft list shows them) or --formula", param_hint="'MECHANISM'"
        )
    return found[0] if found else str(default)


def read_formula(text: str) -> Formula:
    """Reads "weight=...;mass=...;peak=..." (also norm, offset_mass, name); other names are parameters."""
    from unsoft.errors import FormulaError
    from unsoft.formula.formula import formula_from_text

    try:
        return formula_from_text(text)
    except FormulaError as problem:
        raise typer.BadParameter(str(problem), param_hint="'--formula'") from None
