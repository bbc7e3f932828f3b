"""The table of controls: on artificial models with known effects, every rule decides both ways."""

import pytest
import torch

from unsoft.lab.evidence import NOT_SUPPORTED, PARTLY, SUPPORTED, resampled_mean
from unsoft.lab.interpret.steering import Directions
from unsoft.lab.interpret.steering.controls import Bound, judge, steps

ITEMS = 30
TRUTH = torch.nn.functional.normalize(torch.arange(1.0, 17.0), dim=0)
OTHER = torch.nn.functional.normalize(torch.eye(16)[0] - TRUTH[0] * TRUTH, dim=0)


def along(vector):
    return Directions({0: vector.clone()}, site="block", method="mean", model="0" * 40)


def noise(seed):
    return torch.randn(16, generator=torch.Generator().manual_seed(seed))


def linear(directions, strength):
    """A model whose score is moved by the true direction and by nothing else."""
    base = torch.linspace(-1, 1, ITEMS)
    return (
        base if directions is None else base + strength * (directions.vectors[0] @ TRUTH) * (1 + 0.1 * base)
    )


def any_push(directions, strength):
    """A model that any push moves alike."""
    base = torch.linspace(-1, 1, ITEMS)
    return base if directions is None else base + strength * directions.vectors[0].norm()


def humped(directions, strength):
    """A model in which more is not more."""
    return linear(None, 0) if directions is None else linear(directions, strength if strength < 0.6 else 0.3)


def judged(score=linear, result=TRUTH, harm=0.0, **options):
    def loss(directions, strength):
        return torch.full((8,), 2.0 if directions is None else 2.0 + harm)

    return judge(
        score,
        along(2 * result),
        1.0,
        shuffled=lambda seed: along(noise(1000 + seed)),
        other=along(OTHER),
        bounds=[Bound("unrelated loss", loss, 0.1, "nats")],
        items="held-out items",
        **options,
    )


def failed(judgement):
    return {control.name for control in judgement.controls if not control.passed}


def test_a_true_direction_holds():
    result = judged()
    assert result.verdict == SUPPORTED and not failed(result)
    assert result.after - result.before == pytest.approx(2.0, abs=0.01)
    assert "6 of 6 controls passed" in result.summary() and "+2.0" in result.summary()


def test_side_effects_are_limits():
    assert judged(harm=0.1 - 1e-6).verdict == SUPPORTED
    assert judged(harm=0.11).verdict == PARTLY and failed(judged(harm=0.11)) == {"unrelated loss"}


def test_what_belongs_to_the_claim_must_come():
    def lies(fall):
        return lambda directions, strength: torch.full((8,), 1.0 if directions is None else 1.0 - fall)

    for fall, verdict in ((0.2, SUPPORTED), (0.04, NOT_SUPPORTED)):
        bound = Bound("lies", lies(fall), -0.05, "per caption", side_effect=False)
        shuffled = lambda seed: along(noise(1000 + seed))  # noqa: E731
        result = judge(
            linear, along(TRUTH), 1.0, shuffled=shuffled, other=along(OTHER), bounds=[bound], items="x"
        )
        assert result.verdict == verdict


def test_what_any_push_does_is_no_intervention():
    result = judged(any_push)
    assert result.verdict == NOT_SUPPORTED
    assert failed(result) == {"random direction", "shuffled labels", "another task"}


def test_a_wrong_direction_has_no_effect_of_its_own():
    assert "held-out items" in failed(judged(result=-TRUTH))
    assert judged(result=OTHER, harm=0.2).verdict == NOT_SUPPORTED


def test_more_must_be_more():
    assert failed(judged(humped)) == {"dose-response"}


def test_labels_that_tell_the_truth_when_shuffled_are_noticed():
    result = judge(
        linear,
        along(TRUTH),
        1.0,
        shuffled=lambda seed: along(TRUTH),
        other=along(OTHER),
        bounds=[],
        items="x",
    )
    assert failed(result) == {"shuffled labels"}


def test_a_direction_of_another_task_that_does_the_same_is_noticed():
    result = judge(
        linear,
        along(TRUTH),
        1.0,
        shuffled=lambda seed: along(noise(seed)),
        other=along(TRUTH),
        bounds=[],
        items="x",
    )
    assert failed(result) == {"another task"}


def test_every_step_is_reported_and_data_are_plain():
    reported = []
    content = judged(progress=reported.append).to_dict()
    assert len(reported) == steps(bounds=1)
    assert {"controls", "doses", "strength", "before", "after"} == set(content)
    assert [dose["strength"] for dose in content["doses"]] == [-1, -0.5, 0, 0.5, 1]


def test_interval_covers_the_mean_as_often_as_it_says():
    """Of 200 samples of 40 normal numbers, about 95 % of intervals cover 0; 4 standard errors either way."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        result = resampled_mean(torch.randn(40, generator=generator))
        covered += result.low <= 0 <= result.high
    assert 0.95 - 4 * 0.0155 <= covered / 200 <= 1


def test_interval_of_draws_counts_what_draws_differ_by():
    values = torch.arange(10.0)[:, None].expand(10, 50)  # items agree, draws do not
    assert resampled_mean(values).high - resampled_mean(values).low > 2
    assert resampled_mean(values.mT).high - resampled_mean(values.mT).low > 2
    with pytest.raises(ValueError, match="finite"):
        resampled_mean(torch.tensor([1.0, float("nan")]))
