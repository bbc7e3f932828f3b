"""Studies from TOML, and what is refused before anything runs."""

import pytest

from unsoft.lab.study import make_study, read_study
from unsoft.lab.study.plan import Study, label_of
from unsoft.lab.study.read import controls

GROUP = {"task": "census", "mechanisms": ["softmax", "cog"]}


def made(**changes):
    return make_study({"group": [GROUP], **changes})


def test_a_file_with_everything(tmp_path):
    path = tmp_path / "crowds.toml"
    path.write_text(
        """
        source = "Rosić 2026"
        claim = "Crowds count once."
        seeds = [3, 5]
        sweep = "full"
        lrs = [0.001, 0.002, 0.004]

        [[group]]
        task = "census"
        knobs = {repeats = 4}
        choose_on = "repeats=32"
        settings = {steps = 100}
        mechanisms = ["softmax"]

        [[group.variant]]
        label = "two heads"
        mechanism = "softmax"
        settings = {heads = 2, steps = 200}

        [[group.variant]]
        label = "on mass"
        mechanism = "magnitude+softmax"
        options = {where = "mass"}

        [[rule]]
        mechanism = "on mass"
        over = ["softmax", "two heads"]
        margin = 0.1
        """
    )
    study = read_study(path)
    assert study.name == "crowds" and len(study) == 3 * 3 * 2 == len(list(study.runs()))
    run = next(run for run in study.runs() if run.variant.label == "two heads" and run.seed == 5)
    assert (run.spec.steps, run.spec.heads, run.spec.knobs, run.spec.lr) == (200, 2, {"repeats": 4}, 0.001)
    assert study.rules[0].group == "census" and study.rules[0].over == ["softmax", "two heads"]
    assert Study.from_dict(study.to_dict()).to_dict() == study.to_dict()


def test_controls_come_with_equal_parameters():
    study = make_study(
        {"group": [{"task": "census", "mechanisms": ["magnitude+softmax"], "controls": True}]}
    ).with_sizes()
    labels = [variant.label for variant in study.groups[0].variants]
    assert labels == ["magnitude+softmax", *(control.label for control in controls(study.groups[0]))]
    wider = next(variant for variant in study.groups[0].variants if variant.label == "softmax as large")
    assert wider.settings == {"width": 66, "mlp": 132}  # three parameters more than softmax of 64


def test_a_control_that_is_as_large_already_is_left_out():
    study = make_study({"group": [{"task": "census", "mechanisms": ["cog"], "controls": True}]})
    assert "softmax as large" not in [variant.label for variant in study.with_sizes().groups[0].variants]
    rule = {"mechanism": "cog", "over": "softmax as large", "margin": 0.1}
    with pytest.raises(ValueError, match="which is as large as it stands"):
        make_study(
            {"group": [{"task": "census", "mechanisms": ["cog"], "controls": True}], "rule": [rule]}
        ).with_sizes()


def test_a_grid_over_more_than_rates():
    study = made(search={"lr": [0.001, 0.003, 0.01], "mechanism_lr": [0.01, 0.1]})
    assert [label_of(point) for point in study.points[:2]] == [
        "lr=0.001, mechanism_lr=0.01",
        "lr=0.001, mechanism_lr=0.1",
    ]
    assert len(study) == 2 * (6 + 4)


def test_without_a_sweep_the_task_says_the_rate():
    study = made(sweep="none")
    assert study.points == ({"lr": 0.003},) and len(study) == 10


VARIANT = {"label": "big", "mechanism": "softmax"}


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"group": [{"task": "sensus", "mechanisms": ["cog"]}]}, "sensus"),
        ({"group": [{"task": "census", "mechanisms": ["softmaxx"]}]}, "softmaxx"),
        (
            {"group": [{"task": "census", "mechanisms": "cog"}]},
            "'mechanisms' must be a list of names, not 'cog'",
        ),
        ({"group": [GROUP | {"knobs": {"repeat": 3}}]}, "repeat"),
        ({"group": [GROUP | {"settings": {"step": 3}}]}, "a run has no setting 'step'"),
        ({"group": [GROUP | {"settings": {"heads": 5}}]}, "does not give 5 heads"),
        ({"group": [GROUP, GROUP]}, "two groups are called 'census'"),
        ({"group": [GROUP | {"mechanisms": ["cog", "cog"]}]}, "two mechanisms of census are called 'cog'"),
        ({"group": [{"mechanisms": ["cog"]}]}, "a group needs 'task'"),
        ({"group": []}, "needs at least one task"),
        ({"grups": []}, "a study has no 'grups'"),
        ({"group": [GROUP | {"colour": 1}]}, "a group has no 'colour'"),
        ({"group": [GROUP | {"variant": [VARIANT | {"as_big_as": "cog"}]}]}, "a variant has no 'as_big_as'"),
        (
            {"group": [GROUP | {"choose_on": "repeats=9"}]},
            "'choose_on' of census must be one of repeats=1, repeats=2, repeats=4, repeats=8, repeats=16,"
            " repeats=64, repeats=512; not 'repeats=9'",
        ),
        (
            {"group": [{"task": "opposition", "mechanisms": ["cog"], "choose_on": "length=9"}]},
            "'choose_on' of opposition must be left out: opposition has one difficulty; not 'length=9'",
        ),
        ({"group": [GROUP | {"choose_on": 64}]}, "'choose_on' must be a text, not 64"),
        (
            {"group": [GROUP | {"choose_on": "repeats=16"}], "sweep": "none"},
            "chooses nothing without a sweep",
        ),
        ({"seeds": 0}, "'seeds' must be at least 1, not 0"),
        ({"seeds": []}, "'seeds' must be at least 1, not 0"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"seeds": 2.5}, "'seeds' must be a whole number"),
        ({"lrs": [0.003]}, "a sweep needs at least 3 learning rates, and 1 is given"),
        ({"lrs": [0.003, 0.003, 0.003]}, "a sweep needs at least 3 learning rates, and 1 is given"),
        ({"lrs": [0.0, 0.1, 0.2]}, "must be a number over 0"),
        ({"lrs": ["a", "b", "c"]}, "must be a number over 0"),
        ({"lrs": 0.1}, "must be a list"),
        ({"lrs": [0.1, 0.2, 0.3], "sweep": "none"}, "without a sweep there is one learning rate"),
        ({"sweep": "half"}, "'sweep' must be one of tuned, short, full, none"),
        ({"tuning_seeds": 9}, "'tuning_seeds' must be a whole number from 1"),
        ({"tuning_seeds": "one"}, "'tuning_seeds' must be a whole number from 1"),
        ({"sweep": ["full"]}, "'sweep' must be one of"),
        ({"seeds": [[0], 1]}, "different whole numbers"),
        ({"seeds": [True, False]}, "different whole numbers"),
        ({"search": {"weight_decay": [1]}}, "'search' needs learning rates"),
        ({"group": [GROUP | {"settings": {"lr": 0.1}}]}, "put its values in 'lrs' (--lrs)"),
        (
            {
                "group": [GROUP | {"variant": [VARIANT | {"settings": {"warmup": 3}}]}],
                "search": {"lr": [0.1, 0.2, 0.3], "warmup": [1, 2]},
            },
            "'warmup' is swept, so it cannot be a setting, too; put its values in 'search'",
        ),
        ({"group": [GROUP | {"controls": "no"}]}, "'controls' must be true or false, not 'no'"),
        ({"group": [GROUP | {"variant": [VARIANT | {"options": {"where": "mass"}}]}]}, "no option 'where'"),
        ({"rule": [{"mechanism": "cog", "over": 3, "margin": 0}]}, "'over' of a rule must be a list"),
        ({"rule": [{"mechanism": "cog", "over": "softmax", "margin": 0, "on": 3}]}, "'on' of a rule"),
        ({"rule": [{"mechanism": "cog", "over": "cog", "margin": 0.1}]}, "compares 'cog' with itself"),
        (
            {"rule": [{"mechanism": "cog", "over": "softmax", "margin": 2}]},
            "a rule with margin 2 cannot pass: accuracy goes from 0 to 1",
        ),
        (
            {"rule": [{"mechanism": "cog", "over": "softmax", "margin": -1.0}]},
            "a rule with margin -1 cannot fail: accuracy goes from 0 to 1",
        ),
        (
            {"rule": [{"mechanism": "cog", "over": "softmax", "margin": 2, "on": "head_diversity"}]},
            "a rule with margin 2 cannot pass: head_diversity goes from 0 to 2",
        ),
        (
            {
                "group": [GROUP | {"task": "trigger"}],
                "rule": [{"mechanism": "cog", "over": "softmax", "margin": 1}],
            },
            "a rule with margin 1 cannot pass: relative error goes from 0 to 1",
        ),
        (
            {"rule": [{"mechanism": "cog", "over": "softmax", "margin": 0.1, "on": "repeats=9"}]},
            "'on' of a rule must be one of score, repeats=1",
        ),
        ({"rule": [{"mechanism": "cog", "over": "softmax"}]}, "a rule needs 'margin' or 'at_most'"),
        (
            {"rule": [{"mechanism": "cog", "over": "softmax", "at_most": 0.5}]},
            "bounds a statistic of attention",
        ),
        (
            {"rule": [{"mechanism": "cog", "over": "softmax", "at_most": 1.0, "on": "first_token"}]},
            "inside its range to pass or fail; not 1 of first_token",
        ),
        ({"rule": [{"mechanism": "sinh", "over": "softmax", "margin": 0}]}, "a rule is about 'sinh'"),
        ({"rule": [{"mechanism": "cog", "over": [], "margin": 0}]}, "at least one mechanism in 'over'"),
        ({"rule": [{"mechanism": "cog", "over": "softmax", "margin": "big"}]}, "must be a number"),
    ],
)
def test_what_is_wrong_is_one_line(changes, problem):
    with pytest.raises((ValueError, TypeError)) as found:
        make_study({"group": [GROUP], **changes}).with_sizes()
    assert problem in str(found.value) and "\n" not in str(found.value)


def test_two_labels_for_the_same_run_are_refused():
    with pytest.raises(ValueError, match="'softmax' and 'big' of census are the same run"):
        made(group=[GROUP | {"variant": [VARIANT]}]).with_sizes()
    with pytest.raises(ValueError, match="is to be as large as 'nobody'"):
        made(group=[GROUP | {"variant": [VARIANT | {"as_large_as": "nobody"}]}]).with_sizes()


def test_files_that_are_no_study(tmp_path):
    (tmp_path / "bad.toml").write_text("seeds = = 3")
    with pytest.raises(ValueError, match="is not TOML"):
        read_study(tmp_path / "bad.toml")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_study(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="No such file or directory; did you mean --default census"):
        read_study("census")


def test_controls_are_twice_what_the_task_has():
    """Recall has two layers of its own."""
    study = make_study({"group": [{"task": "recall", "mechanisms": ["cog"], "controls": True}]})
    more = {variant.label: variant.settings for variant in study.groups[0].variants}
    own = study.groups[0]
    alone = next(run.spec for run in study.runs() if run.variant.label == "softmax")
    assert own.task == "recall" and alone.layers == 2
    assert more["softmax ×2 layers"] == {"layers": 4}
    assert more["softmax ×2 heads"] == {"heads": 2 * alone.heads}
