"""``unsoft study``: run studies, and show, export and report their results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from unsoft.cli.arguments import (
    AsJson,
    Plugin,
    check_folder,
    load_plugin,
    path_option,
    read_pairs,
    unset,
    wrong,
)
from unsoft.cli.completion import complete_mechanism, complete_study, complete_task
from unsoft.cli.mechanisms import Formulas, chosen
from unsoft.cli.study_output import print_costs, print_defaults, print_study, progress, study_record
from unsoft.cli.terminal import INTERRUPTED, note, print_json, show_table

if TYPE_CHECKING:
    from unsoft.lab.study import Study
    from unsoft.lab.study.driver import State, Workers


class _RunUnlessNamed(TyperGroup):
    """``unsoft study SPEC.toml`` is short for ``unsoft study run SPEC.toml``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = args or ["--help"]
        if args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


command = typer.Typer(
    cls=_RunUnlessNamed,
    help="""Many training runs: mechanisms on tasks, over seeds and rates. `study X` is `study run X`.

    \b
    Examples:
      unsoft study --list
      unsoft study --default census --out study
    """,
    rich_markup_mode=None,
)
_Out = Annotated[Path, path_option("Folder of the store, study.db.")]


@command.command()
def run(
    spec: Annotated[
        Path | None, typer.Argument(help="A study as TOML; see docs/studies.md.", show_default=False)
    ] = None,
    default: Annotated[
        list[str] | None,
        unset(
            "A study that comes with unsoft; may be repeated.", metavar="NAME", autocompletion=complete_study
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show the studies that come with unsoft, and stop.")
    ] = False,
    tasks: Annotated[
        list[str] | None,
        unset(
            "Tasks, instead of a file: census,needle; may be repeated.",
            "--task",
            "--tasks",
            autocompletion=complete_task,
        ),
    ] = None,
    mechanisms: Annotated[
        list[str] | None,
        unset(
            "The mechanisms: softmax,cog; may be repeated.",
            *("--mechanism", "-m", "--mechanisms"),
            autocompletion=complete_mechanism,
        ),
    ] = None,
    formula: Formulas = None,
    seeds: Annotated[int | None, unset("Number of seeds; default: 5.")] = None,
    lrs: Annotated[str | None, unset("Learning rates; default: 0.001,0.003,0.01.")] = None,
    sweep: Annotated[
        str | None,
        unset("tuned (all rates on the first seed, the best on all), full (all on all), or none."),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(help="With --tasks: add controls, softmax also with more parameters, heads and layers."),
    ] = True,
    settings: Annotated[
        list[str] | None,
        unset("A setting of every run, steps=300, or of the task, repeats=16; may be repeated.", "--set"),
    ] = None,
    workers: Annotated[int | None, unset("Number of processes; default: one for each core.", min=1)] = None,
    ray: Annotated[str | None, unset("A Ray cluster: auto, an address, or local to start one here.")] = None,
    cpus_per_run: Annotated[float, typer.Option(min=0.01, help="CPUs of the cluster for each run.")] = 1,
    gpus_per_run: Annotated[float, typer.Option(min=0, help="GPUs of the cluster for each run.")] = 0,
    out: _Out = Path("study"),
    runs: Annotated[
        Path | None, path_option("Folder of checkpoints; default: runs in --out.", show_default=False)
    ] = None,
    continue_from: Annotated[
        Path | None,
        path_option(
            "Runs of another machine (.csv, .json, study.db): finished ones are not repeated.",
            show_default=False,
        ),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed runs.")] = False,
    any_code: Annotated[
        bool,
        typer.Option(
            "--any-code", help="Keep results of other versions of torch, a plug-in, or the results."
        ),
    ] = False,
    scale: Annotated[
        str | None, unset("Multiply parameters and tokens of every run, such as 10x; see docs/language.md.")
    ] = None,
    device: Annotated[
        str | None, unset("cpu or cuda; default: a GPU if there is one, which all workers share.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show runs, tokens and hours from a short probe, and stop.")
    ] = False,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Run or resume a study. After Ctrl-C, rerun the same command to resume.

    \b
    Examples:
      unsoft study --default census --out study
      unsoft study --task needle -m cog --seeds 3 --set steps=300
    """
    if show_list:
        print_defaults(as_json=as_json)
        return
    check_folder(out)
    load_plugin(plugin)
    direct = (tasks, mechanisms, formula)
    changes = {"seeds": seeds, "lrs": None if lrs is None else _numbers(lrs), "sweep": sweep}
    changes = {name: value for name, value in changes.items() if value is not None}
    if sum((spec is not None, bool(default), any(direct))) != 1:
        raise typer.BadParameter("give a file, --default NAME, or --tasks and --mechanisms")
    from unsoft.lab.study import default_study, read_records, read_study

    if not any(direct):
        if changes or settings or not controls:
            raise typer.BadParameter("a study from a file is run as it is written; change a copy of it")
        studies = [default_study(name) for name in default or []] if spec is None else [read_study(spec)]
    else:
        names = chosen(_split(mechanisms), None, formula)
        studies = [_study_of(_split(tasks), names, settings, controls, changes)]
    if scale is not None:
        from unsoft.lab.study.budget import scaled

        studies = [scaled(study, _factor(scale)) for study in studies]
    if device is not None:
        _choose_device(device)
    if dry_run:
        print_costs(studies, workers, as_json=as_json)
        return
    made = _workers_of(workers, ray, cpus_per_run, gpus_per_run)
    file = plugin is not None and plugin.endswith(".py")
    options: dict[str, Any] = {"runs": runs, "retry": retry, "any_code": any_code}
    options["earlier"] = () if continue_from is None else read_records(continue_from)
    options["plugin"] = str(Path(plugin or "").absolute()) if file else plugin or ""
    complete = True
    try:
        for study in studies:
            state = _run_one(study, out, made, options)
            if not as_json:
                print_study(out, study.name)
            complete &= _is_complete(study.name, state, out)
    finally:
        if not isinstance(made, int):
            made.close()
    if as_json:
        print_json([study_record(out, study.name) for study in studies])
    if not complete:
        raise typer.Exit(1)


def _study_of(
    tasks: list[str],
    mechanisms: list[str],
    settings: list[str] | None,
    controls: bool,
    changes: dict[str, Any],
) -> Study:
    """Return a study of tasks and mechanisms; --set names a setting of a run (steps, width, ...) or a knob of
    the task.
    """
    from dataclasses import fields

    from unsoft.lab.study import make_study
    from unsoft.lab.training import Spec

    if not tasks or not mechanisms:
        raise typer.BadParameter("--tasks and --mechanisms belong together")
    own = {one.name for one in fields(Spec)}
    given = read_pairs(settings, "--set")
    group = {
        "mechanisms": mechanisms,
        "controls": controls,
        "settings": {name: value for name, value in given.items() if name in own},
        "knobs": {name: value for name, value in given.items() if name not in own},
    }
    return make_study(
        {"name": "-".join(tasks), "group": [{"task": task, **group} for task in tasks], **changes}
    )


def _factor(text: str) -> float:
    """Return the number of a text such as "10x"."""
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise wrong(f"{text!r} is not a factor such as 10x", "'--scale'") from None


def _choose_device(name: str) -> None:
    """Make this process and its workers use the device; an error if it is not there."""
    import os

    if name not in ("cpu", "cuda"):
        raise wrong(f"{name!r} is neither cpu nor cuda", "'--device'")
    if name == "cpu":  # torch has not been asked yet, here or in the workers
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    import torch

    if not torch.cuda.is_available():
        raise wrong(f"torch {torch.__version__} sees no CUDA device", "'--device'")


def _split(texts: list[str] | None) -> list[str]:
    """Split texts at commas.

    >>> _split(["census, needle", "copy"])
    ['census', 'needle', 'copy']
    """
    return [name.strip() for text in texts or () for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in _split([text])]
    except ValueError:
        raise wrong(f"{text!r} is not a list of numbers such as 0.001,0.003,0.01", "'--lrs'") from None


def _workers_of(count: int | None, ray: str | None, cpus: float, gpus: float) -> int | Workers:
    """Return the number of processes, one for each core by default, or the workers of a Ray cluster."""
    if ray is None:
        from unsoft.lab.bench.machine import cores

        return count or len(cores())
    if count is not None:
        raise typer.BadParameter(
            "--workers is for this machine; a cluster has --cpus-per-run and --gpus-per-run"
        )
    from unsoft.lab.study.cluster import RayWorkers

    return RayWorkers(ray, cpus, gpus)


def _run_one(study: Study, out: Path, workers: int | Workers, options: dict[str, Any]) -> State:
    from unsoft.lab.study import run_study

    try:
        with progress(study.name) as tell:
            state = run_study(study, out, workers=workers, tell=tell, **options)
    except KeyboardInterrupt:
        note("stopped at once; rerun the same command to resume from the last checkpoints")
        raise typer.Exit(INTERRUPTED) from None
    if state.interrupted and state.waiting:
        note(
            f"stopped: {state.done} of {state.total} runs of {study.name} are done;"
            " rerun the same command to resume"
        )
        raise typer.Exit(INTERRUPTED)
    if state.other_code:
        note(
            f"{state.other_code} of {state.total} runs of {study.name} were made by other code of unsoft, and"
            " count as valid; to repeat them, give another folder (--out)"
        )
    return state


def _is_complete(name: str, state: State, out: Path) -> bool:
    """Return True unless runs failed or were left; a note says how many, why, and what to do."""
    if state.failed:
        more = f", and {len(state.errors) - 1} other errors" if len(state.errors) > 1 else ""
        note(
            f"{state.failed} of {state.total} runs of {name} failed ({state.errors[0]}{more});"
            f" unsoft study status --out {out} lists them. Fix the cause, then run the same command"
            " with --retry"
        )
    if state.lost:
        note(
            f"{state.waiting} of {state.total} runs of {name} are not done: {state.lost};"
            " run the same command again to resume"
        )
    return not state.failed and not state.lost


@command.command()
def status(out: _Out = Path("study"), as_json: AsJson = False) -> None:
    """Show how far studies are, and what failed.

    \b
    Examples:
      unsoft study status
      unsoft study status --out study --json
    """
    from unsoft.lab.study.record import STATUSES
    from unsoft.lab.study.store import NAME, StudyStore
    from unsoft.lab.study.summary import current

    with StudyStore(out / NAME) as store:
        rows = []
        every = current(store.records())
        for name, begun in store.studies().items():
            mine = [record for record in every if record.study == name]
            counts = [sum(record.status == kind for record in mine) for kind in STATUSES]
            rows.append([name, begun, *counts, f"{sum(record.wall for record in mine) / 60:.1f}"])
    titles = {"study": "whole", "begun": "left"} | dict.fromkeys((*STATUSES, "minutes"), "right")
    if as_json:
        print_json([dict(zip(titles, row, strict=True)) for row in rows])
        return
    show_table(titles, rows)
    for record in every:
        if record.error:
            note(f"{record.study}: {record.label}: {record.error}")
    for study in dict.fromkeys(record.study for record in every):
        print_study(out, study)


@command.command()
def export(
    to: Annotated[Path, path_option("FILE.csv or FILE.json.", show_default=False)],
    out: _Out = Path("study"),
    study: Annotated[str | None, unset("One study of the store; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write all runs to a file; docs/studies.md explains its columns.

    \b
    Examples:
      unsoft study export --to runs.csv
      unsoft study export --to runs.json --study census
    """
    from unsoft.cli.arguments import check_file
    from unsoft.lab.study.record import write_records
    from unsoft.lab.study.store import NAME, StudyStore
    from unsoft.lab.study.summary import current

    check_file(to, "'--to'")
    with StudyStore(out / NAME) as store:
        if study is not None and study not in store.studies():
            raise ValueError(
                f"study: there is no {study!r} in {out / NAME}; there are {', '.join(store.studies())}"
            )
        records = current(store.records(study))
    write_records(records, to)
    if as_json:
        print_json({"file": str(to), "runs": len(records)})
    else:
        typer.echo(f"{to}: {len(records)} runs")


@command.command()
def report(
    out: _Out = Path("study"),
    to: Annotated[
        Path | None, path_option("Folder of the page; default: report in --out.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page that needs no network, with its charts and their numbers.

    \b
    Examples:
      unsoft study report
      unsoft study report --out study --to page
    """
    from unsoft.cli.arguments import check_drawing
    from unsoft.lab.study.store import NAME, StudyStore

    with StudyStore(out / NAME) as store:
        records, definitions = store.records(), [store.definition(name) for name in store.studies()]
    check_drawing()
    folder = to or out / "report"
    check_folder(folder, "'--out'" if to is None else "'--to'")
    from unsoft.lab.study import Study
    from unsoft.lab.study.page import PAGE, write_report

    studies = [Study.from_dict(definition) for definition in definitions if definition is not None]
    counts = write_report(studies, records, folder)
    page, data, figures = folder / PAGE, folder / "data", folder / "figures"
    if as_json:
        paths = {"page": str(page), "data": str(data), "figures": str(figures)}
        print_json(paths | {"charts": counts["figures"]})
    else:
        typer.echo(f"{page}: the page\n{data}: its numbers")
        typer.echo(f"{figures}: {counts['figures']} charts as PNG and SVG")
