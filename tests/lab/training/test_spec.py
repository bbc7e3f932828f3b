"""A run as data."""

import json
import math

import pytest

from unsoft.lab.tasks import task
from unsoft.lab.training import Spec


def test_a_spec_is_plain_data():
    spec = Spec(
        task="needle", mechanism="magnitude+cog", knobs={"crowd": 4}, options={"where": "mass"}, lr=0.001
    )
    again = Spec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    full = spec.filled()
    batch = task("needle").setup.batch
    assert (full.lr, full.width, full.mlp, full.batch) == (0.001, 64, 128, batch)
    assert full.filled() == full


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"task": "censsus"}, "did you mean 'census'"),
        ({"task": "census", "mechanism": "cogg"}, "cogg"),
        ({"task": "census", "knobs": {"repeat": 4}}, "no knob is called 'repeat'"),
        ({"task": "recall", "knobs": {"length": 10}}, "length of at least 16, not 10"),
        ({"task": "census", "width": 16}, "20 features"),
        ({"task": "copy", "width": 30, "heads": 4}, "does not give 4 heads"),
        ({"task": "copy", "steps": 0}, "'steps' must be a whole number of at least 1, not 0"),
        ({"task": "copy", "lr": math.nan}, "'lr' must be a finite number"),
        ({"task": "copy", "repulse": "svg"}, "'svgd', 'spos' or 'repel'"),
        ({"task": "copy", "repulse": "repel", "heads": 1}, "needs at least 2 'heads', not 1"),
        ({"task": "copy", "start": "closed"}, "'paper' or 'open'"),
        ({"task": "copy", "init_from": "smollm2", "layers": 2}, "'layers' is decided by the model"),
        ({"task": "copy", "seed": 2**32}, "less than"),
        ({"task": "copy", "sed": 1}, "has no 'sed'"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_runs(content, problem):
    with pytest.raises(ValueError, match=problem):
        Spec.from_dict(content)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="'steps' must be a whole number of at least 1, not '9'"):
        Spec(task="copy", steps="9")
    with pytest.raises(TypeError, match="plain data"):
        Spec(task="copy", options={"base": object()})


def test_options_that_a_mechanism_has_not_are_refused():
    with pytest.raises(TypeError, match="'softmax' has no option 'where'"):
        Spec(task="census", options={"where": "mass"})
    with pytest.raises(ValueError, match="'where' must be 'values' or 'mass'"):
        Spec(task="census", mechanism="magnitude+softmax", options={"where": "nowhere"})
