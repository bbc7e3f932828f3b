"""``unsoft study``: run studies, and show, export and report their results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from unsoft.cli import arguments, study_output
from unsoft.cli.arguments import AsJson, DryRun, Open, Plugin, Settings, path_option, unset, wrong
from unsoft.cli.completion import complete_study_or_task
from unsoft.cli.mechanisms import Names, read_mechanisms
from unsoft.cli.terminal import interrupted, note, print_json, show_table

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
      unsoft study needle cog --seeds 3
    """,
    rich_markup_mode=None,
)
_Store = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that --out named.")]


@command.command()
def run(
    study: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDY",
            help="A TOML file (docs/studies.md), a built-in study (--list), or tasks: census,needle.",
            show_default=False,
            autocompletion=complete_study_or_task,
        ),
    ] = None,
    mechanism: Names = None,
    default: Annotated[list[str] | None, unset("Built-in studies.", hidden=True)] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the built-in studies, and stop.")] = False,
    seeds: Annotated[int | None, unset("Number of seeds; default: 5.")] = None,
    lrs: Annotated[str | None, unset("Learning rates; default: 0.001,0.003,0.01.")] = None,
    sweep: Annotated[
        str | None, unset("tuned (all rates on the first seed, the best on all), full (all on all), or none.")
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(help="Of tasks: add controls, softmax also with more parameters, heads and layers."),
    ] = True,
    settings: Settings = None,
    workers: Annotated[int | None, unset("Number of processes; default: one for each core.", min=1)] = None,
    ray: Annotated[str | None, unset("A Ray cluster: auto, an address, or local to start one here.")] = None,
    cpus_per_run: Annotated[float, typer.Option(min=0.01, help="CPUs of the cluster for each run.")] = 1,
    gpus_per_run: Annotated[float, typer.Option(min=0, help="GPUs of the cluster for each run.")] = 0,
    out: Annotated[Path, path_option("Folder of the store, study.db.")] = Path("study"),
    runs: Annotated[
        Path | None, path_option("Folder of checkpoints; default: runs in --out.", show_default=False)
    ] = None,
    continue_from: Annotated[
        Path | None, unset("Runs of another machine (.csv, .json, study.db): finished ones are not repeated.")
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
    dry_run: DryRun = False,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Run or resume a study. After Ctrl-C, rerun the same command to resume.

    \b
    Examples:
      unsoft study census --out study
      unsoft study needle cog "tanh(s)*exp(abs(s))" --seeds 3 --set steps=300
    """
    if show_list:
        study_output.print_defaults(as_json=as_json)
        return
    arguments.check_folder(out)
    arguments.load_plugin(plugin)
    changes = {"seeds": seeds, "lrs": None if lrs is None else _numbers(lrs), "sweep": sweep}
    changes = {name: value for name, value in changes.items() if value is not None}
    if not study and not default:
        raise wrong("give a TOML file, a built-in study (--list), or tasks and mechanisms", "'STUDY'")
    from unsoft.lab.study import default_study, read_records, read_study

    if mechanism:
        names = read_mechanisms(mechanism)
        studies = [_study_of(_split([study or ""]), names, settings, controls, changes)]
    else:
        if changes or settings or not controls:
            raise typer.BadParameter("a written study is run as it is; change a copy of its file")
        names = default or _split([study or ""])
        studies = [read_study(Path(x)) if x.endswith(".toml") else default_study(x) for x in names]
    if scale is not None:
        from unsoft.lab.study.budget import scaled

        studies = [scaled(study, _factor(scale)) for study in studies]
    if device is not None:
        _choose_device(device)
    if dry_run:
        study_output.print_costs(studies, workers, as_json=as_json)
        return
    made = _workers_of(workers, ray, cpus_per_run, gpus_per_run)
    file = plugin is not None and plugin.endswith(".py")
    options: dict[str, Any] = {"runs": runs, "retry": retry, "any_code": any_code}
    options["earlier"] = () if continue_from is None else read_records(continue_from)
    options["plugin"] = str(Path(plugin or "").absolute()) if file else plugin or ""
    complete = True
    try:
        for one in studies:
            state = _run_one(one, out, made, options)
            if not as_json:
                study_output.print_study(out, one.name)
            complete &= _is_complete(one.name, state, out)
    finally:
        if not isinstance(made, int):
            made.close()
    if as_json:
        print_json([study_output.study_record(out, one.name) for one in studies])
    if not complete:
        raise typer.Exit(1)


def _study_of(
    tasks: list[str], mechanisms: list[str], pairs: list[str] | None, controls: bool, changes: dict[str, Any]
) -> Study:
    from unsoft.lab.study import make_study

    settings, knobs = arguments.read_settings(pairs)
    group = {"mechanisms": mechanisms, "controls": controls, "settings": settings, "knobs": knobs}
    groups = [{"task": task, **group} for task in tasks]
    return make_study({"name": "-".join(tasks), "group": groups, **changes})


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
        problem = "--workers is for this machine; a cluster has --cpus-per-run and --gpus-per-run"
        raise typer.BadParameter(problem)
    from unsoft.lab.study.cluster import RayWorkers

    return RayWorkers(ray, cpus, gpus)


def _run_one(study: Study, out: Path, workers: int | Workers, options: dict[str, Any]) -> State:
    from unsoft.lab.study import run_study

    try:
        with study_output.progress(study.name) as tell:
            state = run_study(study, out, workers=workers, tell=tell, **options)
    except KeyboardInterrupt:
        raise interrupted("stopped at once, the last checkpoints are kept") from None
    if state.interrupted and state.waiting:
        raise interrupted(f"{state.done} of {state.total} runs of {study.name} are done")
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
            f" unsoft study status {out} lists them. Fix the cause, then run the same command"
            " with --retry"
        )
    if state.lost:
        note(
            f"{state.waiting} of {state.total} runs of {name} are not done: {state.lost};"
            " run the same command again to resume"
        )
    return not state.failed and not state.lost


@command.command()
def status(folder: _Store = Path("study"), as_json: AsJson = False) -> None:
    """Show how far studies are, and what failed.

    \b
    Examples:
      unsoft study status
      unsoft study status mine --json
    """
    from unsoft.lab.study.record import STATUSES
    from unsoft.lab.study.store import NAME, StudyStore
    from unsoft.lab.study.summary import current

    with StudyStore(folder / NAME) as store:
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
        study_output.print_study(folder, study)


@command.command()
def export(
    to: Annotated[Path, path_option("FILE.csv or FILE.json.", show_default=False)],
    folder: _Store = Path("study"),
    only: Annotated[str | None, unset("Only this study of the store.", metavar="STUDY")] = None,
    as_json: AsJson = False,
) -> None:
    """Write all runs to a file; docs/studies.md explains its columns.

    \b
    Examples:
      unsoft study export --to runs.csv
      unsoft study export mine --to runs.json --only census
    """
    from unsoft.checks import did_you_mean
    from unsoft.lab.study.record import write_records
    from unsoft.lab.study.store import NAME, StudyStore
    from unsoft.lab.study.summary import current

    arguments.check_file(to, "'--to'")
    with StudyStore(folder / NAME) as store:
        if only is not None and only not in store.studies():
            hint = did_you_mean(only, store.studies()) or f"; there are {', '.join(store.studies())}"
            raise wrong(f"there is no study {only!r} in {folder / NAME}{hint}", "'--only'")
        records = current(store.records(only))
    write_records(records, to)
    if as_json:
        print_json({"file": str(to), "runs": len(records)})
    else:
        typer.echo(f"{to}: {len(records)} runs")


@command.command()
def report(
    folder: _Store = Path("study"),
    out: Annotated[
        Path | None, path_option("Folder of the page; default: FOLDER/report.", show_default=False)
    ] = None,
    open: Open = False,
    as_json: AsJson = False,
) -> None:
    """Write one page that needs no network, with its charts and their numbers.

    \b
    Examples:
      unsoft study report
      unsoft study report mine --out page --open
    """
    from unsoft.lab.study.store import NAME, StudyStore

    with StudyStore(folder / NAME) as store:
        records, definitions = store.records(), [store.definition(name) for name in store.studies()]
    arguments.check_drawing()
    target = out or folder / "report"
    arguments.check_folder(target)
    from unsoft.lab.study import Study
    from unsoft.lab.study.page import PAGE, write_report

    studies = [Study.from_dict(definition) for definition in definitions if definition is not None]
    counts = write_report(studies, records, target)
    page, data, figures = target / PAGE, target / "data", target / "figures"
    if as_json:
        paths = {"page": str(page), "data": str(data), "figures": str(figures)}
        print_json(paths | {"charts": counts["figures"]})
    else:
        typer.echo(f"{page}: the page\n{data}: its numbers")
        typer.echo(f"{figures}: {counts['figures']} charts as PNG and SVG")
    arguments.open_page(page, wanted=open)
