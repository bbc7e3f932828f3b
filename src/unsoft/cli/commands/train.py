"""``unsoft train``: one mechanism on one task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli import arguments
from unsoft.cli.arguments import AsJson, MechanismOptions, MechanismRate, Settings, Start, unset, wrong
from unsoft.cli.completion import complete_task
from unsoft.cli.mechanisms import OptionalName, read_mechanism
from unsoft.cli.terminal import print_json, resumable

if TYPE_CHECKING:
    from unsoft.lab.training import Result


def command(
    context: typer.Context,
    task: Annotated[
        str, typer.Argument(help="The task to learn; see unsoft tasks.", autocompletion=complete_task)
    ],
    mechanism: OptionalName = "softmax",
    knob: Settings = None,
    option: MechanismOptions = None,
    text: Annotated[Path | None, unset("A file or a folder of files to learn; for the task text.")] = None,
    layers: Annotated[int | None, unset("Number of layers; default: the task's own.")] = None,
    width: Annotated[int | None, unset("Width of the model; default: the task's own.")] = None,
    heads: Annotated[int | None, unset("Number of heads; default: the task's own.")] = None,
    mlp: Annotated[int | None, unset("Width inside each layer's MLP; default: twice the width.")] = None,
    steps: Annotated[int | None, unset("Steps of training; default: the task's own.")] = None,
    batch: Annotated[int | None, unset("Examples in a step; default: the task's own.")] = None,
    lr: Annotated[float | None, unset("Learning rate; default: the task's own.")] = None,
    mechanism_lr: MechanismRate = 0.03,
    weight_decay: Annotated[
        float | None, unset("Weight decay of the model's matrices; default: the task's own.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Steps until the learning rate is reached.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    start: Start = "paper",
    init_from: Annotated[str, unset("A model to start from: a folder, smollm2, minilm.")] = "",
    bf16: Annotated[bool, typer.Option("--bf16", help="Mixed precision with bfloat16.")] = False,
    repulse: Annotated[str, unset("Heads repel each other: svgd, spos or repel.")] = "",
    alpha: Annotated[float | None, unset("Strength of the repulsion; default: 0.1.")] = None,
    out: Annotated[
        Path | None,
        arguments.path_option("Folder of the run; default: runs/TASK-MECHANISM-SEED.", show_default=False),
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
) -> None:
    """Train a small transformer on a task, and test it.

    Softmax is trained beside any other mechanism (--no-baseline skips that). Ctrl-C saves a checkpoint; rerun
    the same command to resume, with the same weights bit for bit.

    \b
    Examples:
      unsoft train census magnitude+cog --set repeats=16
      unsoft train needle "tanh(s)*exp(abs(s))" --steps 200
    """
    if alpha is not None and not repulse:
        raise wrong("it is the strength of --repulse, which is not given", "'--alpha'")
    if text is not None:
        _check_reads_files(task)
    name = read_mechanism(mechanism)
    from unsoft.modules.registry import label_of

    folder = out or arguments.folder_name(task, label_of(name), seed)
    arguments.check_folder(folder)
    from dataclasses import replace

    from unsoft.lab.bench.machine import keep_freed_memory
    from unsoft.lab.training import Spec
    from unsoft.lab.training import train as run
    from unsoft.lab.training.callbacks import is_first_process

    given, knobs = arguments.read_settings(knob)
    knobs |= {} if text is None else {"path": str(text)}
    options = arguments.read_pairs(option, "--option")
    given |= {"mechanism": name, "knobs": knobs, "options": options}
    spec = Spec(**arguments.settings(context, Spec) | given)
    specs = {folder: spec}
    if baseline or (baseline is None and name != "softmax"):
        specs[folder / "baseline"] = replace(spec, mechanism="softmax", options={})
    every = {"save_every": save_every, "eval_every": eval_every}
    keep_freed_memory()
    with resumable():
        results = [
            run(one, where, **every, report_to=report_to, fsdp=fsdp, progress=True)
            for where, one in specs.items()
        ]
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
        raise wrong(f"{name} reads no file; the task text does", "'--text'")


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
