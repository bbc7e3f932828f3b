"""Notebooks as pages: the site reads .ipynb files of docs/ as Markdown."""

import json


def markdown(notebook: str) -> str:
    """Return the cells of a notebook as Markdown.

    >>> text, code = ({"cell_type": kind} for kind in ("markdown", "code"))
    >>> cells = [text | {"source": ["# Use\\n", "it"]}, code | {"source": "1 + 1"}]
    >>> print(markdown(json.dumps({"cells": cells})))
    # Use
    it
    <BLANKLINE>
    ```python
    1 + 1
    ```
    """
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)


def convert(app, docname: str, source: list[str]) -> None:
    if app.env.doc2path(docname).suffix == ".ipynb":
        download = f"{{download}}`Download this notebook <{docname.rpartition('/')[2]}.ipynb>` to run it.\n"
        source[0] = f"{markdown(source[0])}\n\n{download}"


def setup(app):
    app.add_source_suffix(".ipynb", "markdown")
    app.connect("source-read", convert)
    return {"parallel_read_safe": True}
