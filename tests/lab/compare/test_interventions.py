"""Verdicts from inside models: the page says what the files say, and refuses what is no such file."""

import json

import pytest

from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.section import QUICK, Request
from unsoft.lab.compare.sections.interventions import NAME, SECTION, jobs, verdicts_of

CLAIMS = {claim.name: claim for claim in SECTION.claims}


def found(rows):
    answer = {"name": NAME, "mechanism": "", "rows": rows, "problem": ""}
    return Results({"answers": [answer], "subjects": []})


def file(path, verdict, claim="steering"):
    row = {"claim": claim, "verdict": verdict, "found": f"it {verdict}, by 3.2"}
    path.write_text(json.dumps({"model": "mine", "command": "unsoft steer", "verdicts": [row]}))
    return path


@pytest.mark.parametrize("verdict", ["supported", "partly supported", "not supported", "not testable here"])
@pytest.mark.parametrize("name", CLAIMS)
def test_the_verdict_is_that_of_the_file(tmp_path, name, verdict):
    rows = verdicts_of(file(tmp_path / "v.json", verdict, name))
    assert CLAIMS[name].judge(found(rows)) == (
        verdict,
        f"mine: it {verdict}, by 3.2; measured with: unsoft steer",
    )


def test_ones_own_file_has_the_last_word(tmp_path):
    own = file(tmp_path / "own.json", "not supported")
    for verdicts, expected in ((None, "supported"), (str(own), "not supported")):
        (job,) = jobs(Request([], QUICK, verdicts=verdicts))
        assert CLAIMS["steering"].judge(found(job.compute()))[0] == expected


def test_without_a_verdict_it_is_not_run(tmp_path):
    rows = verdicts_of(file(tmp_path / "v.json", "supported"))
    assert CLAIMS["entropy-neurons"].judge(found(rows))[0] == "not run"
    strange = verdicts_of(file(tmp_path / "v.json", "maybe"))
    verdict, why = CLAIMS["steering"].judge(found(strange))
    assert verdict == "not run" and "'maybe'" in why


@pytest.mark.parametrize("content", ["", "[]", '{"verdicts": [{}]}', '{"verdicts": 3, "model": "m"}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "v.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a file of verdicts; unsoft neurons writes verdicts.json"):
        verdicts_of(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        verdicts_of(tmp_path / "missing.json")
