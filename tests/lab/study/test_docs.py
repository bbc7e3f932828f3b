"""docs/studies.md: its example runs, its study can be read, its tables are complete."""

import re
import tomllib
from pathlib import Path

from unsoft.lab.study import default_study, make_study
from unsoft.lab.study.read import default_studies
from unsoft.lab.study.record import COLUMNS

PAGE = (Path(__file__).parents[3] / "docs" / "studies.md").read_text()


def between(name):
    return PAGE.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]


def test_the_example_runs(capsys):
    exec(compile(PAGE.partition("```python\n")[2].partition("```")[0], "studies.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["softmax", "magnitude"]
    assert all("no learning-rate sweep" in line for line in shown)


def test_the_study_of_the_page_is_one():
    study = make_study(tomllib.loads(PAGE.partition("```toml\n")[2].partition("```")[0])).with_sizes()
    assert len(study.groups[0].variants) == 5 and len(study) == 5 * 7


def test_every_column_is_explained():
    assert sorted(re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|\n", "|\n", between("columns")))) == sorted(
        COLUMNS
    )


def test_every_default_study_is_listed():
    rows = []
    for name in default_studies():
        study = default_study(name)
        rows.append(f"| {name} | {study.source} | {'; '.join(rule.text for rule in study.rules)} |\n")
    assert between("claims") == "".join(rows)
