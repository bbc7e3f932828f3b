"""``unsoft convert``: convert a pretrained model to another mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli import arguments
from unsoft.cli.arguments import AsJson, Layers, Model, Start, path_option, unset
from unsoft.cli.mechanisms import Name, read_mechanism
from unsoft.cli.terminal import print_json, resumable, show_table

if TYPE_CHECKING:
    from unsoft.lab.training import Converted


def command(
    context: typer.Context,
    model: Model,
    mechanism: Name,
    text: Annotated[str, unset("A file or a folder of files; else the text that comes with Python.")] = "",
    out: Annotated[
        Path | None,
        path_option("Folder of the conversion; default: runs/MODEL-to-MECHANISM.", show_default=False),
    ] = None,
    fit_tokens: Annotated[
        int, typer.Option(help="Tokens that fit output projections before matching; 0: no fit.")
    ] = 4096,
    shift: Annotated[
        float, typer.Option(help="Shift of logits towards softmax in the fit (cog, sinh, softpick); 0: none.")
    ] = 12.0,
    match_steps: Annotated[int, typer.Option(help="Steps of matching layers; 0: none.")] = 40,
    tune_steps: Annotated[int, typer.Option(help="Steps of fine-tuning; 0: none.")] = 20,
    batch: Annotated[int, typer.Option(help="Texts in a step.")] = 2,
    tokens: Annotated[int, typer.Option("--length", help="Tokens per text.")] = 128,
    match_lr: Annotated[float, typer.Option(help="Learning rate of matching.")] = 1e-3,
    tune_lr: Annotated[float, typer.Option("--lr", help="Learning rate of fine-tuning.")] = 2e-4,
    mechanism_lr: arguments.MechanismRate = 0.01,
    tune: Annotated[str, typer.Option(help="What fine-tuning changes: all, or attention only.")] = "all",
    layers: Layers = None,
    keep_first_last: arguments.KeepFirstLast = False,
    option: arguments.MechanismOptions = None,
    start: Start = "open",
    held_out: Annotated[int, typer.Option(help="Held-out tokens that perplexity is measured on.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the texts that are drawn.")] = 0,
    save_every: Annotated[
        int | None, unset("Steps between checkpoints; default: a quarter of a stage.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a pretrained language model to another mechanism.

    Swaps the mechanism, fits and matches each layer to the original, and fine-tunes. Ctrl-C saves a
    checkpoint; rerun the same command to resume. unsoft.hf.load reads DIR/model.

    \b
    Examples:
      unsoft convert smollm2 softpick --match-steps 40 --tune-steps 20
      unsoft convert smollm2 magnitude+softmax --only-layers 8- --out converted
    """
    name = read_mechanism(mechanism)
    from unsoft.modules.registry import label_of

    folder = out or arguments.folder_name(Path(model).name, "to", label_of(name))
    arguments.check_folder(folder)
    from unsoft.lab.training import Conversion
    from unsoft.lab.training import convert as run

    which = None if layers is None else arguments.read_layers(layers)
    given = arguments.settings(context, Conversion)
    options = arguments.read_pairs(option, "--option")
    spec = Conversion(**given | {"mechanism": name, "layers": which, "options": options})
    with resumable():
        result = run(spec, folder, save_every=save_every, progress=True)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result, folder)


_STAGE = {"fitted": "fit", "matched": "match", "tuned": "tune"}


def _print(result: Converted, folder: Path) -> None:
    rows = []
    for name, value in result.perplexity.items():
        errors = result.layer_errors.get(name)
        stage = _STAGE.get(name, "")
        margin = "" if name == "original" else f"{result.margin[name]:.2g}"
        error = f"{sum(errors) / len(errors):.3g}" if errors else ""
        clocks = (result.seconds, result.cpu_seconds)
        spent = [f"{clock[stage]:.0f}" if stage in clock else "" for clock in clocks]
        rows.append((name, f"{value:.4g}", margin, error, result.tokens.get(stage, ""), *spent))
    numbers = ("perplexity", "± of its log", "layer error", "tokens", "seconds", "of all cores")
    show_table({"": "left"} | dict.fromkeys(numbers, "right"), rows)
    last = list(result.perplexity)[-1]
    if result.kept and result.kept != last:
        typer.echo(
            f"the {result.kept} model is saved: on held-out text the {last} one is worse (perplexity"
            f" {result.perplexity[last]:.4g}, not {result.perplexity[result.kept]:.4g}). Try smaller learning"
            " rates (--match-lr, --lr) or more steps"
        )
    typer.echo(f"the model is in {folder / 'model'}; load it with unsoft.hf.load({str(folder / 'model')!r})")
