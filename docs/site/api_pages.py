"""Pages of the API: a table of the functions and classes of a module before their descriptions."""

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer

NAMES = re.compile(r"~?(?:typing\.)?Literal\[[^]]*'softmax'[^]]*\] \| (?=str)")
"""The type of ``mechanism=``: editors complete its fifty names, readers look them up in the catalogue."""


def shorten(app, what, name, obj, options, signature: str | None, returned: str | None):
    """Return a signature without names of mechanisms, and without modules where Sphinx cannot parse it."""
    signature = signature and NAMES.sub("", signature)
    if signature and "<factory>" in signature:  # defaults of dataclasses
        signature = re.sub(r"~(?:\w+\.)+", "", signature)
    return signature, returned


def collapse_overloads(app) -> None:
    """Let autodoc show the signature of the implementation: overloads differ only in what is returned."""
    analyzer = ModuleAnalyzer.for_module("unsoft.attention")
    analyzer.analyze()
    analyzer.overloads.clear()


def add_contents(app, doctree: nodes.document) -> None:
    """Insert a table of names and first sentences before the first object of every section."""
    if not app.env.docname.startswith("api/"):
        return
    for section in doctree.findall(nodes.section):
        objects = [child for child in section.children if isinstance(child, addnodes.desc)]
        if len(objects) > 1:
            section.insert(section.index(objects[0]), contents(objects))


def contents(objects: list[addnodes.desc]) -> nodes.table:
    body = nodes.tbody()
    for one in objects:
        signature = one[0]
        link = nodes.reference("", "", nodes.literal("", signature["fullname"]), refid=signature["ids"][0])
        text = next(one.findall(nodes.paragraph), nodes.paragraph()).astext()
        sentence = " ".join(text.partition(". ")[0].split()).rstrip(".:")
        cells = (nodes.paragraph("", "", link), nodes.paragraph("", sentence))
        body += nodes.row("", *(nodes.entry("", cell) for cell in cells))
    columns = (nodes.colspec(colwidth=1), nodes.colspec(colwidth=3))
    return nodes.table("", nodes.tgroup("", *columns, body, cols=2))


def setup(app):
    app.connect("builder-inited", collapse_overloads)
    app.connect("autodoc-process-signature", shorten)
    app.connect("doctree-read", add_contents)
    return {"parallel_read_safe": True}
