"""The list of steps covers what the bars need; peers and probes do what they say."""

import pytest
import torch

import unsoft
from unsoft.lab.bench import fresh_process, plan, timing, workload
from unsoft.lab.bench.fresh_process import ProbeError, run_probe
from unsoft.lab.bench.plan import FULL, QUICK, STANDARD, choose, steps
from unsoft.lab.bench.workload import Workload
from unsoft.mechanisms import formulas

GROUPS = ["compile", "main", "short", "small", "bfloat16", "decode", "memory", "startup"]


@pytest.fixture
def compiled(monkeypatch):
    """Pretend that every formula is compiled: the plan is inspected, not run."""
    monkeypatch.setattr(plan.availability, "ready", lambda formula, double: True)


def contests(level):
    return plan._contests(level, list(level.mechanisms or formulas()), True)


@pytest.mark.parametrize("level", [QUICK, STANDARD, FULL], ids=lambda level: level.name)
def test_every_level_touches_every_bar(compiled, level):
    assert list(dict.fromkeys(step.group for step in steps(level))) == GROUPS
    assert any(contender.engine == "tiled" for _, contenders in contests(level) for contender in contenders)
    assert level.rounds >= 5


@pytest.mark.parametrize("level", [STANDARD, FULL], ids=lambda level: level.name)
def test_every_built_in_runs_on_every_main_workload(level):
    main = [(w, contenders) for w, contenders in contests(level) if w.group == "main"]
    assert {(w.queries, w.is_causal, w.mode) for w, _ in main} == {
        (n, c, m) for n in (512, 2048, 4096) for c in (False, True) for m in ("forward", "training")
    }
    for _, contenders in main:
        assert [c.mechanism for c in contenders if c.engine == "native"] == list(formulas())


def test_special_shapes_are_those_of_the_bars():
    shapes = {w.group: (w.batch, w.heads, w.keys, w.dtype) for w, _ in contests(STANDARD)}
    assert shapes["short"] == (1, 8, 4096, "float32")
    assert shapes["small"] == (16, 12, 128, "float32")
    assert shapes["decode"] == (8, 8, 8192, "float32")
    assert shapes["bfloat16"][3] == "bfloat16"
    assert [w.keys for w, _ in contests(STANDARD) if w.group == "decode" and w.batch == 1] == [64, 256, 1024]


def test_every_step_of_decoding_has_a_bar(compiled):
    titles = [step.title for step in steps(STANDARD) if "step at" in step.title]
    assert titles == [f"decode, {name}, step at {position}" for name, position in timing.STEPS]
    assert {name for name, _ in timing.STEPS} == {
        "cog",
        "gpam",
        "linear-relu",
        "cosformer",
        "retention",
        "magnitude",
    }


@pytest.mark.parametrize("name", ["cog", "linear-relu", "gpam"])
def test_a_step_is_measured_if_it_is_right(name):
    sdpa, own = timing.measure_step(name, 20, rounds=1)
    assert (sdpa.engine, own.engine, own.workload.label) == ("sdpa", "module", "step at 20")
    assert own.ratio == own.seconds / sdpa.seconds and own.error < 1e-5


def test_a_wrong_step_has_no_time(monkeypatch):
    monkeypatch.setattr(timing, "_all_at_once", lambda name, qkv: torch.zeros(1, 8, 21, 64))
    _, own = timing.measure_step("cog", 20, rounds=1)
    assert own.ratio is None and own.seconds is None


def test_mechanisms_and_groups_can_be_chosen(compiled):
    chosen = choose(steps(QUICK, ["relu", "relu"]), ["decode", "startup"])
    assert list(dict.fromkeys(step.group for step in chosen)) == ["compile", "decode", "startup"]
    assert not any("step at" in step.title for step in chosen), "only what was asked for"
    assert chosen[0].title == "compiling 1 formulas"
    with pytest.raises(ValueError, match="unknown name 'cogg'"):
        steps(QUICK, ["cogg"])
    with pytest.raises(ValueError, match="unknown name 'nope'"):
        choose(steps(QUICK), ["nope"])


def test_without_the_native_engine_nothing_claims_its_name(monkeypatch):
    monkeypatch.setattr(plan.availability, "ready", lambda formula, double: False)
    assert {step.group for step in steps(QUICK)} == {"main", "startup"}
    left = [c.engine for _, contenders in plan._contests(QUICK, ["cog"], False) for c in contenders]
    assert left and "native" not in left


def test_a_formula_that_cannot_be_compiled_is_an_error(monkeypatch):
    cog = unsoft.mechanisms()["cog"].key
    monkeypatch.setattr(plan.availability, "ready", lambda formula, double: formula == cog)
    with pytest.raises(RuntimeError, match="'relu' cannot be compiled"):
        steps(QUICK, ["cog", "relu"])[0].measure()


def test_inputs_are_the_same_in_every_run_and_ready_for_gradients():
    work = Workload("main", 5, 7, dtype="bfloat16", mode="training")
    first, second = work.inputs(), work.inputs()
    assert torch.equal(first.q, second.q) and first.q.dtype == torch.bfloat16
    assert (first.q.shape, first.k.shape) == ((1, 8, 5, 64), (1, 8, 7, 64))
    assert all(x.requires_grad for x in first.qkv) and not first.grad_out.requires_grad


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_peer_meets_the_definition_of_softmax(is_causal):
    work = Workload("main", 40, 40, is_causal=is_causal, mode="training")
    assert timing.error_of(workload.dense_pytorch(), work, work.inputs()) < 1e-5


def test_signed_peer_meets_the_definition_of_cog_where_it_is_installed():
    peer = workload.x_transformers()
    if peer is None:
        assert "x-transformers" not in [c.engine for _, contenders in contests(STANDARD) for c in contenders]
        return
    work = Workload("main", 40, 40, is_causal=True, mode="training")
    assert timing.error_of(peer, work, work.inputs()) < 1e-5


@pytest.mark.slow
def test_memory_probe_sees_what_a_call_allocates():
    """The dense engine at 1024 tokens holds several (heads, 1024, 1024) matrices;
    SDPA little more than its output."""
    sdpa, dense = fresh_process.measure_memory("cog", "forward", 1024, "dense")
    matrix = fresh_process.HEADS * 1024 * 1024 * 4
    assert dense.bytes >= 2 * matrix
    assert sdpa.bytes < matrix
    assert dense.ratio == dense.bytes / max(sdpa.bytes, 1)


def test_probe_reports_the_last_line_of_a_failure():
    with pytest.raises(ProbeError, match="SystemExit|no luck"):
        run_probe("-c", "raise SystemExit('no luck')")
