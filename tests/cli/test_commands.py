"""``unsoft list`` and ``unsoft cache``, and how every command fails."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import unsoft
from unsoft.cli import commands, main
from unsoft.engines.native import availability, compiler
from unsoft.mechanisms import formulas


def test_console_script_is_declared():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'unsoft = "unsoft.cli:main"' in project
    for entry in entry_points(group="console_scripts", name="unsoft"):
        assert entry.load() is main


def test_version(run):
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"unsoft {unsoft.__version__}\n")


def test_a_mistake_in_a_real_process(run):
    done = run("nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "nope" in done.stderr


def test_an_unexpected_error_is_one_line_unless_the_traceback_is_asked_for(run_here, monkeypatch, cache):
    monkeypatch.setattr(compiler, "clear_cache", lambda: cache.rmdir())
    done = run_here("cache", "clear")
    assert done.returncode == 1
    assert done.stderr.startswith("unsoft: ") and len(done.stderr.splitlines()) == 1
    monkeypatch.setenv("UNSOFT_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["unsoft", "cache", "clear"])
    with pytest.raises(FileNotFoundError):
        main()


def test_help_names_every_command(run_here):
    for arguments in ([], ["--help"]):
        done = run_here(*arguments)
        assert done.returncode == 0
        assert all(word in done.stdout for word in ("list", "bench", "theory", "cache"))


def test_list_shows_every_mechanism_with_its_properties(run_here):
    done = run_here("list")
    lines = done.stdout.splitlines()
    for row in unsoft.mechanisms().rows():
        assert any(all(cell in line for cell in row.values()) for line in lines), row["name"]


def test_list_json_holds_formulas_that_can_be_rebuilt(run_here):
    rows = {row["name"]: row for row in json.loads(run_here("list", "--json").stdout)}
    assert list(rows) == list(unsoft.mechanisms())
    for name, formula in formulas().items():
        assert unsoft.Formula.from_dict(rows[name]["formula"]) == formula
    assert rows["gpam"]["summary"] and rows["gpam"]["formula"]["name"] == "softmax"
    assert rows["cog"]["properties"]["signed"] is True


def test_cache_counts_and_clears_what_is_kept_and_nothing_else(run_here, cache):
    assert "0 compiled libraries" in run_here("cache", "info").stdout
    (cache / "models" / "tiny").mkdir(parents=True)
    (cache / "models" / "tiny" / "config.json").write_bytes(b"x" * 2**20)
    for name in ("a.so", "b.so", "c.tmp", "notes.txt"):
        (cache / name).write_bytes(b"x" * 2**20)
    info = run_here("cache", "info").stdout
    assert str(cache) in info and "2 compiled libraries, 2.0 MB" in info and "1 models, 1.0 MB" in info
    assert "1 unfinished libraries, 1.0 MB" in info
    assert "2 compiled libraries deleted" in run_here("cache", "clear").stdout
    assert [file.name for file in cache.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("action", ["info", "clear"])
@pytest.mark.parametrize("variable", ["UNSOFT_CACHE_DIR", "UNSOFT_COMPARE_DIR"])
@pytest.mark.parametrize("below", ["", "/below"])
def test_a_cache_folder_that_is_a_file(run_here, monkeypatch, tmp_path, action, variable, below):
    file = tmp_path / "file"
    file.write_text("content")
    monkeypatch.setenv(variable, f"{file}{below}")
    done = run_here("cache", action)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and f"{file} is a file" in done.stderr
    assert variable in done.stderr and file.read_text() == "content"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nope"], 2, "nope"),
        (["list", "--nope"], 2, "--nope"),
        (["cache"], 2, "command"),
        (["bench", "--quick", "--full"], 2, "--quick and --full"),
        (["bench", "--to", "/does/not/exist/x.json"], 2, "/does/not/exist"),
        (["bench", "cogg"], 2, "did you mean 'cog'?"),
        (["bench", "--only", "nope", "cog"], 2, "unknown name 'nope'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_by_one_line(run_here, monkeypatch, arguments, code, words):
    monkeypatch.setattr(availability, "ready", lambda formula, double: False)
    done = run_here(*arguments)
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("unsoft: ")
    assert words in done.stderr


def test_a_reader_that_stops_early_causes_no_traceback(command, environment):
    with subprocess.Popen(
        [*command, "list", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


COMMANDS = [
    "doctor",
    "compare",
    "convert",
    "list",
    "show",
    "try",
    "bench",
    "neurons",
    "steer",
    "study",
    "study run",
    "swap",
    "tasks",
    "theory",
    "train",
    "inspect",
    "cache",
    "cache info",
    "cache clear",
]


LINES = ["--version", "--help", "", *(f"{name} --help" for name in COMMANDS), "nope", "bench --nope"]
HELP = """
import json, sys
from unsoft.cli import main
answers = {}
for line in sys.stdin.read().splitlines():
    sys.argv = ["unsoft", *line.split()]
    try:
        main()
    except SystemExit as stopped:
        answers[line] = [stopped.code, "torch" in sys.modules]
print(json.dumps(answers))
"""


def test_help_does_not_wait_for_torch(environment):
    done = subprocess.run(
        [sys.executable, "-c", HELP], input="\n".join(LINES), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers == {line: [2 if "nope" in line else 0, False] for line in LINES}


def test_help_of_every_command_is_tried(run_here):
    shown = run_here("--help").stdout.partition("Use:\n")[2].partition("Exit codes")[0].split("\n")
    names = [line.split()[0] for line in shown if len(line) > 2 and line.startswith("  ") and line[2] != " "]
    assert names and set(names) == {name for name in COMMANDS if " " not in name}


def test_a_new_command_is_one_file(run_here, tmp_path, monkeypatch):
    """A file in the folder of commands is listed, has help, runs and fails as the others do."""
    (tmp_path / "hello.py").write_text(
        'def command(name: str) -> None:\n    """Greet somebody."""\n'
        '    if not name:\n        raise ValueError("no name")\n'
        "    print('hello', name)\n"
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    assert "Greet somebody." in run_here("--help").stdout
    assert "Usage: unsoft hello" in run_here("hello", "--help").stdout
    assert run_here("hello", "you").stdout == "hello you\n"
    failed = run_here("hello", "")
    assert (failed.returncode, failed.stderr) == (2, "unsoft: no name\n")
    sys.modules.pop("unsoft.cli.commands.hello")


def test_no_command_imports_another():
    for path in Path(commands.__file__).parent.glob("*.py"):
        assert "unsoft.cli.commands" not in path.read_text(), path.name
