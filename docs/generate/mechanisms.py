"""Write docs/mechanisms.md from the formulas and docstrings of src/unsoft/mechanisms.

``python docs/generate/mechanisms.py``
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

from unsoft.files import write_whole
from unsoft.formula import Formula
from unsoft.mechanisms import mechanisms
from unsoft.modules.registry import modifiers
from unsoft.modules.spec import MechanismSpec

PAGE = Path(__file__).parents[1] / "mechanisms.md"
_HEAD = """<!-- Written by docs/generate/mechanisms.py; do not edit by hand. -->

# Mechanisms

A mechanism turns the logits s of a row into weights. Pass its name to `unsoft.attention`, `unsoft.mechanism`,
`unsoft.hf.swap` or any command. [Choose a mechanism](choose.md) compares them; `unsoft show cog` prints one.

![The weight of a key against its logit, for each formula](mechanisms.svg)
"""
_COLUMNS = """*Signed* weights may be negative. *Sparse* ones are exactly 0 for a whole interval of logits.
Both, and the row sum, are derived from the formula and tested.
"""
_MODIFIERS = """## Modifiers

Write a modifier in front of a name, as in `"logn+cog"` or `"gated+logn+gpam"`:
"""
FAMILIES = {
    "Softmax and close relatives": "softmax softmax1 ssmax sigmoid l2 rbf hstu affine-scaled",
    "Signed": "cog sinh swishmax tanh identity polynomial gpam differential differential2 tda signed-dual"
    " parallax",
    "Sparse": "softpick sparsemax entmax entmax15 asentmax elastic relu relu2 gau",
    "Duplicates count once": "magnitude density cubit",
    "Forgetting and positions": "fox dynamic-alibi stick-breaking",
    "Linear time": "linear-elu1 linear-exp linear-identity linear-relu linear-taylor2 cosformer performer"
    " retention decay deltanet gated-deltanet kda zeros",
}
"""Names by family, in the order of the page; others come last."""


def mechanism_page() -> str:
    """Return the page as Markdown."""
    rows = mechanisms().rows()
    by_name = dict(zip(mechanisms(), rows, strict=True))
    listed = {name for names in FAMILIES.values() for name in names.split()}
    families = FAMILIES | {"Others": " ".join(by_name.keys() - listed)}
    lines = []
    for family, names in families.items():
        own = [name for name in names.split() if name in by_name]
        if own:
            lines += [
                f"**{family}**",
                "",
                "| name | weights | signed | row sum | sparse |",
                "|---|---|---|---|---|",
            ]
            lines += [_row(by_name[name], mechanisms()[name].summary) for name in own]
            lines += [""]
    sections = [
        _section(row["name"], name, mechanism)
        if isinstance(mechanism, Formula)
        else _family_section(row["name"], name, mechanism)
        for row, (name, mechanism) in zip(rows, mechanisms().items(), strict=True)
    ]
    notes = [f"- `{modifier.name}+...`: {modifier.summary}" for modifier in modifiers()]
    return "\n".join([_HEAD, *lines, _COLUMNS, _MODIFIERS, *notes, "", *sections])


def _row(row: dict[str, str], summary: str) -> str:
    cells = [f"[{row['name']}](#{_anchor(row['name'])})", summary]
    cells += [row[key] for key in ("signed", "row sum", "sparse")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _anchor(label: str) -> str:
    return "".join(c for c in label.lower() if c.isalnum() or c in "-_")


def _section(label: str, name: str, formula: Formula) -> str:
    parts = {
        k: v for k, v in formula.to_dict().items() if k in ("weight", "mass", "offset_mass", "norm", "peak")
    }
    written = ", ".join(f"{part} `{text}`" for part, text in parts.items())
    body = [f"## {label}", f"$${formula.latex()}$$", f"As written: {written}.", *_docstring(name)]
    return "\n\n".join(body) + "\n"


def _family_section(label: str, name: str, spec: MechanismSpec) -> str:
    """Return the section of a family: the docstring of its file, which several families may share."""
    if spec.family is None:
        raise TypeError(f"{label} is a formula with something around it, and has no page of its own")
    own = f"unsoft.mechanisms.{name.replace('-', '_')}"
    home = own if importlib.util.find_spec(own) is not None else spec.family.build.__module__
    module = importlib.import_module(home)
    text = inspect.cleandoc(module.__doc__ or "").partition("\n>>>")[0].replace("``", "`")
    return f"## {label}\n\n{text.strip()}\n"


def _docstring(name: str) -> list[str]:
    """Return the paragraphs of the mechanism's docstring without the formula, which is shown in LaTeX."""
    module = importlib.import_module(f"unsoft.mechanisms.{name}")
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    first = paragraphs[0].partition(": ")[2]
    shown = [first[:1].upper() + first[1:]]
    for paragraph in paragraphs[1:]:
        if paragraph.startswith(">>>"):
            shown.append(f"```pycon\n{paragraph}\n```")
        elif not paragraph.startswith("    "):
            shown.append(re.sub(r"\s(?=Limitations: )", "\n\n", paragraph).replace("``", "`"))
    return shown


if __name__ == "__main__":
    write_whole(PAGE, mechanism_page().encode())
