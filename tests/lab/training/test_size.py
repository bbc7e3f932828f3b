"""A training run executes few files, so that it can be followed: the lab stays small, and imports no more."""

import inspect
import subprocess
import sys
from pathlib import Path

import unsoft
from unsoft.lab.training import Spec, train, trainer

PACKAGE = Path(unsoft.__file__).parent
MOST_OF_LAB, MOST = 10, 56
"""Files in which a function runs; 24 and 88 before modules were merged. The aim for all of them is 50."""


def test_a_run_executes_few_files(monkeypatch, tmp_path, one_thread):
    monkeypatch.setattr(trainer, "_TOKENS", 64)  # fewer examples, same code
    monkeypatch.setattr(trainer, "_ANSWERS", 4)
    files = set()

    def profile(frame, event, argument):
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "<module>"
        if event == "call" and is_function and code.co_filename.startswith(str(PACKAGE)):
            files.add(Path(code.co_filename).relative_to(PACKAGE).as_posix())

    spec = Spec(task="census", mechanism="cog", steps=2, batch=2)
    sys.setprofile(profile)
    try:
        train(spec, tmp_path / "run")
    finally:
        sys.setprofile(None)
    lab = sorted(file for file in files if file.startswith("lab/"))
    assert "lab/training/run.py" in lab and len(lab) <= MOST_OF_LAB, lab
    assert len(files) <= MOST, sorted(files)


def test_training_imports_no_interpretation():
    code = "import sys, unsoft.lab.training.run; print(*(n for n in sys.modules if n.startswith('unsoft.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "unsoft.lab.training.run" in loaded
    for package in ("lab.interpret", "lab.compare", "lab.study", "lab.report", "lab.training.conversion"):
        assert f"unsoft.{package}" not in loaded
