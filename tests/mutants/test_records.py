"""The faults of `make mutants`: every record applies, and the runner tells caught from surviving."""

import subprocess
from collections import Counter

import pytest

from tests.mutants import run
from tests.mutants.run import Fault

FAULTS = run.load_faults()


def test_every_record_applies():
    problems = {fault.name: problem for fault in FAULTS if (problem := fault.problem())}
    assert not problems, "update `old` and `new` in tests/mutants/*.toml"


def test_there_are_enough_faults_with_distinct_names():
    assert len(FAULTS) >= 110
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_every_package_has_a_fault():
    packages = {
        path.name for path in (run.ROOT / "src" / "unsoft").iterdir() if (path / "__init__.py").exists()
    }
    changed = {fault.file.split("/")[2] for fault in FAULTS}
    assert packages <= changed


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one function and two tests, of which one notices a wrong sign."""
    (tmp_path / "code.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "test_strong.py").write_text(
        "from code_ import half\ndef test():\n    assert half(-2) == -1\n"
    )
    (tmp_path / "test_weak.py").write_text(
        "from code_ import half\ndef test():\n    assert abs(half(-2)) == 1\n"
    )
    (tmp_path / "code.py").rename(tmp_path / "code_.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "build" / "results.json")
    monkeypatch.setattr(run, "WORKERS", 1)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis takes longer to load than a test
    return tmp_path


@pytest.mark.parametrize(
    ("tests", "code", "text"), [("test_strong.py", 0, "not caught: none"), ("test_weak.py", 1, "SURVIVED")]
)
def test_a_fault_is_caught_or_survives(repository, monkeypatch, capsys, tests, code, text):
    fault = Fault("sign", "code_.py", "x / 2", "-x / 2", (tests,))
    monkeypatch.setattr(run, "load_faults", lambda: [fault])
    assert run.main([]) == code
    assert text in capsys.readouterr().out
    assert "return x / 2" in (repository / "code_.py").read_text(), "the repository itself is unchanged"
    run.main([])
    assert ("1 faults, 0 to run" in capsys.readouterr().out) == (code == 0), "caught faults are not repeated"


def test_a_fault_for_another_cpu_is_skipped(repository, monkeypatch, capsys):
    fault = Fault("sign", "code_.py", "x / 2", "-x / 2", ("test_weak.py",), cpu="no-such-flag")
    monkeypatch.setattr(run, "load_faults", lambda: [fault])
    assert run.main([]) == 0
    assert "no-such-flag: sign" in capsys.readouterr().out


def test_a_test_that_fails_without_the_fault_is_reported(repository, monkeypatch, capsys):
    (repository / "test_weak.py").write_text("def test():\n    assert False\n")
    monkeypatch.setattr(run, "load_faults", lambda: [Fault("sign", "code_.py", "x", "-x", ("test_weak.py",))])
    monkeypatch.setattr(Fault, "problem", lambda fault: None)
    assert run.main([]) == 1
    assert "tests fail without a fault" in capsys.readouterr().out
