"""Time and memory of inspection on SmolLM2: ``python benchmarks/inspection.py [--out FILE.json]``,
five minutes or so.

16 sequences of 512 tokens, float32, threads as torch chooses. The plain forward pass (logits included) and
``unsoft.lab.interpret.inspect`` take turns in one process, and the fastest round of each counts; the bar is
a ratio of 1.5. Before that, logits with and without observation must be bit-equal. Memory is the peak of each
beyond the loaded model, in processes of their own; the bar is 2 GB more than the forward pass needs. What
inspection finds is written in docs/inspection.md. (Not called inspect.py: a script's folder comes first on
Python's path, and every program that imports the standard module of that name would get the script.)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from unsoft.hf.models import load_model
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.record import write_figures
from unsoft.lab.bench.timing import fastest
from unsoft.lab.interpret.inspection import inspect
from unsoft.lab.interpret.inspection.observe import observe

SEQUENCES, LENGTH = 16, 512
TIME_BAR, MEMORY_BAR = 1.5, 2e9


def subject() -> tuple[nn.Module, Tensor]:
    """The model, and 16 x 512 tokens of the Python reference, which every Python brings along."""
    from pydoc_data.topics import topics

    model, tokenizer = load_model("smollm2")
    text = "\n\n".join(topics.values())[: SEQUENCES * LENGTH * 10]
    ids = tokenizer(text)["input_ids"][: SEQUENCES * LENGTH]
    return model.eval(), torch.tensor(ids).view(SEQUENCES, LENGTH)


def memory(what: str) -> int:
    """Peak bytes beyond the loaded model; a first small call loads libraries and starts threads."""
    model, ids = subject()
    call = (lambda x: model(x)) if what == "forward" else (lambda x: inspect(model, x))
    call(ids[:1, :32])
    before = reset_peak()
    call(ids)
    return max(peak() - before, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.memory:
        print(json.dumps({"bytes": memory(arguments.memory)}))
        return
    needed = {what: run_probe(__file__, "--memory", what)["bytes"] for what in ("forward", "inspect")}
    model, ids = subject()
    plain = model(ids[:2]).logits
    with observe(model, lambda call: None):
        if not torch.equal(plain, model(ids[:2]).logits):
            raise SystemExit("outputs differ under observation: no time is shown")
    calls = {"forward": lambda: model(ids), "inspect": lambda: inspect(model, ids)}
    seconds = fastest(calls, rounds=1)
    ratio, more = seconds["inspect"] / seconds["forward"], needed["inspect"] - needed["forward"]
    figures = {
        "sequences": SEQUENCES,
        "length": LENGTH,
        "seconds": seconds,
        "ratio": ratio,
        "ratio_at_most": TIME_BAR,
        "bytes": needed,
        "more_bytes": more,
        "more_bytes_at_most": MEMORY_BAR,
        "passed": ratio <= TIME_BAR and more <= MEMORY_BAR,
    }
    print(
        f"forward {seconds['forward']:.1f} s, inspect {seconds['inspect']:.1f} s: {ratio:.2f}x (at most"
        f" {TIME_BAR:g}x)\nmemory beyond the model: forward {needed['forward'] / 1e9:.2f} GB, inspect"
        f" {needed['inspect'] / 1e9:.2f} GB: {more / 1e9:+.2f} GB (at most {MEMORY_BAR / 1e9:g}"
        f" more)\n{'pass' if figures['passed'] else 'FAIL'}"
    )
    if arguments.out:
        write_figures(arguments.out, figures)


if __name__ == "__main__":
    sys.exit(main())
