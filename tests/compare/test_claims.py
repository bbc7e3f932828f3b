"""Claims: verdicts follow the measurements, and there is none without one."""

import copy

import pytest

from tests.compare.tiny import record_of
from unsoft.compare.jobs import Results
from unsoft.compare.section import VERDICTS, conclusions, sections
from unsoft.compare.subject import Subject

ASKED = {
    "vanishing-gradient",
    "cog-sums",
    "deletion",
    "slower-collapse",
    "non-negativity",
    "repulsion",
    "entropy-neurons",
    "frequency-neurons",
    "steering",
    "exp",
    "relu2",
    "identity",
    "general-linear",
    "iid-linear",
    "decay",
    "relu2-beta",
    "identity-floor",
    "identity-even",
    "norm-ratio",
    "causal-rank",
    "dimensions",
    "example",
    "clones-share",
    "isolated",
    "additive",
    "bound",
    "few-steps",
    "price",
    "tikhonov",
    "one-unit",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return record_of(
        [Subject("softmax", "softmax"), Subject("cog", "cog")],
        tmp_path_factory.mktemp("store"),
        ["focus", "hijack", "sign", "collapse", "solver", "claims"],
    )


def concluded(record):
    return conclusions(Results(record), "tiny", "report")


def verdicts(record):
    return {claim["name"]: claim["verdict"] for claim in concluded(record)["claims"]}


def changed(record, name, mechanism, change):
    copied = copy.deepcopy(record)
    (answer,) = (a for a in copied["answers"] if (a["name"], a["mechanism"]) == (name, mechanism))
    for row in answer["rows"]:
        change(row)
    return copied


def test_every_claim_of_the_issue_is_there_once():
    names = [claim.name for section in sections() for claim in section.claims]
    assert set(names) >= ASKED and len(names) == len(set(names))


def test_verdicts_that_mathematics_decides(measured):
    found = verdicts(measured)
    assert set(found.values()) <= set(VERDICTS)
    for name in (
        "vanishing-gradient",
        "cog-sums",
        "deletion",
        "identity-even",
        "general-linear",
        "decay",
        "example",
        "clones-share",
        "isolated",
        "additive",
        "bound",
        "forced-sum",
        "relu2-beta",
        "hijacking",
    ):
        assert found[name] == "holds", name
    assert found["norm-ratio"] == "does not hold" and found["dimensions"] == "does not hold"
    assert found["one-unit"] == found["gate"] == found["few-steps"] == "holds with limits"
    for name in ("repulsion", "entropy-neurons", "frequency-neurons", "steering"):
        assert found[name] == "not run"


def test_without_measurements_nothing_is_judged(measured):
    found = concluded(measured | {"answers": []})["claims"]
    assert {claim["verdict"] for claim in found} == {"not run"}
    assert all(claim["found"] for claim in found)


@pytest.mark.parametrize(
    "claim, name, mechanism, change",
    [
        ("cog-sums", "sums", "cog", lambda row: row.update(l1_high=1.1)),
        ("deletion", "sums", "softmax", lambda row: row.update(deletion=0.2)),
        ("example", "example", "", lambda row: row.update(share=0.3)),
        ("additive", "magnitude of sets", "", lambda row: row.update(found=row["found"] + 1)),
        ("bound", "magnitude of sets", "", lambda row: row.update(found=1.5)),
        ("exp", "focus", "softmax", lambda row: row.update(S=0.5)),
        ("identity-even", "focus", "identity", lambda row: row.update(S=row["S"] + 0.1 * row["beta"])),
        ("decay", "decay", "", lambda row: row.update(measured=1.0)),
        ("vanishing-gradient", "negative logits", "", lambda row: row.update(gradient=1.0)),
    ],
)
def test_another_measurement_is_another_verdict(measured, claim, name, mechanism, change):
    before = verdicts(measured)[claim]
    after = verdicts(changed(measured, name, mechanism, change))[claim]
    assert after == "does not hold" != before


def test_claims_that_fail_would_hold_if_the_numbers_were_so(measured):
    assert (
        verdicts(changed(measured, "norm ratios", "", lambda row: row.update(largest=row["sqrt"])))[
            "norm-ratio"
        ]
        == "holds"
    )
    sparser = changed(measured, "dimensions", "", lambda row: row.update(S=1 / row["width"]))
    assert verdicts(sparser)["dimensions"] == "holds"


def test_the_scoreboard_reads_the_measurements(measured):
    board = {row["mechanism"]: row["cells"] for row in concluded(measured)["scoreboard"]}
    assert list(board) == ["softmax", "cog"]
    assert (
        board["softmax"]["deletes"] == {"value": 0.0, "reading": "no"}
        and board["cog"]["deletes"]["reading"] == "yes"
    )
    assert (
        board["softmax"]["clones"]["value"] == pytest.approx(20 / 70)
        and board["softmax"]["clones"]["reading"] == "no"
    )
    assert board["softmax"]["training"] == {"value": None, "reading": "not run"}


def test_readings():
    by_name = {column.name: column for section in sections() for column in section.columns}
    assert [by_name["training"].reading(x) for x in (0.5, 1.5, 3.0, None)] == [
        "yes",
        "partly",
        "no",
        "not run",
    ]
    assert [by_name["clones"].reading(x) for x in (0.9, 0.5, 0.1)] == ["yes", "partly", "no"]
