"""The model card (README.md) that ``save_pretrained`` writes beside a swapped model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsoft.files import write_whole
from unsoft.formula import Formula
from unsoft.hf.recipe import Recipe
from unsoft.modules.registry import label_of, resolve

_MARK = "<!-- written by unsoft.hf -->"
"""A card without this line is the user's own, and is not replaced."""


def write_card(folder: Path, content: Mapping[str, Any], architecture: str) -> None:
    """Write the card of a model whose config has the section ``content``; warn if it cannot be written.

    The model itself is saved then, and a training run must not end because of its card.
    """
    path = folder / "README.md"
    try:
        if not path.exists() or _MARK in path.read_text():
            write_whole(path, card(content, architecture).encode())
    except (OSError, UnicodeDecodeError) as error:
        text = f"save_pretrained: the model is saved, but its card {str(path)!r} cannot be written: {error}"
        warnings.warn(text, stacklevel=4)


def card(content: Mapping[str, Any], architecture: str) -> str:
    """Return the text of the card: how to load the model, its mechanisms, base model and conversion.

    >>> print(card(Recipe("cog").to_dict() | {"base_model": "org/small"}, "LlamaForCausalLM"))
    ---
    library_name: transformers
    tags: [unsoft]
    base_model: org/small
    ---
    <!-- written by unsoft.hf -->
    # small with cog attention
    ...
    """
    base, conversion = content.get("base_model"), content.get("conversion")
    recipe = Recipe.from_dict(content)
    label = _label(recipe.mechanism)
    lines = ["---", "library_name: transformers", "tags: [unsoft]"]
    # A hub accepts only ids of its own here; a folder has lost its path and with it the slash.
    lines += [f"base_model: {base}"] if base and "/" in base else []
    name = base.rpartition("/")[2] if base else architecture
    lines += ["---", _MARK, f"# {name} with {label} attention", ""]
    why = f"This {architecture} computes its attention with `{label}` instead of softmax"
    lines += [f"{why}, so it needs unsoft:", "", "    pip install 'unsoft[hf]'", ""]
    lines += ["```python", "import unsoft.hf"]
    lines += ["from transformers import AutoModel  # or AutoModelForCausalLM, pipeline, ...", ""]
    lines += ['model = AutoModel.from_pretrained("THIS_FOLDER_OR_ID")', "```", "", "## Attention", ""]
    lines += [f"- Base model: {base or 'none (trained from scratch, or unknown)'}", f"- Mechanism: `{label}`"]
    lines += _formula_lines(recipe.mechanism)
    settings = {name: content[name] for name in ("layers", "keep_first_last", "init", "options")}
    lines += [f"- Settings of `unsoft.hf.swap`: `{json.dumps(settings)}`", f"- unsoft {content['version']}"]
    if conversion is not None:
        lines += ["", "## Conversion", "", "`unsoft convert` with:", ""]
        lines += [f"    {json.dumps(conversion['spec'])}", ""]
        lines += ["| model | perplexity ↓ on held-out text |", "|---|---|"]
        lines += [f"| {stage} | {value:.3g} |" for stage, value in conversion["perplexity"].items()]
        lines += ["", f"The weights are those of the stage `{conversion['kept']}`."]
    return "\n".join(lines) + "\n"


def _label(mechanism: str | Formula) -> str:
    return label_of(mechanism) if isinstance(mechanism, str) else mechanism.name or str(mechanism.weight)


def _formula_lines(mechanism: str | Formula) -> list[str]:
    """Return the formula of a mechanism as a list item; nothing for mechanisms that are not formulas."""
    try:
        formula = resolve(mechanism)
    except ValueError:  # "first_last(softmax)+cog" is resolved layer by layer
        return []
    if not isinstance(formula, Formula):
        return []
    parts = {name: getattr(formula, name) for name in ("weight", "mass", "peak", "norm")}
    text = ", ".join(f"{name} = `{part}`" for name, part in parts.items() if part is not None)
    return [f"- Formula: {text}" + (f" ({formula.paper})" if formula.paper else "")]
