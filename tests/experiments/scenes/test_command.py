"""``python -m experiments.scenes``: tables or JSON. Training and measuring are replaced."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import experiments.scenes.__main__ as command
from unsoft.lab.interpret.steering.controls import ControlResult, Judgement


@pytest.mark.parametrize("as_json", [False, True])
def test_results_are_shown_as_tables_or_json(tmp_path, monkeypatch, as_json):
    control = ControlResult("held-out scenes", -0.5, -0.6, -0.4, "below 0", True)
    measure = {"name": "recall", "before": 0.5, "after": 0.6, "change": 0.1, "low": 0.0, "high": 0.2}
    result = SimpleNamespace(
        judgement=Judgement(2.0, 1.0, 0.5, [control], []), measures=[measure | {"random": 0.5}]
    )
    monkeypatch.setattr(command, "train_scenes", lambda out, settings, progress: None)
    monkeypatch.setattr(command, "run_experiment", lambda model, negative, progress: result)
    monkeypatch.setattr(command, "write_report", lambda out, *rest: [out / "steering.html"])
    arguments = ["--out", str(tmp_path), *(["--json"] if as_json else [])]
    done = CliRunner().invoke(command.application(), arguments)
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "steering.html") in (done.stderr if as_json else done.stdout)
    if as_json:
        assert json.loads(done.stdout) == {
            "judgement": result.judgement.to_dict(),
            "measures": result.measures,
        }
    else:
        assert "recall" in done.stdout and "supported: at strength 2" in done.stdout
