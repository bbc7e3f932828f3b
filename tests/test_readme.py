"""The README is true: its two commands are the ones CI runs, its python blocks run,
its table quotes the records."""

import re
from pathlib import Path

import pytest

from docs.generate import readme_table

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
    """First of all, word for word; after it only the smallest tests of the GPU engine."""
    steps = [
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if not line.startswith(("#", "set ", "cd ", "export "))
    ]
    assert steps == [blocks("bash")[1].rstrip("\n"), ".ci/gpu-small"]


@pytest.mark.parametrize("source", blocks("python"))
def test_python_blocks_run(source):
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_python_blocks():
    assert len(blocks("python")) >= 2


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_table_quotes_what_was_measured(name):
    script, text = readme_table, (ROOT / name).read_text()
    assert len(script.QUOTED.findall(text)) > 10
    assert script.page(text) == text, "run: make docs"


def test_the_chinese_page_has_the_same_commands():
    text = (ROOT / "README.zh-CN.md").read_text()
    assert all(f"```bash\n{command}```" in text for command in blocks("bash"))


def test_links_lead_somewhere():
    pages = [ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")]
    for page in (*pages, *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
