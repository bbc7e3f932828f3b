"""What pages list or quote from elsewhere in the repository, put in when the site is built.

Papers of mechanisms, examples, and the files that stand at the top of the repository.
"""

import ast
import re
from pathlib import Path

from mechanism_pages import FOLDER, table

from unsoft.formula import Formula
from unsoft.mechanisms import mechanisms

ROOT = Path(__file__).parents[2]
FILES = {"benchmarks": "benchmarks/README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}
LINKS = {"(docs/": "(", "(README.md)": "(index.md)", "(benchmarks/README.md)": "(benchmarks.md)"}


def papers() -> str:
    """The paper of each mechanism, with a link where it is on arXiv."""
    rows = []
    for name, found in mechanisms().items():
        paper = found.paper if isinstance(found, Formula) else found.family and found.family.paper
        if paper:
            linked = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)
            linked = re.sub(r"(?<![/\w])(kexue\.fm/archives/\d+)", r"[\1](https://\1)", linked)
            rows.append([f"[{name}]({FOLDER}/{name}.md)", linked])
    return "\n".join(table(["mechanism", "paper"], rows)) + "\n"


def examples() -> str:
    """The scripts of examples/, each with its first sentence."""
    made = []
    for script in sorted((ROOT / "examples").glob("*.py")):
        about = ast.get_docstring(ast.parse(script.read_text())).partition("\n\n")[0].replace("\n", " ")
        made += [f"## {script.stem.replace('_', ' ')}", "", about, ""]
        made += [f"```{{literalinclude}} ../examples/{script.name}", ":language: python", "```", ""]
    return "\n".join(made)


def file_at_the_top(name: str) -> str:
    """Its text, with links as a page of docs/ would write them."""
    text = (ROOT / name).read_text()
    for old, new in LINKS.items():
        text = text.replace(old, new)
    return text


def put_in(app, docname: str, source: list[str]) -> None:
    if docname in FILES:
        source[0] = file_at_the_top(FILES[docname])
    source[0] = source[0].replace("<!-- papers -->\n", papers()) if docname == "sources" else source[0]
    source[0] = source[0].replace("<!-- examples -->\n", examples()) if docname == "examples" else source[0]


def setup(app):
    app.connect("source-read", put_in)
    return {"parallel_read_safe": True}
