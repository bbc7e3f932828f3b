"""Throughput of the language study's training loop against a plain loop with SDPA, for the same model.

    python benchmarks/language.py [--steps 6] [--rounds 5] [--size 1M] [--out benchmarks/language.json]

Both sides train in turns in one process with one thread. Times are processor time from the end of the first
step to the end of the last one, with data, logging and callbacks; the best of all rounds. The plain loop is
transformers' own attention ("sdpa"), AdamW and cross-entropy, without packing. Ours is the Trainer of a run,
with documents packed, in float32 and with bfloat16 autocast. The target is within 5 % of the plain loop.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import SmolLM3ForCausalLM, TrainerCallback

from unsoft.files import write_json
from unsoft.lab.bench.machine import machine
from unsoft.lab.study import default_study
from unsoft.lab.study.plan import Run
from unsoft.lab.tasks.language import LanguageTask
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


class Between(TrainerCallback):
    """Processor time from the end of the first step to the end of the last one."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the time."""
        self.ends.append(time.process_time())

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def ours(spec: Spec, folder: Path) -> float:
    """Return the seconds of a step of a run of the study, without its evaluations."""
    task, clock = spec.make_task(), Between()
    options = {"save_every": None, "eval_every": 10**6, "report_to": [], "fsdp": False}
    trainer = TaskTrainer(build(spec, task), spec, task, folder=folder, callbacks=[clock], **options)
    trainer.train()
    return clock.seconds


def plain(spec: Spec) -> float:
    """Return the seconds of a step of a plain loop."""
    task = spec.make_task()
    assert isinstance(task, LanguageTask) and spec.batch and spec.steps
    model = SmolLM3ForCausalLM(build(spec, task).config)
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    clock = Between()
    for step in range(spec.steps):
        inputs, labels = task.sample(spec.batch, index=step, training=True)
        logits = model(inputs, use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end(None, None, None)
    return clock.seconds


def main() -> None:
    """Print tokens per second of both loops, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "cog"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    reference = "plain SDPA loop"
    sides: dict[str, Callable[[Path], float]] = {}
    for name in given.mechanisms:
        spec = spec_of(given.size, name, given.steps)
        sides[name] = partial(ours, spec)
        sides[f"{name}, bf16"] = partial(ours, replace(spec, bf16=True))
    sides[reference] = lambda _: plain(spec_of(given.size, "softmax", given.steps))
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(given.rounds):
        for name, measure in sides.items():
            with tempfile.TemporaryDirectory() as folder:
                best[name] = min(best[name], measure(Path(folder)))
    rows = {
        name: {"tokens_per_second": 4096 / seconds, "times_plain": best[reference] / seconds}
        for name, seconds in best.items()
    }
    record = {"size": given.size, "threads": 1, "machine": machine(), "rows": rows}
    print(json.dumps(record, indent=1))
    if given.out:
        write_json(given.out, record)


if __name__ == "__main__":
    main()
