"""``unsoft swap``: a model with another mechanism, written to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def swap(
    model: Annotated[str, typer.Argument(help="smollm2, minilm, a folder, or a hub id.")],
    mechanism: Annotated[str, typer.Argument(help="Such as cog or magnitude+softmax; see unsoft list.")],
    out: Annotated[Path, typer.Option(help="The folder to write; new or empty.")],
    layers: Annotated[
        str | None, typer.Option(help="Only these: 0,4-7,-1; or what each of them gets: 0=softmax,8-=relu2.")
    ] = None,
    keep_first_last: Annotated[
        bool, typer.Option("--keep-first-last", help="Softmax in the first and last layer.")
    ] = False,
    init: Annotated[
        str, typer.Option(help="Start of learnable parts: open (close to softmax) or paper.")
    ] = "open",
) -> None:
    """Put a mechanism into the attention of a transformers model and save it.

    Load it with unsoft.hf.load(DIR); plain transformers refuses it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise typer.BadParameter(f"{out} exists and is not an empty folder", param_hint="'--out'")
    import unsoft
    from unsoft.hf.quiet import quiet
    from unsoft.hf.recipe import Recipe

    which = None if layers is None else read_layers(layers)
    Recipe(mechanism, which, keep_first_last, init)  # wrong arguments are told before a model is loaded
    for name in {mechanism, *(which.values() if isinstance(which, dict) else ())}:
        unsoft.mechanism(name, heads=2, head_dim=4, layer=1, layers=3)
    loaded, tokenizer = unsoft.hf.load_model(model)
    unsoft.hf.swap(loaded, mechanism, which, keep_first_last, init)
    with quiet():
        loaded.save_pretrained(out)
        if tokenizer is not None:
            tokenizer.save_pretrained(out)
    typer.echo(
        f"{type(loaded).__name__} with {mechanism} written to {out}; load it with unsoft.hf.load({str(out)!r})"
    )


def read_layers(text: str) -> list[str] | dict[str, str]:
    """The argument ``layers`` of :func:`unsoft.hf.swap` from text.

    >>> read_layers("0,4-7"), read_layers("0=softmax, 8-=relu2")
    (['0', '4-7'], {'0': 'softmax', '8-': 'relu2'})
    """
    parts = [part.strip() for part in text.split(",")]
    if not any("=" in part for part in parts):
        return parts
    pairs = [part.split("=", 1) for part in parts]
    if any(len(pair) != 2 for pair in pairs):
        raise typer.BadParameter(
            f"{text!r} mixes layers with and without a mechanism", param_hint="'--layers'"
        )
    return {which.strip(): what.strip() for which, what in pairs}
