"""The README is true: its two commands are the ones CI runs, its python blocks run,
its table is the registry's."""

import re
from pathlib import Path

import pytest

import unsoft

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_there_are_exactly_two_set_up_commands_of_one_line_each():
    assert [len(block.splitlines()) for block in blocks("bash")] == [1, 1]
    main, tests = blocks("bash")
    assert main.rstrip().endswith("unsoft compare --quick --out report")
    assert "pytest" in tests


@pytest.mark.parametrize("command", blocks("bash"))
def test_commands_create_their_environment_and_install_through_the_constraints(command):
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert " -c constraints.txt " in command


def test_ci_runs_the_test_command_of_the_readme():
    steps = [
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if not line.startswith(("#", "set ", "cd "))
    ]
    assert steps == [blocks("bash")[1].rstrip("\n")]


@pytest.mark.parametrize("source", blocks("python"))
def test_python_blocks_run(source):
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_python_blocks():
    assert len(blocks("python")) >= 2


def test_the_table_lists_every_mechanism():
    rows = re.findall(r"^\| ([\w()-]+) \| (.*?) \| (yes|) ?\| (yes|) ?\| (.*?) \|$", README, re.MULTILINE)
    found = unsoft.mechanisms()
    expected = [
        (
            row["name"],
            mechanism.summary,
            "yes" if mechanism.properties.signed else "",
            "yes" if mechanism.properties.sparse else "",
            mechanism.properties.row_sum,
        )
        for row, mechanism in zip(found.rows(), found.values(), strict=True)
    ]
    assert rows == expected


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
