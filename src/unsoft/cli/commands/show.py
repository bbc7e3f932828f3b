"""``unsoft show``: one mechanism on one screen."""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import typer

from unsoft.cli.arguments import AsJson
from unsoft.cli.mechanisms import Name, read_mechanism
from unsoft.cli.terminal import print_json

if TYPE_CHECKING:
    from unsoft.lab.compare.candidate import Candidate

_WIDTH = 88


def command(mechanism: Name, as_json: AsJson = False) -> None:
    """Show one mechanism: formula, curve, paper, cost, code.

    \b
    Examples:
      unsoft show cog
      unsoft show magnitude+softmax --json
    """
    about = describe(read_mechanism(mechanism))
    if as_json:
        print_json(about)
        return
    from unsoft.formula.display import text_plot

    typer.echo(f"{about['name']}: {about['summary']}\n")
    for part, text in about["formula"].items():
        typer.echo(f"  {part:12} {text}")
    if about["curve"]:
        typer.echo(f"\nweight of one key among 15 others\n{text_plot(about['curve'])}")
    typer.echo("")
    for title in ("paper", "strengths", "limitations", "properties", "cost"):
        if about[title]:
            line = f"{title.capitalize()}: {about[title]}"
            typer.echo(textwrap.fill(line, _WIDTH, subsequent_indent="  "))
    typer.echo(f"\n  y = unsoft.attention(q, k, v, {about['name']!r}, is_causal=True)")


def describe(name: str) -> dict[str, Any]:
    """Return a mechanism as plain data: formula, curve, paper, strengths, limitations, properties, cost."""
    from unsoft.formula import Formula
    from unsoft.formula.display import curve
    from unsoft.lab.compare.candidate import Candidate
    from unsoft.mechanisms import summary_of
    from unsoft.modules.registry import label_of

    candidate = Candidate(label_of(name), name)
    spec = candidate.spec
    formula = spec if isinstance(spec, Formula) else spec.formula
    content = {} if formula is None else formula.to_dict()
    shown = ("weight", "mass", "peak", "norm", "offset_mass", "params")
    try:
        values = curve(candidate.row())
    except (ValueError, RuntimeError):  # it needs more than the logits of one row
        values = []
    texts = _texts(name)
    source = spec if isinstance(spec, Formula) else candidate.family
    return {
        "name": candidate.label,
        "summary": summary_of(name),
        "formula": {part: text for part, text in content.items() if part in shown},
        "curve": values,
        "paper": (source.paper if source is not None else None) or "",
        "strengths": texts.get("Strengths", ""),
        "limitations": texts.get("Limitations", ""),
        "properties": ", ".join(f"{title} {text}" for title, text in spec.properties.texts().items()),
        "cost": _cost(candidate),
    }


def _texts(name: str) -> dict[str, str]:
    """Return the paragraphs "Strengths:" and "Limitations:" of a built-in mechanism's file."""
    import importlib
    import re

    from unsoft.modules.registry import parts_of

    file = parts_of(name)[-1].partition("(")[0].replace("-", "_")
    try:
        module = importlib.import_module(f"unsoft.mechanisms.{file}")
    except ImportError:
        return {}
    text = inspect.cleandoc(module.__doc__ or "").partition("\n>>>")[0]
    found = re.findall(
        r"(Strengths|Limitations): (.*?)(?=\n(?:Limitations|Strengths):|\n\n|\Z)", text, re.DOTALL
    )
    return {title: " ".join(content.split()) for title, content in found}


def _cost(candidate: Candidate) -> str:
    """Measure time of training and decoding next to SDPA."""
    from unsoft.lab.compare.section import QUICK
    from unsoft.lab.compare.sections.cost import decoding, training

    length = 1024
    seen = {}
    for what, measure in (("training", training), ("decoding", decoding)):
        try:
            rows = measure([candidate], length, QUICK)
        except (ValueError, RuntimeError) as problem:
            return f"not measured: {problem}"
        seen[what] = next(row["ratio"] for row in rows if row["mechanism"] == candidate.label)
    each = " and ".join(f"{ratio:.2g} times in {what}" for what, ratio in seen.items())
    return f"{each}, of the time of PyTorch's softmax (SDPA) at {length} keys, measured now"
