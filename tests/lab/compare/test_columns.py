"""Columns of the scoreboard: numbers that theory knows, and controls that get the worst mark."""

import math

import pytest
import torch

from tests.lab.compare.controls import NOISE, ONE_TOKEN, SCALED, ZERO
from tests.lab.compare.tiny import TINY
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.plan import sections
from unsoft.lab.compare.section import ScoreColumn
from unsoft.lab.compare.sections import collapse, deletion, hijack, learning, needle, opposition
from unsoft.lab.compare.sections.collapse import Noise, stack
from unsoft.lab.evidence import Estimate

COLUMNS = {column.name: column for section in sections() for column in section.columns}
SOFTMAX, COG = Candidate("softmax", "softmax"), Candidate("cog", "cog")


def results(**answers):
    """Of one mechanism called "it"; facts have names with a space in place of the underscore."""
    rows = [
        {"name": name, "mechanism": "it", "rows": found, "problem": ""} for name, found in answers.items()
    ]
    facts = (
        [{"name": collapse.NOISE, "mechanism": "", "rows": noise_rows(), "problem": ""}]
        if "collapse" in answers
        else []
    )
    return Results({"subjects": [{"label": "it", "own": False}], "answers": rows + facts})


_kept = {}


def noise_rows():
    return _kept.setdefault("noise", collapse.collapse(Noise(), TINY.depth, TINY.seeds))


def reading(column, **answers):
    return COLUMNS[column].cell(results(**answers), "it")["reading"]


def test_every_column_has_a_unit_and_reasons_and_can_say_no():
    for name, column in COLUMNS.items():
        assert column.unit and column.why, name
        worst = 1e9 if column.low_is_good else -1e9
        assert column.reading(worst) == "no" and column.reading(None) == "not run", name


def test_the_needle_needs_what_theory_says():
    found = [row["advantage"] for row in needle.needle(SOFTMAX, 2) if row["kind"] == "needed"]
    # exp(advantage) = sum of the others: 1023 exp(1/2)
    assert found == pytest.approx([math.log(1023) + 0.5] * 2, abs=0.3)
    relu2 = [
        row["advantage"] for row in needle.needle(Candidate("relu2", "relu2"), 2) if row["kind"] == "needed"
    ]
    assert relu2 == pytest.approx([math.sqrt(1023 / 2)] * 2, rel=0.1)
    assert reading("needle", needle=needle.needle(Candidate("identity", "identity"), 2)) == "no"


@pytest.mark.parametrize("control", [ZERO, NOISE], ids=lambda c: c.label)
def test_controls_of_single_rows_get_the_worst_mark(control):
    assert reading("needle", needle=needle.needle(control, 2)) == "no"
    assert reading("deletes", deletion=deletion.deletion(control, 2)) == "no"
    assert reading("opposed", opposition=opposition.opposition(control, 16)) == "no"
    assert reading("clones", hijack=hijack.hijack(control)) == "no"
    assert reading("learns", learning=learning.learning(control)) == "no"


def test_a_scaled_softmax_gains_nothing():
    for column, call, field in (
        ("deletes", lambda s: deletion.deletion(s, 2), "deletion"),
        ("opposed", lambda s: opposition.opposition(s, 16), "opposition"),
    ):
        cells = [COLUMNS[column].cell(results(**{field: call(s)}), "it") for s in (SOFTMAX, SCALED)]
        assert cells[0]["value"] == pytest.approx(cells[1]["value"], abs=1e-6) and cells[1]["reading"] == "no"


@pytest.fixture(scope="module")
def stacks():
    return {
        s.label: collapse.collapse(s, TINY.depth, TINY.seeds)
        for s in (ZERO, NOISE, ONE_TOKEN, SCALED, SOFTMAX)
    }


@pytest.mark.parametrize("name", ["zero", "noise", "one token"])
@pytest.mark.parametrize("column", ["rank", "identity"])
def test_dead_and_random_states_get_the_worst_mark(stacks, column, name):
    assert reading(column, collapse=stacks[name]) == "no"


@pytest.mark.parametrize("column", ["rank", "identity"])
def test_doing_less_is_worth_no_more(stacks, column):
    scaled, plain = (
        COLUMNS[column].cell(results(collapse=stacks[name]), "it")["value"]
        for name in ("0.01 softmax", "softmax")
    )
    assert scaled == pytest.approx(plain, abs=1e-3) and plain > 0


def test_what_looks_at_itself_alone_keeps_everything():
    class Alone:
        def weights(self, query, key, *, is_causal=False):
            return torch.eye(query.shape[1]).expand(len(query), -1, -1)

    last = stack(Alone(), 3, False, 0)[-1]
    assert (
        last["decoded"] > 0.97
        and last["rank"] == pytest.approx(1)
        and last["moved"] == pytest.approx(0, abs=1e-5)
    )


def test_d_prime_of_the_plain_logit():
    found = opposition.distance(
        results(opposition=opposition.opposition(Candidate("identity", "identity"), rows=256)), "it"
    )
    assert found.value == pytest.approx(4 / math.sqrt(63), rel=0.03)


def test_cog_deletes_by_the_query_and_softmax_does_not():
    cog, softmax = (deletion.deletion(s, 3) for s in (COG, SOFTMAX))
    assert reading("deletes", deletion=cog) == "yes" and all(row["dynamic"] == 0 for row in softmax)
    assert all(row["removed"] > 0.05 for row in softmax), "softmax deletes, too, through the output map"


def test_clones_count_as_clones_unless_a_gate_says_otherwise():
    assert hijack.effective_count(results(hijack=hijack.hijack(SOFTMAX)), "it") == pytest.approx(50)
    # xsa takes the row's own key away, which is one of the crowd and not the unique one.
    exclusive = hijack.hijack(Candidate("xsa+softmax", "xsa+softmax"))
    assert 40 < hijack.effective_count(results(hijack=exclusive), "it") < 60
    gated = results(hijack=hijack.hijack(Candidate("magnitude", "magnitude")))
    # gates of 1/1.1 and 1/50.1 without a fit
    crowd, alone = torch.sigmoid(torch.tensor([1 / 50.1, 1 / 1.1], dtype=torch.float64)).tolist()
    assert COLUMNS["clones"].cell(gated, "it")["value"] == pytest.approx(50 * crowd / alone, rel=1e-3)
    assert 0.5 < COLUMNS["clones_fitted"].cell(gated, "it")["value"] < 2
    plain = results(hijack=hijack.hijack(SOFTMAX))
    assert COLUMNS["clones_fitted"].cell(plain, "it")["value"] is None
    clones = COLUMNS["clones"]
    assert [clones.reading(x) for x in (1.0, 0.5, 0.1, 5.0, 50.0)] == ["yes", "yes", "no", "partly", "no"]


@pytest.mark.parametrize(
    ("name", "gated"),
    [
        ("magnitude", True),
        ("sink+magnitude", True),
        ("gated+magnitude", True),
        ("density+cog", True),
        ("gpam", False),
    ],
)
def test_a_gate_on_keys_is_fitted_wherever_the_mechanism_has_one(name, gated):
    """It is asked of the mechanism, not of its name."""
    kinds = {row["kind"] for row in hijack.hijack(Candidate(name, name))}
    assert ("fitted" in kinds) == gated


def test_flat_formulas_never_learn():
    assert reading("learns", learning=learning.learning(Candidate("relu2", "relu2"))) == "no"
    assert reading("learns", learning=learning.learning(COG)) == "yes"


def cell(estimate, **more):
    return ScoreColumn("x", "x", "", lambda *_: estimate, 8.0, 63.0, low_is_good=True, **more).cell(
        results(), "softmax"
    )


def test_cells_carry_intervals_within_what_is_possible():
    assert cell(Estimate(4.0, -2.0, 10.0), possible=(0.0, 9.0)) == {
        "value": 4.0,
        "reading": "yes",
        "beyond": False,
        "low": 0.0,
        "high": 9.0,
    }


@pytest.mark.parametrize("estimate", [Estimate(64.0, 60.0, 68.0), Estimate(37.0, 0.0, math.inf)])
def test_a_censored_number_is_a_bound_without_an_interval(estimate):
    found = cell(estimate, limit=64.0)
    assert found["beyond"] and found["value"] == estimate.value and "low" not in found


def test_draws_that_are_all_equal_have_no_interval():
    assert "low" not in cell(Estimate(3.0, 3.0, 3.0)) and not cell(Estimate(3.0, 3.0, 3.0))["beyond"]


def test_a_draw_that_never_learns_makes_the_steps_a_lower_bound():
    rows = [{"draw": k, "rate": 1.0, "steps": steps} for k, steps in enumerate([20, 30, learning.LIMIT])]
    assert COLUMNS["learns"].cell(results(learning=rows), "it") == {
        "value": 50.0,
        "reading": "partly",
        "beyond": True,
    }
    assert not COLUMNS["learns"].cell(results(learning=rows[:2]), "it")["beyond"]


def test_no_column_shows_an_impossible_interval():
    """Two draws that differ much have a wide interval, which a share must not leave."""
    rows = [{"dynamic": x, "removed": 0.5, "moved": 1.0} for x in (0.0, 0.9)]
    found = COLUMNS["deletes"].cell(results(deletion=rows), "it")
    assert (found["low"], found["high"]) == (0.0, 1.0)
