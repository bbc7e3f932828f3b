"""Overhead of steering in ``generate`` on SmolLM2: ``python benchmarks/steering.py [--out FILE.json]``.

Two minutes or so: 24 tokens after a prompt of 64, float32, threads as torch chooses, without chance and
without an end. The model as it is, steered at all 30 layers, and steered at 10 layers where only generated
tokens are and keep their norm, take turns in one process. What counts is the median over rounds of the ratio
to the plain run of the same round, since a machine changes its pace by more than steering costs; its 95 %
interval is printed beside it, and the bar is 1.03. Entering and leaving the block is part of the time, the
fingerprint of the model included.
Before that, what is written after steering must be what was written before, and logits bit-equal.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import median

import torch

from unsoft.hf.models import load_model
from unsoft.lab.bench.record import write_figures
from unsoft.lab.bench.timing import interleaved
from unsoft.lab.interpret.steering import Directions, steering
from unsoft.lab.interpret.steering.directions import fingerprint

PROMPT, NEW, BAR = 64, 24, 1.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    model, _ = load_model("smollm2")
    words = torch.randint(1000, 40000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    vectors = {layer: torch.randn(576) * 0.1 for layer in range(30)}
    everywhere = Directions(vectors, "block", "mean", fingerprint(model))
    some = {layer: vectors[layer] for layer in range(10, 20)}
    middle = Directions(some, "block", "mean", fingerprint(model))

    def plain() -> torch.Tensor:
        return model.generate(
            words,
            attention_mask=torch.ones_like(words),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )

    def all_layers() -> torch.Tensor:
        with steering(model, everywhere, 0.5):
            return plain()

    def turned() -> torch.Tensor:
        with steering(model, middle, 0.5, positions="generated", keep_norm=True):
            return plain()

    before, logits = plain(), model(words).logits
    all_layers()
    turned()
    if not (torch.equal(plain(), before) and torch.equal(model(words).logits, logits)):
        raise SystemExit("steering left something behind: no time is shown")
    calls = {"plain": plain, "all layers": all_layers, "generated tokens, norm kept": turned}
    samples = interleaved(calls, rounds=arguments.rounds)
    seconds = {name: median(taken) for name, taken in samples.items()}
    ratios = {
        name: sorted(taken / plain for taken, plain in zip(found, samples["plain"], strict=True))
        for name, found in samples.items()
        if name != "plain"
    }
    middle_of = {name: median(found) for name, found in ratios.items()}
    passed = max(middle_of.values()) <= BAR
    for name, found in ratios.items():
        low, high = _interval(found)
        ratio = f"{middle_of[name]:.3f}x ({low:.3f} to {high:.3f}; at most {BAR:g}x)"
        print(f"{name}: {seconds[name]:.2f} s, {ratio}")
    print("pass" if passed else "FAIL")
    if arguments.out:
        figures = {
            "prompt": PROMPT,
            "new_tokens": NEW,
            "rounds": arguments.rounds,
            "seconds": seconds,
            "ratio": middle_of,
            "ratio_interval": {name: _interval(found) for name, found in ratios.items()},
            "ratio_at_most": BAR,
            "passed": passed,
        }
        write_figures(arguments.out, figures)


def _interval(ordered: list[float]) -> tuple[float, float]:
    """95 % for the median, from the ranks that a fair coin leaves (normal approximation)."""
    half = 0.98 * len(ordered) ** 0.5
    low = max(0, math.floor(len(ordered) / 2 - half))
    return ordered[low], ordered[len(ordered) - 1 - low]


if __name__ == "__main__":
    sys.exit(main())
