"""A place that cannot be written to is told before any work, by every command that writes."""

import sys
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import every_command
from unsoft.cli.arguments import check_file, check_folder, load_plugin, prepare_folder

READ_ONLY = Path("/proc")  # for root too
needs_proc = pytest.mark.skipif(not READ_ONLY.is_dir(), reason="this system has no read-only folder to try")


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    prepare_folder(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(typer.BadParameter, match="cannot be made a folder: .*file is a file"):
        check_folder(tmp_path / "file" / "deep")
    check_file(tmp_path / "file")
    with pytest.raises(typer.BadParameter, match="is a folder, not a file"):
        check_file(tmp_path)
    with pytest.raises(typer.BadParameter, match="does not exist"):
        check_file(tmp_path / "none" / "x.json")


def _refuse(*_, **__):
    raise AssertionError("work began before --out was tried")


@needs_proc
@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (["bench", "--quick", "--to"], "/proc/x.json"),
        (["compare", "--quick", "--out"], "/proc/report"),
        (["theory", "softmax", "--out"], "/proc/figures"),
        (["inspect", "minilm", "--out"], "/proc/figures"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_no_work_is_done_for_a_place_that_cannot_be_written(run_here, monkeypatch, arguments, out):
    for work in (
        "unsoft.lab.bench.plan.steps",
        "unsoft.lab.compare.jobs.run",
        "unsoft.theory.infinite",
        "unsoft.hf.models.load_model",
    ):
        monkeypatch.setattr(work, _refuse)
    done = run_here(*arguments, out)
    assert (done.returncode, done.stdout) == (2, "")
    assert out.rpartition("/")[0] in done.stderr and "cannot be written" in done.stderr
    assert "Errno" not in done.stderr and len(done.stderr.splitlines()) == 1


WRITING = [
    (words, parameter.opts[0])
    for words, command in every_command()
    for parameter in command.params
    if parameter.name in ("out", "to", "runs")
]


@pytest.mark.parametrize(
    ("words", "option"), WRITING, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_an_empty_path_is_wrong_usage_in_every_command(run_here, words, option):
    """It would be the current folder."""
    done = run_here(*words, f"{option}=")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"'{option}': a path cannot be empty" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [("def f(:", "SyntaxError: invalid syntax"), ("1 / 0", "ZeroDivisionError: division by zero")],
)
def test_a_plugin_that_cannot_be_imported_is_named_and_leaves_nothing(tmp_path, content, problem):
    path = tmp_path / "broken_plugin.py"
    path.write_text(content)
    with pytest.raises(typer.BadParameter, match=f"broken_plugin.py cannot be imported: {problem}"):
        load_plugin(str(path))
    assert "broken_plugin" not in sys.modules


def test_the_option_that_is_wrong_is_named(tmp_path):
    with pytest.raises(typer.BadParameter) as error:
        check_file(tmp_path / "none" / "runs.csv", "'--to'")
    assert error.value.param_hint == "'--to'"
