"""Docstrings of unsoft are plain text with double backquotes, indented formulas and examples.

Here they become the reStructuredText that autodoc reads: formulas stay as they are written, and no stray * or
| means anything.
"""

import re

ROLE = re.compile(r"(``.+?``|:\w+:`[^`]+`)", re.DOTALL)


def converted(text: str) -> str:
    """
    >>> print(converted("A weight |a| of *any* ``x*y``.\\n\\n    a = |b|"))
    A weight \\|a\\| of \\*any\\* ``x*y``.
    <BLANKLINE>
    ::
    <BLANKLINE>
        a = |b|
    """
    text = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    paragraphs = re.split(r"\n\n+", text)
    quoted = [False, *(one.endswith("::") for one in paragraphs[:-1])]  # the paragraph before says so itself
    return "\n\n".join(
        one if as_it_is else _paragraph(one) for one, as_it_is in zip(paragraphs, quoted, strict=True)
    )


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
        if all(re.fullmatch(r"\w+(, \w+)*", line) for line in before):  # arguments and what they mean
            return _escaped(text)
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
