"""Figures of training: ``python benchmarks/training.py [--out FILE.json]``, about five minutes.

A step is forward, backward and AdamW of a Llama-style decoder (2 layers, 8 heads of 32, width 256, float32)
on 1024 tokens: four texts of 256, or one of 1024. Every time is a ratio to the same model with transformers'
own SDPA attention in the same interleaved run, the fastest of at least five rounds. Swapped softmax must
first give the loss of the model's own attention. Trainer is compared with a plain loop over the same batches;
a study's workers after each has done one run, so that starting Python is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import transformers

import unsoft
from unsoft.lab.bench.record import write_figures
from unsoft.lab.bench.timing import fastest, interleaved
from unsoft.lab.study.worker import LocalWorkers, code_digest
from unsoft.lab.training import Spec, repulse, train
from unsoft.lab.training.model import build
from unsoft.lab.training.trainer import Batches, TaskTrainer, evaluation_batches, measure

TOKENS, LENGTHS = 1024, (256, 1024)
OWN = "SDPA"
BARS = {
    "cog": {256: 1.0, 1024: 1.0},
    "relu2": {256: 1.0, 1024: 1.0},
    "linear-relu": {1024: 1.0},
    "linear-elu1": {1024: 1.0},
    "retention": {1024: 1.0},
    "magnitude+softmax": {256: 2.0, 1024: 2.0},
}
"""At most so much of SDPA's step; lengths without a bar are reported."""
OPTIONS = {"magnitude+softmax": {"causal": "arrival"}}
REPULSION, WORKERS, RESUME = 1.05, 1.7, 2.0
RUN = {"task": "opposition", "mechanism": "softmax", "steps": 60, "batch": 32}
"""A small run for everything that is not a matter of attention."""
RUNS, RUN_STEPS = 6, 300
"""Of the study: runs of about six seconds, still shorter than those of the studies that come with unsoft."""
_WRONG = 1e-4

Figure = dict[str, object]


def model(mechanism: str = OWN) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        use_cache=False,
    )
    made = transformers.LlamaForCausalLM(config)
    if mechanism == OWN:
        return made
    return unsoft.hf.swap(made, mechanism, **OPTIONS.get(mechanism, {}))


def step(mechanism: str, ids: torch.Tensor, *, repulsed: bool = False) -> Callable[[], float]:
    """A training step of a model of its own."""
    made = model(mechanism).train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)

    def call() -> float:
        loss = made(input_ids=ids, labels=ids).loss
        loss.backward()
        if repulsed:
            repulse(made, alpha=0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return call


def at_most(what: str, measured: float, bar: float | None) -> Figure:
    return {"what": what, "measured": measured, "at_most": bar, "passed": bar is None or measured <= bar}


def steps(rounds: int) -> list[Figure]:
    """Mechanisms, and heads that repel each other, against SDPA."""
    found = []
    for length in LENGTHS:
        ids = torch.randint(512, (TOKENS // length, length), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            losses = [model(name)(input_ids=ids, labels=ids).loss.item() for name in (OWN, "softmax")]
        if abs(losses[0] - losses[1]) > _WRONG:
            raise RuntimeError(f"swapped softmax has a loss of {losses[1]}, the model's own {losses[0]}")
        calls = {name: step(name, ids) for name in (OWN, "softmax", *BARS)}
        calls["svgd"] = step(OWN, ids, repulsed=True)
        seconds = fastest(calls, rounds=rounds)
        for name, taken in seconds.items():
            bar = REPULSION if name == "svgd" else BARS.get(name, {}).get(length)
            label = "repulsive heads (svgd)" if name == "svgd" else name
            if name != OWN:
                found.append(at_most(f"step of {length} tokens, {label}", taken / seconds[OWN], bar))
    return found


def trainer(rounds: int) -> list[Figure]:
    """A run of Trainer against the same steps in a plain loop; both are evaluated once, after the last."""
    spec = Spec(**RUN).filled()
    task = spec.make_task()

    def with_trainer() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = TaskTrainer(
                build(spec, task),
                spec,
                task,
                folder=Path(folder),
                save_every=None,
                eval_every=10**9,
                report_to=[],
                fsdp=False,
                callbacks=[],
            )
            run.train()

    def plain() -> None:
        made = build(spec, task).train()
        optimizer = torch.optim.AdamW(made.parameters(), lr=spec.lr, betas=(0.9, 0.98), fused=True)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, spec.warmup, spec.steps)
        batches = Batches(task, made.config.hidden_size, spec.steps, spec.batch, spec.seed, training=True)
        for index in range(len(batches)):
            batch = dict(batches[index])
            labels = batch.pop("labels")
            task.loss(made(**batch).logits[..., : task.outputs], labels).backward()
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        measure(made, evaluation_batches(task, made.config.hidden_size, 1), torch.device("cpu"))

    seconds = interleaved({"trainer": with_trainer, "plain": plain}, rounds=rounds)
    ours, theirs = (min(seconds[name]) for name in ("trainer", "plain"))
    milliseconds = 1000 * (ours - theirs) / spec.steps
    return [
        at_most(f"Trainer against a plain loop, {spec.steps} small steps", ours / theirs, None),
        at_most("Trainer beyond a plain loop, milliseconds a step", milliseconds, None),
    ]


def resuming() -> list[Figure]:
    """The same number of steps after a crash and in a new run: the difference is what resuming costs."""
    half = RUN["steps"] // 2
    spec, short = Spec(**RUN), Spec(**RUN | {"steps": half})
    draw = Batches.__getitem__

    def crash(self: Batches, index: int) -> dict[str, torch.Tensor]:
        if self.training and index == half + 5:
            raise RuntimeError("crash")
        return draw(self, index)

    costs = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            seconds = []
            for one, where in ((short, "new"), (spec, "resumed")):
                if one is spec:
                    Batches.__getitem__ = crash
                    with suppress(RuntimeError):
                        train(one, Path(folder, where), save_every=half, eval_every=half)
                    Batches.__getitem__ = draw
                begin = time.perf_counter()
                train(one, Path(folder, where), save_every=half, eval_every=half)
                seconds.append(time.perf_counter() - begin)
            costs.append(seconds[1] - seconds[0])
    return [at_most("resuming, seconds", sorted(costs)[1], RESUME)]


def study() -> list[Figure]:
    """Runs per second of two workers against one; both have done a run each before, and take turns."""
    pools = {count: LocalWorkers(count) for count in (1, 2)}
    taken: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for count, workers in pools.items():
            _finish(workers, folder, f"warm-{count}", count)
        for number in range(2):
            for count, workers in pools.items():
                begin = time.perf_counter()
                _finish(workers, folder, f"timed-{number}-{count}", RUNS)
                taken[count].append(time.perf_counter() - begin)
    for workers in pools.values():
        workers.close()
    ratio = min(taken[1]) / min(taken[2])
    what = f"study, {RUNS} runs of {RUN_STEPS} steps: throughput of 2 workers against 1"
    return [{"what": what, "measured": ratio, "at_least": WORKERS, "passed": ratio >= WORKERS}]


def _finish(workers: LocalWorkers, folder: str, name: str, count: int) -> None:
    """Runs so many, as many at a time as there are workers."""
    waiting = [f"{name}-{number}" for number in range(count)]
    running = 0
    while waiting or running:
        while waiting and workers.free():
            key = waiting.pop()
            spec = Spec(**RUN | {"seed": len(waiting), "steps": RUN_STEPS}).to_dict()
            job = {"spec": spec, "folder": str(Path(folder, key)), "code": code_digest(""), "plugin": ""}
            workers.submit(key, job)
            running += 1
        for key, outcome in workers.wait(60.0):
            if outcome["status"] != "done":
                raise RuntimeError(f"{key}: {outcome}")
            running -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("steps", "trainer", "resuming", "study"))
    arguments = parser.parse_args()
    parts = {
        "steps": lambda: steps(arguments.rounds),
        "trainer": lambda: trainer(3),
        "resuming": resuming,
        "study": study,
    }
    figures: list[Figure] = []
    for name, figures_of in parts.items():
        if arguments.only not in (None, name):
            continue
        for figure in figures_of():
            figures.append(figure)
            bar = figure.get("at_most") or figure.get("at_least")
            sign = "<=" if "at_most" in figure else ">="
            verdict = "" if bar is None else f"{sign} {bar:<5} {'pass' if figure['passed'] else 'FAIL'}"
            print(f"{figure['what']:<64} {figure['measured']:7.2f}  {verdict}", flush=True)
    if arguments.out:
        write_figures(arguments.out, figures, transformers=transformers.__version__)


if __name__ == "__main__":
    sys.exit(main())
