"""The same words for the same things in every command: mechanisms, options, --json, examples."""

import json
import re
import shlex

import pytest

import unsoft
from tests.cli.conftest import every_command
from unsoft.cli import terminal
from unsoft.cli.app import PANELS, summary
from unsoft.cli.completion import (
    complete_claim,
    complete_mechanism,
    complete_model,
    complete_section,
    complete_study_or_task,
    complete_task,
)
from unsoft.cli.mechanisms import read_mechanism, read_mechanisms
from unsoft.lab.compare.plan import section_names, sections
from unsoft.lab.study.read import default_studies
from unsoft.lab.tasks import tasks
from unsoft.mechanisms import unregister
from unsoft.modules.registry import resolve

MINE = "name=mine;weight=tanh(s)/n"


def examples(command):
    text = command.help.partition("Examples:")[2].partition("\n\n")[0]
    return [line.strip() for line in text.splitlines() if line.strip()]


COMMANDS = dict(every_command())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_has_two_examples_that_can_be_read(words):
    lines = examples(COMMANDS[words])
    assert len(lines) >= 2
    for line in lines:
        parts = shlex.split(line)
        parts = parts[1:] if "=" in parts[0] else parts  # a variable before the command
        assert tuple(parts[: len(words) + 1]) in (
            ("unsoft", *words),
            ("unsoft", *words[:-1], parts[len(words)]),
        )
        inner, rest = COMMANDS[()], parts[1:]
        if rest[0] == "COMMAND":
            continue
        while getattr(inner, "commands", None):
            if rest[0] not in inner.commands:
                rest = ["run", *rest]  # of study
            inner, rest = inner.commands[rest[0]], rest[1:]
        with inner.make_context("unsoft", list(rest)):
            pass  # options and arguments that do not exist, or are missing, are errors


@pytest.mark.parametrize(
    "name", ["try", "show", "compare", "theory", "bench", "train", "convert", "swap", "study run"]
)
def test_a_mechanism_is_an_argument_of_every_command(name):
    command = COMMANDS[tuple(name.split())]
    assert "mechanism" in {p.name for p in command.params if not p.opts[0].startswith("-")}
    options = {option for parameter in command.params for option in parameter.opts}
    assert not options & {"--mechanism", "-m", "--formula"}


def test_every_command_imports_plugins():
    for words, command in every_command():
        if words and not hasattr(command, "commands"):
            assert ["--plugin"] in [parameter.opts for parameter in command.params], words


def test_an_option_means_the_same_in_every_command():
    """Options of one name have one kind of value, and but for ranges of numbers and defaults one purpose."""
    kinds = {}
    for _, command in every_command():
        for parameter in command.params:
            for flag in parameter.opts if parameter.param_type_name == "option" else ():
                kinds.setdefault(flag, set()).add(parameter.bare_type())
    mixed = {flag for flag, found in kinds.items() if len(found) > 1}
    assert mixed <= {"--only", "--text"}, "one section or several; a path or nothing"


def test_results_are_asked_for_as_json_alike():
    without = {" ".join(words) for words, command in COMMANDS.items() if not hasattr(command, "commands")}
    without -= {
        " ".join(words)
        for words, command in COMMANDS.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == {"cache clear"}, "it has no result"


def test_names_and_formulas_are_one_list(capsys):
    mine = f"{{{MINE}}}"
    assert read_mechanisms(["cog", "relu", "cog"]) == ["cog", "relu"]
    assert read_mechanisms([MINE, "gated+mine"]) == [mine, f"gated+{mine}"]
    spec = resolve(read_mechanisms([MINE, "logn(16)+mine"])[1])
    assert spec.weight == resolve(f"logn(16)+{mine}").weight != resolve(mine).weight
    assert capsys.readouterr().err == ""
    assert resolve(read_mechanism("tanh(s)*exp(abs(s))")).mass is not None
    assert "normalise=abs (chosen" in capsys.readouterr().err


def test_a_modifier_before_a_formula_of_ones_own(run_here):
    line = ("theory", MINE, "logn(16)+mine", "--beta", "0", "--gamma", "1", "--n", "256")
    rows = json.loads(run_here(*line, "--json").stdout)
    assert [row["mechanism"] for row in rows] == ["mine", "logn(16)+mine"]
    sharper = "name=sharper;weight=tanh(2*s)/n"  # log(256) / log(16) = 2
    (same,) = json.loads(run_here("theory", sharper, "--beta", "0", "--gamma", "1", "--json").stdout)
    assert rows[1]["S"] == pytest.approx(same["S"], rel=1e-9) and rows[0]["S"] != pytest.approx(same["S"])


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("train", "census", "cog", "relu"), "unexpected extra argument"),
        (("convert", "smollm2"), "MECHANISM"),
        (("swap", "smollm2", "--out", "/tmp/never"), "MECHANISM"),
        (("compare", "weight=s;tau=2"), "'tau' occurs nowhere"),
        (("compare", MINE, MINE), "two formulas are called 'mine'"),
        (("bench", MINE, "nine+mine"), "unknown modifier 'nine'"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_nonsense_is_one_line(run_here, arguments, says):
    done = run_here(*arguments)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_cache_info_as_json(run_here):
    rows = json.loads(run_here("cache", "info", "--json").stdout)
    assert [sorted(one) for one in rows] == [["bytes", "count", "folder", "what"]] * len(rows) and len(
        rows
    ) >= 3


def test_exit_codes_are_documented(run_here):
    text = " ".join(run_here("--help").stdout.split())
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted" in text


def test_the_shell_completes_commands_and_mechanisms(run):
    done = run(_UNSOFT_COMPLETE="complete_bash", COMP_WORDS="unsoft theory logn+soft", COMP_CWORD="2")
    assert done.stdout.split() == ["logn+softmax", "logn+softmax1", "logn+softpick"], done.stderr


def test_names_for_completion_are_those_that_exist():
    assert set(complete_mechanism("")) >= set(unsoft.mechanisms())  # and modifiers
    assert complete_task("") == list(tasks()) and complete_task("copy,cen") == ["copy,census"]
    assert complete_section("") == sorted([*section_names(), "claims"])
    assert set(complete_study_or_task("")) == {*default_studies(), *tasks()}
    assert complete_model("smol") == ["smollm2"]
    claims = {claim.name for section in sections() for claim in section.claims}
    assert set(complete_claim("")) >= {
        name for name in claims if name.startswith(("few", "trained", "erased"))
    }


def test_help_is_grouped_and_whole(run_here):
    shown = run_here("--help").stdout
    names = [words[0] for words in COMMANDS if len(words) == 1]
    assert sorted(name for panel in PANELS.values() for name in panel) == sorted(names)
    for words, command in COMMANDS.items():
        if len(words) == 1:
            assert len(summary(command)) <= 66 and summary(command) in shown
    assert all(f"{title}:\n" in shown for title in PANELS) and "..." not in shown.partition("Use:")[2]


def test_placeholders_are_readable(run_here):
    for words in COMMANDS:
        shown = run_here(*words, "--help").stdout
        assert not re.search(r"<(list|str|int|float|path)|\{\w+\}|\[\[", shown), words
    assert "--seed N" in run_here("train", "--help").stdout
    assert "unsoft swap [OPTIONS] MODEL MECHANISM" in run_here("swap", "--help").stdout


def test_a_caret_stays_below_the_mistake(run_here):
    lines = run_here("theory", "weight=exp(s").stderr.splitlines()
    assert lines[1:3] == ["    exp(s", "         ^"] and lines[3].startswith("allowed: ")
    assert "; did you mean 'softmax'?" in run_here("theory", "sofmax").stderr
    assert "retention" not in run_here("theory", "sofmax").stderr, "one suggestion, not all names"


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("exp(exp(s))", "cannot be stabilised: in exp(exp(s)) the exponent grows exponentially itself"),
        ("s/(s - s)", "divides by zero"),
        ("tanh(x)", "unknown name 'x'; the logit is written s"),
        ("tahn(s)", "did you mean 'tanh'?"),
        ("", "the text is empty"),
        ("s" + "+s" * 5000, "the text has 10001 characters"),
    ],
    ids=["unstable", "zero", "symbol", "function", "empty", "long"],
)
def test_a_formula_that_cannot_be_tried(run_here, tmp_path, formula, says):
    done = run_here("try", formula, "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and done.stdout == "" and not any(tmp_path.iterdir())
    assert says in done.stderr and done.stderr.count("unsoft: ") == 1 and len(done.stderr) < 800


def test_a_mechanism_on_one_screen(run_here, monkeypatch, tmp_path):
    monkeypatch.setattr("unsoft.cli.commands.show._cost", lambda candidate: "as much as it takes")
    shown = run_here("show", "cog").stdout
    for words in ("sign(s)*exp(abs(s) - m)", "Lv et al. 2024", "Limitations: it cannot", "'cog', is_causal"):
        assert words in shown
    plugin = tmp_path / "mine.py"
    plugin.write_text("import unsoft\nunsoft.register('mine2', unsoft.Formula('tanh(s)/n', name='mine2'))\n")
    about = json.loads(run_here("show", "mine2", "--plugin", str(plugin), "--json").stdout)
    assert about["formula"] == {"weight": "tanh(s)/n"} and len(about["curve"]) == 49
    unregister("mine2")


@pytest.mark.parametrize("width", [40, 80, 140])
def test_nothing_is_cut_from_a_table(monkeypatch, capsys, width):
    monkeypatch.setattr(terminal, "_WIDE", width)
    columns = {"mechanism": "left"} | {f"question number {k}?": "right" for k in range(9)}
    rows = [["magnitude+cog", *(f"{k}.1234 ●" for k in range(9))]]
    terminal.show_table(columns, rows, box=False)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown and all(f"{k}.1234 ●" in shown for k in range(9))
    heads = " ".join(shown.split())
    assert shown.count("magnitude+cog") == shown.count("mechanism") >= (2 if width < 140 else 1)
    assert all(str(k) in heads for k in range(9))


def test_many_whole_columns_keep_every_digit(monkeypatch, capsys):
    # Eleven columns that fit by the width of their cells alone, and not with the space between them.
    monkeypatch.setattr(terminal, "_WIDE", 140)
    cells = [f"{k}.12345 end" for k in range(11)]
    terminal.show_table({f"c{k}": "whole" for k in range(11)}, [cells])
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in cells)


@pytest.mark.parametrize("out, err, bar", [(True, True, True), (False, True, False), (True, False, False)])
def test_no_bar_where_output_is_redirected(monkeypatch, capsys, out, err, bar):
    monkeypatch.setattr("sys.stdout.isatty", lambda: out)
    monkeypatch.setattr("sys.stderr.isatty", lambda: err)
    with terminal.progress(2) as show:
        show(0, "first", "the first step")
        show(1, "second", "the second step")
    said = capsys.readouterr().err
    assert (said == "[1/2] the first step\n[2/2] the second step\n") is not bar
    terminal.say("a line that goes")
    assert bool(capsys.readouterr().err) is bar
