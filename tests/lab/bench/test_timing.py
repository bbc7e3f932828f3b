"""Times are taken in turn, the fastest counts, and a wrong result gets no time at all."""

import gc

import pytest
import torch

from unsoft.lab.bench import timing
from unsoft.lab.bench.timing import interleaved, measure
from unsoft.lab.bench.workload import Contender, Workload, baseline, engine

SMALL = {"queries": 33, "keys": 33, "heads": 2, "width": 16}


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def worker(self, name, *seconds):
        durations = iter(seconds)

        def work():
            self.calls.append(name)
            self.now += next(durations, seconds[-1])

        return work


def test_functions_take_turns_and_every_other_round_goes_backwards():
    clock = Clock()
    samples = interleaved({"a": clock.worker("a", 1.0), "b": clock.worker("b", 2.0)}, rounds=3, clock=clock)
    assert "".join(clock.calls) == "ab" + "ab" + "ba" + "ab"
    assert samples == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_rounds_go_on_until_the_seconds_have_passed():
    clock = Clock()
    assert len(interleaved({"a": clock.worker("a", 1.0)}, rounds=2, seconds=7.0, clock=clock)["a"]) == 7


def test_short_calls_are_repeated_within_a_sample():
    clock = Clock()
    samples = interleaved({"a": clock.worker("a", 0.001)}, rounds=5, clock=clock)
    assert len(clock.calls) == 1 + 5 * 4
    assert samples["a"] == pytest.approx([0.001] * 5)


def test_garbage_collection_is_switched_back_on_after_an_error():
    calls = iter([None])
    with pytest.raises(StopIteration):
        interleaved({"a": lambda: next(calls)})
    assert gc.isenabled()


def test_ratio_is_that_of_the_fastest_samples(monkeypatch):
    samples = {0: [5.0, 2.0, 3.0], 1: [4.0, 1.0, 9.0]}
    monkeypatch.setattr(timing, "interleaved", lambda functions, **options: samples)
    first, second = measure(Workload("main", **SMALL), [engine("dense", "cog")])
    assert (first.engine, first.seconds, first.ratio) == ("sdpa", 2.0, 1.0)
    assert (second.mechanism, second.seconds, second.ratio, second.rounds) == ("cog", 1.0, 0.5, 3)


@pytest.mark.parametrize("mode", ["forward", "training"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_right_results_pass_the_gate(mode, is_causal):
    work = Workload("main", is_causal=is_causal, mode=mode, **SMALL)
    for contender in (baseline(), engine("tiled", "cog"), engine("tiled", "relu2")):
        assert timing.error_of(contender, work, work.inputs()) < 1e-5


DEFECTS = {
    "scaled": lambda out: out * 1.01,
    "shifted": lambda out: out.roll(1, dims=-2),
    "zero": lambda out: out * 0,
    "one NaN": lambda out: out.index_fill(-2, torch.tensor([3]), torch.nan),
}


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("mode", ["forward", "training"])
def test_a_wrong_result_gets_no_ratio(defect, mode):
    right = engine("dense", "cog")
    wrong = Contender(
        "wrong", "cog", lambda *qkv, **options: DEFECTS[defect](right.attention(*qkv, **options))
    )
    work = Workload("main", mode=mode, **SMALL)
    reference, result = measure(work, [wrong])
    assert reference.ratio == 1.0
    assert (result.seconds, result.ratio) == (None, None)
    assert result.to_dict()["ratio"] is None


def test_a_wrong_gradient_alone_gets_no_ratio():
    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    right = engine("dense", "cog")
    wrong = Contender("wrong", "cog", lambda q, k, v, **c: right.attention(q, k, HalfGradient.apply(v), **c))
    assert measure(Workload("main", mode="forward", **SMALL), [wrong])[1].ratio is not None
    assert measure(Workload("main", mode="training", **SMALL), [wrong])[1].ratio is None
