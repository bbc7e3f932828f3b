"""Imports point downwards, and ``import unsoft`` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unsoft

PACKAGE = Path(unsoft.__file__).parent

LAYERS = [  # from the bottom to the top; a package may import itself and packages of lower layers
    {"errors", "tracing"},
    {"cache_dir", "checks", "files", "notebook", "signals"},
    {"formula"},
    {"engines"},
    {"magnitude"},
    {"measure"},
    {"statistics"},
    {"modules"},
    {"mechanisms"},
    {"attention"},
    {"hf", "nn", "testing", "theory"},
    {"lab/bench", "lab/evidence", "lab/report", "lab/tasks"},
    {"lab/interpret"},
    {"lab/training"},
    {"lab/study"},
    {"lab/records"},
    {"lab/compare"},
    {"lab/trial"},
    {"lab"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
HEAVY = {
    "sympy",
    "typer",
    "rich",
    "numpy",
    "pandas",
    "scipy",
    "transformers",
    "x_transformers",
    "hypothesis",
    "mpmath",
    "altair",
    "vl_convert",
    "triton",
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(module: str) -> str:
    """unsoft.formula.expr -> formula, unsoft.lab.tasks.text -> lab/tasks; unsoft -> "" (the public names)."""
    names = module.split(".")[1:]
    return "/".join(names[:2] if names[:1] == ["lab"] else names[:1])


def imported(tree: ast.AST) -> set[str]:
    """Absolute names of all modules imported anywhere in a file, in functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction: write the full name"
            found |= {node.module} | (
                {f"unsoft.{a.name}" for a in node.names} if node.module == "unsoft" else set()
            )
    return found


def upward(room: str, modules: set[str]) -> set[str]:
    """The imports of a file of ``room`` that do not point down."""
    rooms = {room_of(name): name for name in modules if name.startswith("unsoft.")}
    return {name for other, name in rooms.items() if other != room and LEVEL[other] >= LEVEL[room]}


def test_imports_point_down():
    wrong = {}
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        room = room_of("unsoft." + name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        assert room in LEVEL, f"{room} has no place in the order yet: add it to LAYERS"
        if names := upward(room, imported(ast.parse(path.read_text()))):
            wrong[name] = names
    assert wrong == {}


def test_the_rule_can_fail():
    assert upward("formula", imported(ast.parse("def f():\n    from unsoft.engines.call import Call"))) == {
        "unsoft.engines.call"
    }
    assert upward("engines", imported(ast.parse("from unsoft.formula import Formula"))) == set()


def test_theory_stands_alone():
    """It shares no numerics with what it judges, and in one place it looks up the formula of a name."""
    for path in (PACKAGE / "theory").rglob("*.py"):
        rooms = {room_of(name) for name in imported(ast.parse(path.read_text()))}
        assert not rooms & ({"engines"} if path.name == "named.py" else {"engines", "mechanisms"})


FRESH = """
import sys
{first}
import unsoft
assert {torch} or "torch" not in sys.modules, "torch is imported on first use"
assert set(unsoft.__all__) <= set(dir(unsoft))
for name in unsoft.__all__:
    if name != "hf":
        found = getattr(unsoft, name)
        names = ("Formula", "attention", "mechanism", "mechanisms", "register", "varlen_attn")
        assert isinstance(found, type(sys)) == (name not in names), name
assert "cog" in unsoft.mechanisms() and callable(unsoft.attention)
from unsoft import attention, mechanisms, theory
assert attention is unsoft.attention and mechanisms is unsoft.mechanisms and theory is unsoft.theory
assert not hasattr(unsoft, "nonsense")
"""


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import unsoft.attention",
        pytest.param("import unsoft.modules.registry", marks=pytest.mark.slow),
        pytest.param("from unsoft.attention import attention", marks=pytest.mark.slow),
    ],
)
def test_public_names_are_what_they_say_whatever_is_imported_first(first):
    subprocess.run(
        [sys.executable, "-c", FRESH.format(first=first, torch=bool(first))],
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": ""},
    )


WITHOUT_EXTRAS = """
import sys
for name in ("transformers", "accelerate", "sklearn", "ray", "gguf"):
    sys.modules[name] = None  # as if it were not installed
from unsoft.lab.compare.section import QUICK
from unsoft.lab.compare.plan import plan, sections
from unsoft.lab.compare.section import Request
from unsoft.lab.compare.candidate import candidates_of
assert len(sections()) > 10
assert len(plan(Request(candidates_of(["softmax", "magnitude"], []), QUICK), ())) > 50
"""


def test_compare_needs_no_more_than_the_extra_of_its_pictures():
    """The first command of the README installs nothing else."""
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], check=True, env=environment)


STAGES = """
import sys
import torch
before = set(sys.modules)
import unsoft
unsoft.attention
unsoft.mechanism
print(*(set(sys.modules) - before))
import unsoft.hf
unsoft.hf.swap
print(*sys.modules)
import unsoft.lab.training.run
print(*sys.modules)
"""


def test_each_use_loads_no_more_than_it_needs():
    """Attention loads little beyond torch, swapping loads no lab, and training no other part of the lab."""
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", STAGES], capture_output=True, text=True, check=True, env=environment
    )
    by_attention, by_swap, by_training = (line.split() for line in done.stdout.splitlines())
    assert "unsoft.attention" in by_attention
    assert not {name.partition(".")[0] for name in by_attention} & HEAVY
    assert not [
        name for name in by_attention if name.startswith(("unsoft.cli", "unsoft.lab.bench", "torch._dynamo"))
    ]
    assert "unsoft.hf.swap" in by_swap and not [name for name in by_swap if name.startswith("unsoft.lab")]
    assert "unsoft.lab.training.run" in by_training
    for package in ("interpret", "compare", "study", "report", "training.conversion"):
        assert f"unsoft.lab.{package}" not in by_training


INTERPRET = """
import sys
from unsoft.lab import interpret
assert "transformers" not in sys.modules and "torch" not in sys.modules
assert set(interpret.__all__) == set(dir(interpret)) and not hasattr(interpret, "nonsense")
"""


def test_interpret_imports_its_packages_on_first_use():
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    subprocess.run([sys.executable, "-c", INTERPRET], check=True, env=environment)
