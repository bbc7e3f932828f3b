"""``unsoft train``: one mechanism on one task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli.arguments import (
    AsJson,
    MechanismOptions,
    Plugin,
    check_folder,
    folder_name,
    load_plugin,
    path_option,
    read_pairs,
    settings,
    unset,
    wrong,
)
from unsoft.cli.completion import complete_task
from unsoft.cli.mechanisms import Name, NameOption, OneFormula, chosen_one
from unsoft.cli.terminal import print_json, resumable

if TYPE_CHECKING:
    from unsoft.lab.training import Result


def command(
    context: typer.Context,
    task: Annotated[
        str, typer.Argument(help="The task to learn; see unsoft tasks.", autocompletion=complete_task)
    ],
    mechanism: Name = None,
    mechanism_option: NameOption = None,
    formula: OneFormula = None,
    knob: Annotated[list[str] | None, unset("Difficulty: repeats=16; may be repeated.", "--set")] = None,
    option: MechanismOptions = None,
    file: Annotated[
        Path | None, unset("Text to learn, a file or a folder of documents; for the task text.")
    ] = None,
    layers: Annotated[int | None, unset("Number of layers; default: the task's own.")] = None,
    width: Annotated[int | None, unset("Width of the model; default: the task's own.")] = None,
    heads: Annotated[int | None, unset("Number of heads; default: the task's own.")] = None,
    mlp: Annotated[int | None, unset("Width inside each layer's MLP; default: twice the width.")] = None,
    steps: Annotated[int | None, unset("Steps of training; default: the task's own.")] = None,
    batch: Annotated[int | None, unset("Examples in a step; default: the task's own.")] = None,
    lr: Annotated[float | None, unset("Learning rate; default: the task's own.")] = None,
    mechanism_lr: Annotated[
        float, typer.Option(help="Learning rate of the mechanism's own parameters.")
    ] = 0.03,
    weight_decay: Annotated[
        float | None, unset("Weight decay of the model's matrices; default: the task's own.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Steps until the learning rate is reached.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    start: Annotated[str, typer.Option(help="Start of learnable mechanisms: paper or open.")] = "paper",
    init_from: Annotated[str, unset("A model to start from: a folder, smollm2, minilm.")] = "",
    bf16: Annotated[bool, typer.Option("--bf16", help="Mixed precision with bfloat16.")] = False,
    repulse: Annotated[str, unset("Heads repel each other: svgd, spos or repel.")] = "",
    alpha: Annotated[float | None, unset("Strength of the repulsion; default: 0.1.")] = None,
    out: Annotated[
        Path | None, path_option("Folder of the run; default: runs/TASK-MECHANISM-SEED.", show_default=False)
    ] = None,
    save_every: Annotated[
        int | None, unset("Steps between checkpoints; default: a tenth of the run.", min=1)
    ] = None,
    eval_every: Annotated[
        int | None, unset("Evaluate every N steps; default: a tenth of the run.", min=1)
    ] = None,
    report_to: Annotated[
        list[str] | None, unset("tensorboard, wandb, trackio, ...; may be repeated.")
    ] = None,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Under torchrun: each process keeps a part of the model (FSDP2).")
    ] = False,
    baseline: Annotated[
        bool | None,
        unset("Also train softmax, same settings and seed; default: yes.", "--baseline/--no-baseline"),
    ] = None,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Train a small transformer on a task, and test it.

    Without a mechanism: softmax. With another one, softmax is trained beside it (--no-baseline skips that).
    Ctrl-C saves a checkpoint; rerun the same command to resume, with the same
    weights bit for bit.

    \b
    Examples:
      unsoft train census magnitude+cog --set repeats=16
      unsoft train needle --formula "name=mine;weight=tanh(s)/n" --steps 200
    """
    load_plugin(plugin)
    if alpha is not None and not repulse:
        raise wrong("it is the strength of --repulse, which is not given", "'--alpha'")
    if file is not None:
        _check_reads_files(task)
    name = chosen_one(mechanism, mechanism_option, formula, "softmax")
    from unsoft.modules.registry import label_of

    folder = out or folder_name(task, label_of(name), seed)
    check_folder(folder)
    from dataclasses import replace

    from unsoft.lab.training import Spec
    from unsoft.lab.training import train as run
    from unsoft.lab.training.callbacks import is_first_process

    knobs = read_pairs(knob, "--set") | ({} if file is None else {"path": str(file)})
    spec = Spec(
        **settings(context, Spec)
        | {"mechanism": name, "knobs": knobs, "options": read_pairs(option, "--option")}
    )
    specs = {folder: spec}
    if baseline or (baseline is None and name != "softmax"):
        specs[folder / "baseline"] = replace(spec, mechanism="softmax", options={})
    results = []
    with resumable():
        for where, one in specs.items():
            results.append(
                run(
                    one,
                    where,
                    save_every=save_every,
                    eval_every=eval_every,
                    report_to=report_to,
                    fsdp=fsdp,
                    progress=True,
                )
            )
    if not is_first_process():
        return
    if as_json:
        others = {"baseline": results[1].to_dict()} if len(results) > 1 else {}
        print_json(results[0].to_dict() | others)
        return
    for where, result in zip(specs, results, strict=True):
        if where != folder:
            typer.echo("baseline, softmax:")
        _print(result, where)
    if len(results) > 1:
        typer.echo(_difference(label_of(name), *results))


def _check_reads_files(name: str) -> None:
    from dataclasses import fields

    from unsoft.lab.tasks import tasks

    kind = tasks().get(name)
    if kind is not None and "path" not in {knob.name for knob in fields(kind)}:
        raise wrong(f"{name} reads no file; the task text does", "'--file'")


def _print(result: Result, folder: Path) -> None:
    better = "higher" if result.higher_is_better else "lower"
    fallback = "" if result.shortcut is None else f", shortcut {result.shortcut:.3f}"
    typer.echo(
        f"{result.metric} {result.score:.4f}  (chance {result.chance:.3f}{fallback}, known solution"
        f" {result.known:.3f}; {better} is better)"
    )
    for test in result.score_by:
        beside = "" if test["shortcut"] is None else f"  (shortcut {test['shortcut']:.3f})"
        typer.echo(f"  {result.difficulty} {test['value']}: {test['score']:.4f}{beside}")
    for name, layers in result.attention.items():
        typer.echo(f"  {name.replace('_', ' ')}: {', '.join(f'{value:.3f}' for value in layers)}")
    for name, values in result.learned.items():
        typer.echo(f"  learned {name}: {_few(values)} (from {_few(result.started[name])})")
    typer.echo(f"{result.parameters} parameters, {result.steps} steps, {result.seconds:.0f} s; in {folder}")


def _difference(label: str, result: Result, softmax: Result) -> str:
    """Return the sentence that compares a run with its baseline."""
    gain = result.score - softmax.score
    if gain == 0:
        return f"{label} and softmax: the same {result.metric} with this seed."
    word = "better" if (gain > 0) == result.higher_is_better else "worse"
    return (
        f"{label} is {word} than softmax with this seed: {result.metric} {result.score:.4f} against"
        f" {softmax.score:.4f}, {gain:+.4f}. For a verdict over seeds and learning rates: unsoft study"
    )


def _few(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values[:8]) + (", ..." if len(values) > 8 else "")
