"""``unsoft bench --device``: wrong arguments, no GPU, a run, a peer that fails."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from unsoft.cli import installation
from unsoft.cli.app import application
from unsoft.engines import POINTWISE, Engine, registry
from unsoft.lab.bench import machine, plan, record
from unsoft.lab.bench.plan import QUICK
from unsoft.lab.bench.workload import Contender

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def run(*arguments):
    return CliRunner().invoke(application(), list(map(str, arguments)))


@no_gpu
def test_no_gpu():
    done = run("bench", "--device", "cuda")
    assert done.exit_code == 1 and "cannot run here: torch sees no GPU" in str(done.exception)


def test_an_unknown_device():
    done = run("bench", "--device", "tpu")
    assert done.exit_code == 2 and "neither cpu nor cuda" in " ".join(done.output.split())


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(installation, "gpu_problem", lambda device="cuda": None)
    monkeypatch.setattr(machine, "gpu", lambda: "a GPU")


def test_steps_on_a_gpu_measure_the_engine_against_sdpa():
    steps = plan.gpu_steps(QUICK)
    assert {step.group for step in steps} == {"main", "wide", "decode", "linear", "magnitude"}
    work, contenders = steps[0].measure.args
    assert work.device == "cuda" and work.dtype == "bfloat16"
    assert {x.engine for x in contenders} >= {"triton", "FlexAttention"}


def test_timings_wait_for_the_device():
    from unsoft.lab.bench.timing import interleaved

    said = []
    interleaved({"a": lambda: said.append("call")}, rounds=1, wait=lambda: said.append("wait"))
    assert said[0] == said[-1] == "wait"


@pytest.fixture
def stand_in(with_gpu, monkeypatch):
    """The benchmark of a GPU on short calls of the CPU, with the tiled engine under the name of triton."""
    monkeypatch.setattr(plan, "_GPU_LENGTHS", {"quick": (64,)})
    monkeypatch.setattr(plan, "QUICK", replace(QUICK, rounds=1, seconds=0.0))
    monkeypatch.setattr(plan.gpu_steps, "__defaults__", (None, "cpu"))
    monkeypatch.setattr(plan, "_gpu_peers", lambda is_causal: [Contender("flash-attn", "softmax", broken)])
    monkeypatch.setattr(record, "gpu", lambda: "a GPU")
    others = [x for x in POINTWISE.engines if x.name != "triton"]
    engine = Engine("triton", lambda call: None, POINTWISE.named("tiled").run)
    monkeypatch.setattr(POINTWISE, "engines", [engine, *others])


def broken(*qkv, is_causal):
    raise RuntimeError("FlashAttention needs\nAmpere")


def test_a_benchmark_of_a_gpu_with_a_peer_that_cannot_run(stand_in, tmp_path):
    out = tmp_path / "gpu.json"
    done = run("bench", "cog", "--quick", "--device", "cuda", "--only", "main", "--only", "wide", "--to", out)
    assert done.exit_code == 1
    assert done.stderr.count("flash-attn: RuntimeError: FlashAttention needs Ampere") == 1
    assert "failed" in done.stdout and "wrong: flash-attn" in done.stdout
    kept = json.loads(out.read_text())
    assert kept["gpu"] == "a GPU" and kept["finished"]
    ratios = {(row["engine"], row["mechanism"]): row["ratio"] for row in kept["timings"]}
    assert ratios["triton", "cog"] > 0 and ratios["flash-attn", "softmax"] is None


def test_no_other_engine_is_timed_in_its_place(stand_in, monkeypatch):
    monkeypatch.setattr(registry, "_warned", set())
    engine = Engine(
        "triton", lambda call: None, lambda call: registry.warn_unavailable("triton", "no such instruction")
    )
    monkeypatch.setattr(POINTWISE, "engines", [engine, *POINTWISE.engines[1:]])
    done = run("bench", "cog", "--quick", "--device", "cuda", "--only", "wide")
    assert done.exit_code == 1 and "no such instruction" in done.stderr
    assert "wrong: cog" in done.stdout
