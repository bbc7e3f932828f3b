"""``unsoft doctor``: what it shows, its file, and its two verdicts."""

import json

import pytest
import torch
from typer.testing import CliRunner

from unsoft.cli.app import application
from unsoft.cli.commands import doctor
from unsoft.engines import POINTWISE, Engine, registry
from unsoft.engines.triton import availability
from unsoft.testing import device
from unsoft.testing.case import Case
from unsoft.testing.device import KINDS, DeviceCheck, Finding, check_device, verdict


def run(*arguments):
    return CliRunner().invoke(application(), ["doctor", *map(str, arguments)])


def test_it_shows_what_is_there_and_how_to_get_the_rest(tmp_path):
    done = run("--to", tmp_path / "doctor.json")
    assert done.exit_code == 0, done.output
    for word in ("torch", "C++ compiler", "engine native on cpu", "engine triton on cpu", "cache folder"):
        assert word in done.output
    facts = {fact["what"]: fact for fact in json.loads((tmp_path / "doctor.json").read_text())["facts"]}
    assert facts["torch"]["found"] == torch.__version__
    assert facts["engine dense on cpu"]["found"] == "available"
    assert facts["engine triton on cpu"]["found"].startswith("no: ")


def test_json_instead_of_tables(stand_in):
    done = run("--json", "--gpu")
    record = json.loads(done.stdout)
    assert record["facts"] and record["gpu"]["finished"]


def test_what_is_not_installed_comes_with_its_command(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    from unsoft.cli import installation
    from unsoft.lab.bench import machine

    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(machine.importlib.metadata, "version", missing)
    facts = {fact.what: fact for fact in installation._packages()}
    assert facts["triton"].found == "not installed" and facts["triton"].advice == "pip install 'unsoft[gpu]'"


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path):
    done = run("--to", tmp_path / "no" / "doctor.json")
    assert done.exit_code == 2 and "does not exist" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_reason_is_said(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = run("--gpu", "--json")
    assert done.exit_code == 1
    said = "nothing was checked: the engine 'triton' cannot run here: torch sees no GPU; see unsoft doctor"
    assert done.stderr == f"unsoft: {said}\n"
    record = json.loads(done.stdout)
    assert record["facts"] and record["gpu"] == {"verdict": said, "finished": False, "checks": []}


@pytest.fixture
def stand_in(monkeypatch):
    """The tiled engine on the CPU under the name of triton, and four short checks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(availability, "missing", lambda device, index: None)
    monkeypatch.setattr(availability, "failure", lambda device, index: None)
    tiled = POINTWISE.named("tiled")
    engine = Engine("triton", lambda call: None, tiled.run)
    others = [x for x in POINTWISE.engines if x.name != "triton"]
    monkeypatch.setattr(POINTWISE, "engines", [engine, *others])
    kinds = (
        DeviceCheck("short", "cog", Case(20, 20, dtype=torch.bfloat16)),
        DeviceCheck("NaN", "cog", Case(20, 20, dtype=torch.float32), non_finite=True),
    )
    monkeypatch.setattr(device, "KINDS", kinds)
    return engine


def test_a_gpu_that_computes_right(stand_in, tmp_path):
    done = run("--gpu", "--to", tmp_path / "doctor.json")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "doctor.json").read_text())["gpu"]
    assert record["verdict"] == "all 2 checks passed" and record["finished"]
    assert set(record["checks"][0]["errors"]) == {"output", "query", "key", "value"}


@pytest.mark.parametrize("wrong", [lambda out: out * 1.1, lambda out: 1 / 0], ids=["numbers", "exception"])
def test_a_gpu_that_computes_wrong(stand_in, wrong, monkeypatch, tmp_path):
    broken = Engine("triton", lambda call: None, lambda call: wrong(stand_in.run(call)))
    monkeypatch.setattr(POINTWISE, "engines", [broken, *POINTWISE.engines[1:]])
    done = run("--gpu", "--to", tmp_path / "doctor.json")
    assert done.exit_code == 1 and "FAILED" in done.output
    assert json.loads((tmp_path / "doctor.json").read_text())["gpu"]["verdict"].startswith(
        "2 of 2 checks failed"
    )


def test_another_engine_in_its_place_is_a_failure(stand_in, monkeypatch):
    """What cannot be compiled is computed by the engine 'tiled', rightly: that says nothing about the GPU."""
    monkeypatch.setattr(registry, "_warned", set())

    def falls_back(call):
        registry.warn_unavailable("triton", "no such instruction")
        return stand_in.run(call)

    engine = Engine("triton", lambda call: None, falls_back)
    monkeypatch.setattr(POINTWISE, "engines", [engine, *POINTWISE.engines[1:]])
    done = run("--gpu", "--json")
    checks = json.loads(done.stdout)["gpu"]["checks"]
    assert done.exit_code == 1 and [check["passed"] for check in checks] == [False, False]
    assert all("no such instruction" in check["problem"] for check in checks)


def test_triton_that_does_not_work_is_the_verdict(stand_in, monkeypatch):
    monkeypatch.setattr(availability, "failure", lambda device, index: "Failed to find C compiler")
    done = run("--gpu", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["gpu"]["verdict"].endswith("cannot run here: Failed to find C compiler")


def test_an_interrupted_run_keeps_what_it_found(stand_in, monkeypatch, tmp_path):
    def interrupted(*arguments):
        yield Finding("short", True, 1.0, {"output": 0.5})
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "check_device", interrupted)
    done = run("--gpu", "--to", tmp_path / "doctor.json")
    assert done.exit_code == doctor.INTERRUPTED
    assert not json.loads((tmp_path / "doctor.json").read_text())["gpu"]["finished"]


def test_nan_in_the_wrong_place_is_a_failure():
    exact = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert device._distance(torch.tensor([1.0, float("nan")]), exact) == 0
    assert device._distance(torch.tensor([float("nan"), 1.0]), exact) == float("inf")


def test_checks_of_every_dtype_and_mask_exist():
    assert {kind.case.dtype for kind in KINDS} == set(device.LIMITS)
    assert {kind.case.mask for kind in KINDS} == {"none", "bool", "additive", "dead rows"}


@pytest.mark.parametrize("kind", KINDS[-17:], ids=lambda kind: kind.name)
def test_the_checks_themselves_pass_on_an_engine_that_is_right(kind):
    (finding,) = check_device("cpu", "tiled", (kind,))
    assert finding.passed, finding
    assert verdict([finding]) == "all 1 checks passed"
