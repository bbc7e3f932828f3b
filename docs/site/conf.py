"""The site: ``make site`` builds it from the pages of docs/, the mechanisms and the docstrings.

Pages are Markdown that reads well on a repository's page, too. What is made at build time stands in the
extensions beside this file: a page for each mechanism and notebook, the API, formulas as MathML.
"""

import sys
from pathlib import Path

from pygments.lexers.special import TextLexer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "generate"), str(HERE.parents[1] / "src")]

import unsoft  # noqa: E402  # from this checkout

project = "unsoft"
author = "The unsoft developers"
copyright = "The unsoft developers"
release = version = unsoft.__version__
html_title = f"unsoft {release}"
html_short_title = "unsoft"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "api_pages",
    "docstrings",
    "lists",
    "mathml",
    "mechanism_pages",
    "notebooks",
]
exclude_patterns = ["site/**", "generate/**", "README.md"]
nitpicky = False  # types of torch and transformers have no pages here

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100  # longer signatures have one argument per line

toc_object_entries = False  # each function in the side bar of each page would take a third of the build

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
html_logo = html_favicon = "../logo.svg"


def setup(app):
    app.add_lexer("mermaid", TextLexer)  # drawn where the repository is hosted, shown as text here
