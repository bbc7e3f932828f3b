"""The README: its commands exist, its python blocks run, its table quotes the records."""

import re
import subprocess
from pathlib import Path

import pytest

from docs.generate import quantities

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
    script, text = quantities, (ROOT / name).read_text()
    assert script.QUOTED.search(text)
    assert script.page(text) == text, "run: make docs"


def test_no_page_contradicts_a_record():
    assert quantities.conflicts(quantities.pages()) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Cost: 9.0 times a plain forward pass over 16 x 512 tokens.",
        "Inspection takes <!-- inspect -->9.0<!-- --> times the cost of a forward pass.",
        "With cog, SmolLM2 generates in 0.12 of the time of its own softmax.",
        "The original has 3.1. The control ends at 16.5.",
        "census, magnitude on mass: over softmax +0.921 (+0.213 to +0.226, 5 seeds)",
    ],
)
def test_a_conflicting_value_is_found(sentence):
    assert len(quantities.conflicts({"page.md": sentence})) == 1


def test_the_chinese_page_has_the_same_commands():
    text = (ROOT / "README.zh-CN.md").read_text()
    assert all(f"```bash\n{command}```" in text for command in blocks("bash"))


@pytest.mark.parametrize("name", ["quickstart.md", "quickstart.zh-CN.md"])
def test_the_quickstart_runs(name):
    page = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), name, "exec"), {"__name__": "quickstart"})


def test_links_point_to_existing_files():
    pages = [ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")]
    for page in (*pages, *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
