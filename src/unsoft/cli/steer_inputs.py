"""What ``unsoft steer`` is given: files of texts, or our own sample; layers and positions in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from unsoft.cli.arguments import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def pairs(positive: Path | None, negative: Path | None, kind: str = "") -> tuple[list[str], list[str]]:
    """Texts with a property and their other halves."""
    if (positive is None) != (negative is None):
        raise typer.BadParameter(
            f"--{kind.replace('_', '-')}positive and --{kind.replace('_', '-')}negative belong together"
        )
    return lines(positive, f"{kind}positive"), lines(negative, f"{kind}negative")


def lines(path: Path | None, name: str) -> list[str]:
    """Lines that are not empty; those of our own sample where no file is given."""
    from unsoft.lab.interpret import steering

    sample = Path(steering.__file__).parent / "sample" / f"{name}.txt"
    text = read_text(path or sample, f"'--{name.replace('_', '-')}'")
    return [line.strip() for line in text.splitlines() if line.strip()]


def prose(path: Path | None) -> str:
    """Text that steering should leave alone."""
    from unsoft.lab.interpret import inspection

    return read_text(path or Path(inspection.__file__).parent / "sample.txt", "'--unrelated'")


def listed(layers: str | None) -> list[str] | None:
    """ "0,8-" as a list.

    >>> listed("0, 8-")
    ['0', '8-']
    """
    return None if layers is None else [part.strip() for part in layers.split(",")]


def places(positions: str) -> str | list[int]:
    """Numbers where there are some.

    >>> places("0,-1"), places("all")
    ([0, -1], 'all')
    """
    try:
        return [int(part) for part in positions.split(",")]
    except ValueError:
        return positions


def load(model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A language model and its tokenizer."""
    from unsoft.hf.models import load_model

    network, tokenizer = load_model(model)
    if tokenizer is None or not network.can_generate():
        raise typer.BadParameter(
            f"{model} is no language model with a tokenizer, so it cannot be steered with texts",
            param_hint="'MODEL'",
        )
    return network, tokenizer
