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

Every mechanism turns the logits s of a row into weights: a = weight(s) / norm(sum of mass(s) + offset),
where m is the largest peak(s) that the row sees and n is the number of keys that it sees. What the columns
promise is found by analysing the formula: *signed* weights may be negative; *sparse* ones are exactly 0 on a
whole interval of logits; *needs length* means that the formula uses n; *continuous* that no weight jumps when
its logit moves a little.
"""

_MODIFIERS = """Modifiers stand before a name, as in `"logn+cog"` or `"gated+logn+gpam"`:
"""


def mechanism_page() -> str:
    """Return the page as Markdown."""
    rows = mechanisms().rows()
    table = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([f"[{row['name']}](#{_anchor(row['name'])})", *list(row.values())[1:]] for row in rows),
    ]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    sections = [
        _section(row["name"], name, mechanism)
        if isinstance(mechanism, Formula)
        else _family_section(row["name"], name, mechanism)
        for row, (name, mechanism) in zip(rows, mechanisms().items(), strict=True)
    ]
    notes = [f"- `{modifier.name}+...`: {modifier.summary}" for modifier in modifiers()]
    return "\n".join([_HEAD, *lines, "", _MODIFIERS, *notes, "", *sections])


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
