"""One page for each mechanism and modifier, made when the site is built: a file that is added to
``src/unsoft/mechanisms`` has its page without further ado.

The text is the mechanism's section of docs/mechanisms.md; the curve, the worked example, what was measured
(docs/choose.json, benchmarks/) and how to call it are added here. On the site docs/mechanisms.md itself is
the table, with links to these pages.
"""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import choose
import picture
from mechanisms import mechanism_page

from unsoft.formula import Formula
from unsoft.mechanisms import mechanisms
from unsoft.modules.registry import modifiers

FOLDER = "mechanisms"


def parts() -> tuple[str, dict[str, str]]:
    """The head of docs/mechanisms.md with its table, and the sections by the label of their mechanism."""
    head, modifying, *sections = re.split(r"^## ", mechanism_page(), flags=re.MULTILINE)
    head += f"## {modifying}"
    named = dict(section.split("\n", 1) for section in sections)
    wanted = [row["name"] for row in mechanisms().rows()]
    if list(named) != wanted:
        raise ValueError(
            f"docs/mechanisms.md has sections {list(named)}, the registry has mechanisms {wanted}"
        )
    return head, named


def overview() -> str:
    """The page "mechanisms" of the site."""
    head, named = parts()
    names = dict(zip(named, mechanisms(), strict=True))
    for label, name in names.items():
        head = re.sub(
            rf"^\| \[{re.escape(label)}\]\(#.*?\)", f"| [{label}]({FOLDER}/{name}.md)", head, flags=re.M
        )
    for modifier in modifiers():
        head = head.replace(
            f"- `{modifier.name}+...`", f"- [`{modifier.name}+...`]({FOLDER}/with-{modifier.name}.md)"
        )
    pages = [*(f"{FOLDER}/{name}" for name in names.values())]
    pages += [f"{FOLDER}/with-{modifier.name}" for modifier in modifiers()]
    return head + "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def pages() -> dict[str, str]:
    """Every page and picture of the folder, by file name."""
    made = {}
    measured, rows = choose.by_mechanism(), mechanisms().rows()
    for (label, text), (name, found), row in zip(parts()[1].items(), mechanisms().items(), rows, strict=True):
        curve = isinstance(found, Formula)
        if curve:
            made[f"{name}.svg"] = curve_of(name, found)
        made[f"{name}.md"] = page(label, name, found.summary, text, row, measured.get(name, []), curve)
    for modifier in modifiers():
        made[f"with-{modifier.name}.md"] = modifier_page(modifier)
    return made


def page(
    label: str, name: str, summary: str, text: str, row: dict[str, str], measured: list[str], curve: bool
) -> str:
    promised = [key for key in row if key != "name"]
    lines = [f"# {label}", "", f"**{summary[:1].upper()}{summary[1:]}.**", ""]
    if curve:
        about = f"The weight of one key under {name} as its logit goes from -4 to 4 among seven others"
        lines += [f"![{about}]({name}.svg)", ""]
    lines += [text.strip(), ""]
    if "```pycon" not in text and (example := example_of(name)):
        lines += ["```pycon", example, "```", ""]
    lines += [
        "## What it promises",
        "",
        "The battery (`unsoft.testing.check_mechanism`) holds it to this.",
        "",
    ]
    lines += table(promised, [[row[key] for key in promised]])
    if measured:
        lines += ["", "## Measured", "", *measured, ""]
    lines += ["", "## Use it", "", "```python", "import torch", "import unsoft", "", *calls(name), "```", ""]
    lines += [f"    unsoft compare {name} softmax --quick --out report     # side by side with softmax"]
    lines += [f"    unsoft swap smollm2 {name} --out folder                # into a transformers model", ""]
    if file := source_of(name):
        lines += [f"All of it is one file: `{file}`.", ""]
    return "\n".join(lines)


def calls(name: str) -> list[str]:
    return [
        "q, k, v = (torch.randn(1, 8, 256, 64) for _ in range(3))       # (batch, heads, length, dim)",
        f'y = unsoft.attention(q, k, v, "{name}", is_causal=True)',
        f'layer = unsoft.mechanism("{name}", heads=8, head_dim=64)       # as a module, with a cache',
    ]


def modifier_page(modifier) -> str:
    text = inspect.cleandoc(inspect.getmodule(modifier.change).__doc__ or "").replace("``", "`")
    text, mark, example = text.partition("\n>>>")
    lines = [f"# {modifier.name}+", "", f"**{modifier.summary[:1].upper()}{modifier.summary[1:]}.**", ""]
    lines += ["A modifier: it stands before the name of any mechanism that it fits, as in"]
    lines += [f'`unsoft.attention(q, k, v, "{modifier.name}+softmax")`.', "", text.strip(), ""]
    if mark:
        lines += ["```pycon", ">>>" + example, "```", ""]
    return "\n".join(lines)


def example_of(name: str) -> str:
    """The worked example of the mechanism's file."""
    file = module_of(name)
    _, mark, example = inspect.cleandoc((file and file.__doc__) or "").partition("\n>>>")
    return mark.strip() + example


def source_of(name: str) -> str:
    file = module_of(name)
    return "" if file is None else "src/" + file.__name__.replace(".", "/") + ".py"


def module_of(name: str):
    full = f"unsoft.mechanisms.{name.replace('-', '_')}"
    return None if importlib.util.find_spec(full) is None else importlib.import_module(full)


def curve_of(name: str, formula: Formula) -> str:
    """A picture of its own from the panel of docs/mechanisms.svg."""
    wide, high = picture.WIDE + 24, picture.HIGH + 40
    box = f'viewBox="0 0 {wide} {high}" width="{2 * wide}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            f"<style>{picture.STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="6"/>',
            picture.panel(name, formula, None, 12, 4),
            "</svg>\n",
        ]
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def write_pages(app) -> None:
    """Writes what has changed, so that a second build reads only that, and removes what is gone."""
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(exist_ok=True)
    made = pages()
    for file in folder.iterdir():
        if file.name not in made:
            file.unlink()
    for name, text in made.items():
        file = folder / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def show_overview(app, docname: str, source: list[str]) -> None:
    """The page "mechanisms" is the table; what other pages link to in it has pages of its own."""
    if docname == "mechanisms":
        source[0] = overview()
        return
    for name, anchor in choose.ANCHORS.items():
        source[0] = source[0].replace(f"(mechanisms.md#{anchor})", f"({FOLDER}/{name}.md)")


def setup(app):
    app.connect("builder-inited", write_pages)
    app.connect("source-read", show_overview)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
