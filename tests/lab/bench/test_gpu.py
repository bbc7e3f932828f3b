"""The benchmark of a GPU: who is measured where, with packages of peers that stand in for those of a GPU."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from unsoft.lab.bench import timing, workload
from unsoft.lab.bench.plan import QUICK, gpu_steps
from unsoft.lab.bench.workload import Workload, engine


def softmax(q, k, v, causal=True):
    """Softmax attention with the layout of these packages: (batch, tokens, heads, width)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    logits = q.shape[-1] ** -0.5 * q @ k.mT
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2)


@pytest.fixture
def installed(monkeypatch):
    """flash_attn and fla, each with the one function that is used of it."""
    for name in ("flash_attn", "fla", "fla.ops", "fla.ops.attn"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["flash_attn"].flash_attn_func = softmax
    sys.modules["fla.ops.attn"].parallel_attn = lambda q, k, v: softmax(q, k, v)


def contests():
    """(workload, names of contenders) of every step."""
    return [
        (work, [contender.engine for contender in contenders])
        for work, contenders in (step.measure.args for step in gpu_steps(QUICK, ["cog"], device="cpu"))
    ]


def test_peers_take_part_where_they_can(installed):
    for work, names in contests():
        assert names[0] == "triton"
        assert ("flash-attn" in names) == (work.group != "decode")
        assert ("fla" in names) == (work.group != "decode" and work.is_causal)


def test_linear_attention_and_magnitude_are_measured_too():
    seen = {}
    for step in gpu_steps(QUICK, device="cpu"):
        work, contenders = step.measure.args
        if step.group in ("linear", "magnitude"):
            assert work.is_causal and all(contender.engine == "triton" for contender in contenders)
            seen.setdefault(step.group, set()).update(contender.mechanism for contender in contenders)
    assert {"cosformer", "linear-exp", "performer"} <= seen["linear"]
    assert seen["magnitude"] == {"magnitude+cog"}
    for name in (*seen["linear"], *seen["magnitude"]):  # each by the engine that runs here
        work = Workload("linear", 40, 40, is_causal=True, mode="training", dtype="bfloat16")
        assert timing.is_right(timing.error_of(engine("tiled", name), work, work.inputs()), work), name


def test_without_them_nothing_is_missing():
    if workload.fla() is None and workload.flash_attn() is None:
        assert {name for _, names in contests() for name in names} == {"triton", "FlexAttention"}


@pytest.mark.parametrize("name", ["fla", "flash_attn"])
def test_peers_meet_the_definition_of_softmax(installed, name):
    work = Workload("main", 40, 40, is_causal=True, mode="training")
    assert timing.error_of(getattr(workload, name)(), work, work.inputs()) < 1e-5


def test_fla_is_causal_only(installed):
    work = Workload("main", 40, 40, is_causal=False)
    with pytest.raises(ValueError, match="fla: its softmax attention is causal"):
        workload.fla().compute(work, work.inputs())
