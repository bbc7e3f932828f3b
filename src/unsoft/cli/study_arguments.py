"""What users give to ``unsoft study`` in place of a file, and who does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from unsoft.cli.arguments import read_pairs

if TYPE_CHECKING:
    from unsoft.lab.study import Study
    from unsoft.lab.study.driver import Workers


def study_of(
    tasks: list[str],
    mechanisms: list[str],
    settings: list[str] | None,
    controls: bool,
    changes: dict[str, Any],
) -> Study:
    """--set names what a run has (steps, width, ...), or else what a task has."""
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


def words_of(texts: list[str] | None) -> list[str]:
    """Words with commas between them, or several options.

    >>> words_of(["census, needle", "copy"])
    ['census', 'needle', 'copy']
    """
    return [word.strip() for text in texts or () for word in text.split(",") if word.strip()]


def numbers_of(text: str) -> list[float]:
    try:
        return [float(word) for word in words_of([text])]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 0.001,0.003,0.01", param_hint="'--lrs'"
        ) from None


def workers_of(count: int | None, ray: str | None, cpus: float, gpus: float) -> int | Workers:
    """Processes of this machine, one for each core unless told otherwise, or a Ray cluster."""
    if ray is None:
        from unsoft.lab.bench.machine import cores

        return count or len(cores())
    if count is not None:
        raise typer.BadParameter(
            "--workers is for this machine; a cluster has --cpus-per-run and --gpus-per-run"
        )
    from unsoft.lab.study.cluster import RayWorkers

    return RayWorkers(ray, cpus, gpus)
