"""Docstrings of unsoft are plain text with double backquotes, indented formulas and examples.

Here they become the reStructuredText that autodoc reads: formulas stay as they are written, and no stray * or
| means anything.
"""

import re

ROLE = re.compile(r"(``.+?``|:\w+:`[^`]+`)", re.DOTALL)


def converted(text: str) -> str:
    """
    >>> print(converted("A weight |a| of *any* ``x*y``.\\n\\n    a = |b|\\n\\n>>> 1 * 1\\n1"))
    A weight \\|a\\| of \\*any\\* ``x*y``.
    <BLANKLINE>
    ::
    <BLANKLINE>
        a = |b|
    <BLANKLINE>
    >>> 1 * 1
    1
    """
    text = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    return "\n\n".join(map(_paragraph, re.split(r"\n\n+", text)))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if not text or text.startswith(">>>"):
        return text
    if all(line.startswith("    ") for line in lines):
        return "::\n\n" + text
    if any(line.startswith("|") for line in lines):
        return "::\n\n" + "\n".join("    " + line for line in lines)
    if not text.startswith("- "):
        before = [line for line in lines if not line.startswith("  ")]
        if len(before) != len(lines):  # a sentence and the formula below it, with no line between
            first = next(place for place, line in enumerate(lines) if line.startswith("  "))
            rest = "\n".join("    " + line.strip() for line in lines[first:])
            return "\n\n".join(part for part in (_escaped("\n".join(lines[:first])), "::", rest) if part)
    return _escaped(text)


def _escaped(text: str) -> str:
    parts = ROLE.split(text)
    parts[::2] = [re.sub(r"([*|`\\])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
    return "".join(parts)


def process(app, what, name, obj, options, lines) -> None:
    lines[:] = converted("\n".join(lines)).splitlines()


def setup(app):
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
