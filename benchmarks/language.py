"""Throughput of the language study's training loop against a plain loop with SDPA, for the same model.

    python benchmarks/language.py [--steps 20] [--size 1M]

Both sides train in turns in one process with one thread; times are processor time, the best of all rounds.
The plain loop is transformers' own attention ("sdpa"), AdamW and cross-entropy, without packing, logging or
evaluation. Ours is the Trainer of a run, with documents packed. The target is within 5 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import SmolLM3ForCausalLM

from unsoft.lab.study import default_study
from unsoft.lab.study.plan import Run
from unsoft.lab.tasks.language import LanguageTask
from unsoft.lab.training.callbacks import StepClock
from unsoft.lab.training.model import build
from unsoft.lab.training.spec import Spec
from unsoft.lab.training.trainer import TaskTrainer

SIZES = {"1M": "language", "3M": "language-3m"}


def spec_of(size: str, mechanism: str, steps: int) -> Spec:
    """Return a run of the study with this mechanism."""
    study = default_study(SIZES[size])
    group = study.groups[0]
    variant = next(one for one in group.variants if one.label == mechanism)
    run = Run(group=group, variant=variant, point=study.points[2], seed=0, swept=False, steps=steps)
    return run.spec


def ours(spec: Spec, folder: Path) -> float:
    """Return the seconds of a step of a run of the study, without its evaluations."""
    task, clock = spec.make_task(), StepClock()
    options = {"save_every": None, "eval_every": 10**6, "report_to": [], "fsdp": False}
    trainer = TaskTrainer(build(spec, task), spec, task, folder=folder, callbacks=[clock], **options)
    trainer.train()
    return clock.figures()["cpu_seconds_per_step"][0]


def plain(spec: Spec) -> float:
    """Return the seconds of a step of a plain loop."""
    task = spec.make_task()
    assert isinstance(task, LanguageTask) and spec.batch and spec.steps
    model = SmolLM3ForCausalLM(build(spec, task).config)
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    seconds = []
    for step in range(spec.steps):
        inputs, labels = task.sample(spec.batch, index=step, training=True)
        start = time.process_time()
        logits = model(inputs, use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    return sum(seconds[1:]) / len(seconds[1:])


def main() -> None:
    """Print tokens per second of both loops, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "cog"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    best: dict[str, float] = {}
    for _ in range(given.rounds):
        for name in given.mechanisms:
            spec = spec_of(given.size, name, given.steps)
            with tempfile.TemporaryDirectory() as folder:
                best[name] = min(ours(spec, Path(folder)), best.get(name, float("inf")))
        reference = spec_of(given.size, "softmax", given.steps)
        best["plain SDPA loop"] = min(plain(reference), best.get("plain SDPA loop", float("inf")))
    rows = {
        name: {"tokens_per_second": 4096 / seconds, "times_plain": best["plain SDPA loop"] / seconds}
        for name, seconds in best.items()
    }
    print(json.dumps({"size": given.size, "threads": 1, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
