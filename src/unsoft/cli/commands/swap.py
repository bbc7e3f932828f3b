"""``unsoft swap``: write a model with another mechanism to a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli import arguments
from unsoft.cli.arguments import AsJson, KeepFirstLast, Layers, Model, Start, path_option, wrong
from unsoft.cli.mechanisms import Name, read_mechanism
from unsoft.cli.terminal import print_json
from unsoft.files import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def command(
    model: Model,
    mechanism: Name,
    out: Annotated[Path, path_option("Folder to write, new or empty.")],
    layers: Layers = None,
    keep_first_last: KeepFirstLast = False,
    start: Start = "open",
    as_json: AsJson = False,
) -> None:
    """Save a transformers model with another mechanism.

    Load it with unsoft.hf.load(DIR); plain transformers raises an error.

    \b
    Examples:
      unsoft swap smollm2 cog --out swapped
      unsoft swap smollm2 magnitude+softmax --only-layers 4-7 --out swapped
    """
    name = read_mechanism(mechanism)
    arguments.check_folder(out)  # before a model is loaded, which takes long
    if out.exists() and any(out.iterdir()):
        raise wrong(f"{out} exists and is not an empty folder", "'--out'")
    import unsoft
    from unsoft.hf.quiet import quiet
    from unsoft.hf.recipe import Recipe
    from unsoft.modules.registry import label_of

    which = None if layers is None else arguments.read_layers(layers)
    Recipe(name, which, keep_first_last, start)  # check the arguments before a model is loaded
    for one in {name, *(which.values() if isinstance(which, dict) else ())}:
        unsoft.mechanism(one, heads=2, head_dim=4, layer=1, layers=3)
    loaded, tokenizer = unsoft.hf.load_model(model)
    unsoft.hf.swap(loaded, name, which, keep_first_last, start)
    _check_space(out, loaded)
    with quiet(), whole_folder(out) as unfinished:
        loaded.save_pretrained(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
    if as_json:
        kind = type(loaded).__name__
        print_json({"model": model, "class": kind, "mechanism": name, "folder": str(out)})
        return
    typer.echo(
        f"{type(loaded).__name__} with {label_of(name)} written to {out}; load it with"
        f" unsoft.hf.load({str(out)!r})"
    )


def _check_space(out: Path, model: PreTrainedModel) -> None:
    needed = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(nearest).free) < needed:
        raise wrong(
            f"{out}: the model takes {needed / 1e6:,.0f} MB, and the disk has {free / 1e6:,.0f} MB left",
            "'--out'",
        )
