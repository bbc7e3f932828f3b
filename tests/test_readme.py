"""The README: its commands exist, its python blocks run, its table quotes the records."""

import re
import subprocess
from pathlib import Path

import pytest

from docs.generate import readme_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_commands_are_targets_of_the_makefile():
    commands = [block.strip() for block in blocks("bash")]
    assert commands == ["make demo", "make test"]
    for command in commands:
        subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


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


def test_links_point_to_existing_files():
    pages = [ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")]
    for page in (*pages, *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
