"""Arguments that select mechanisms: names, or ``--formula``. ``--mechanism`` still works, but is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.arguments import unset, wrong
from unsoft.cli.completion import complete_mechanism

if TYPE_CHECKING:
    from unsoft.formula import Formula


def _mechanism_argument(help: str, metavar: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete_mechanism)


def _mechanism_option(help: str) -> Any:
    return unset(help, "--mechanism", "-m", autocompletion=complete_mechanism, hidden=True)


Names = Annotated[
    list[str] | None,
    _mechanism_argument(
        "Names such as cog or magnitude+softmax, see unsoft list; without any, a selection.", "MECHANISM"
    ),
]
NamesOption = Annotated[list[str] | None, _mechanism_option("Mechanism names as an option; may be repeated.")]
Name = Annotated[
    str | None,
    _mechanism_argument("A name such as cog or magnitude+softmax; see unsoft list.", "MECHANISM"),
]
NameOption = Annotated[str | None, _mechanism_option("The mechanism name as an option.")]
_OWN = '"name=mine;weight=...;mass=...;peak=...;tau=2"; logn+mine puts a modifier before it'
Formulas = Annotated[list[str] | None, unset(f"Custom formula, {_OWN}; may be repeated.", "--formula")]
OneFormula = Annotated[str | None, unset(f"Custom formula, {_OWN}.", "--formula")]


def chosen(
    names: Sequence[str] | None, option: Sequence[str] | None, formulas: Sequence[str] | None
) -> list[str]:
    """Return the selected mechanisms as names; formulas are in braces and come last.

    A named formula can be used by its name, with modifiers before it; then it is not listed again.

    >>> chosen(["cog", "logn+mine"], None, ["name=mine;weight=s/n"])
    ['cog', 'logn+{name=mine;weight=s/n}']
    >>> chosen(None, ["cog"], ["weight=s/n"])
    ['cog', '{weight=s/n}']
    """
    from unsoft.modules.registry import parts_of

    texts: dict[str, str] = {}
    for text in formulas or ():
        name = read_formula(text).name or text
        if name in texts:
            raise wrong(f"two formulas are called {name!r}", "'--formula'")
        texts[name] = f"{{{text.strip()}}}"
    used = set()
    selected = []
    for name in dict.fromkeys((*(names or ()), *(option or ()))):
        *before, base = parts_of(name)
        if base in texts:
            used.add(base)
        selected.append("+".join((*before, texts.get(base, base))))
    return selected + [text for name, text in texts.items() if name not in used]


def chosen_one(word: str | None, option: str | None, formula: str | None, default: str | None = None) -> str:
    """Return the one selected mechanism as a name; a formula is in braces.

    >>> chosen_one("logn+mine", None, "name=mine;weight=s/n")
    'logn+{name=mine;weight=s/n}'
    """
    selected = chosen(*([text] if text is not None else None for text in (word, option, formula)))
    if len(selected) > 1:
        raise wrong(f"one mechanism is needed, not {len(selected)}", "'MECHANISM'")
    if not selected and default is None:
        raise wrong("which mechanism? Give a name (unsoft list shows them) or --formula", "'MECHANISM'")
    return selected[0] if selected else str(default)


def read_formula(text: str) -> Formula:
    """Parse "weight=...;mass=...;peak=..." (also norm, offset_mass, name); other names are parameters."""
    from unsoft.errors import FormulaError
    from unsoft.formula.formula import formula_from_text

    try:
        return formula_from_text(text)
    except FormulaError as problem:
        raise wrong(str(problem), "'--formula'") from None
