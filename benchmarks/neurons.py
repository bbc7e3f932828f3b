"""Time, exactness and memory of ``unsoft neurons`` on SmolLM2:
``python benchmarks/neurons.py [--out FILE.json]``, some ten minutes.

All 1,536 neurons of the last layer over 4,096 tokens, float32, threads as torch chooses: the whole of
``unsoft.lab.interpret.neurons.scan``, records and induction included, at most 3 minutes. Exactness: 20
neurons drawn at
random are ablated by brute force, that is, the model itself runs with each of them at its mean over 4
sequences, and every effect at every token is compared; at most 1e-4 nats apart. Memory: the peak of the scan
beyond the loaded model, in a process of its own; at most 2 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsoft.hf.models import load_model
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.record import write_figures
from unsoft.lab.interpret.models import replaced_inputs
from unsoft.lab.interpret.neurons import scan
from unsoft.lab.interpret.neurons.effects import NeuronAblation, ablate
from unsoft.lab.interpret.neurons.parts import FIRST, find_parts, read_stream, read_text
from unsoft.lab.interpret.neurons.weights import count_words, unigram

TOKENS, LENGTH, SAMPLE, SEQUENCES = 4096, 256, 20, 4
SECONDS_BAR, ERROR_BAR, MEMORY_BAR = 180.0, 1e-4, 2e9


def subject() -> tuple[Any, Any, str]:
    """The model, its tokenizer, and the Python reference, which every Python brings along."""
    from pydoc_data.topics import topics

    model, tokenizer = load_model("smollm2")
    return model.eval(), tokenizer, "\n\n".join(topics.values())


def whole_scan() -> dict[str, float]:
    """Seconds of a scan, and its peak of bytes beyond the loaded model; a first small call starts threads."""
    model, tokenizer, text = subject()
    model(torch.arange(64)[None])
    before, start = reset_peak(), time.perf_counter()
    scan(model, text, tokenizer=tokenizer, tokens=TOKENS, length=LENGTH)
    return {"seconds": time.perf_counter() - start, "bytes": max(peak() - before, 0)}


def figures(logits: Tensor, target: Tensor, log_share: Tensor) -> dict[str, Tensor]:
    """Loss, entropy and divergence from word frequency of each token, in double precision."""
    log_p = logits.double().log_softmax(-1)
    return {
        "loss": -log_p.gather(1, target[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(1),
        "kl": (log_share.exp() * (log_share - log_p)).sum(1),
    }


def exactness() -> dict[str, float]:
    """The largest difference of an effect from brute force, by kind."""
    model, tokenizer, text = subject()
    parts = find_parts(model)
    readout = parts.readout
    tokens = SEQUENCES * (LENGTH - FIRST - 1)
    cut = read_text(text, tokenizer, LENGTH, tokens)
    stream = read_stream(parts, cut, tokens)
    frequency = unigram(count_words(cut.all_tokens, len(readout.unembedding)))
    neurons = torch.randperm(stream.activations.shape[1], generator=torch.Generator().manual_seed(0))[:SAMPLE]
    writes, delta = parts.writes()[neurons], stream.deviations()[:, neurons]
    ours = ablate(readout, frequency, NeuronAblation(stream.residual, stream.target, writes, delta))
    share = frequency.log_share.double()
    worst: dict[str, float] = dict.fromkeys(("loss", "entropy", "kl"), 0.0)
    for row, ids in enumerate(cut.sequences):
        places = (stream.sequence == row).nonzero()[:, 0]
        target = stream.target[places]

        def run(ids: Tensor = ids, target: Tensor = target) -> dict[str, Tensor]:
            return figures(model(ids[None]).logits[0, FIRST:-1][: len(target)], target, share)

        before = run()
        for place, neuron in enumerate(neurons.tolist()):

            def silence(x: Tensor, neuron: int = neuron) -> Tensor:
                x = x.clone()
                x[..., neuron] = stream.means[neuron]
                return x

            with replaced_inputs(parts.down, silence):
                after = run()
            for name in worst:
                difference = getattr(ours, name)[places, place].double() - (after[name] - before[name])
                worst[name] = max(worst[name], float(difference.abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scan", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.scan:
        print(json.dumps(whole_scan()))
        return
    found = run_probe(__file__, "--scan")
    taken, needed = found["seconds"], found["bytes"]
    errors = exactness()
    passed = taken <= SECONDS_BAR and max(errors.values()) <= ERROR_BAR and needed <= MEMORY_BAR
    result = {
        "tokens": TOKENS,
        "length": LENGTH,
        "seconds": taken,
        "seconds_at_most": SECONDS_BAR,
        "sample": SAMPLE,
        "errors": errors,
        "error_at_most": ERROR_BAR,
        "bytes": needed,
        "bytes_at_most": MEMORY_BAR,
        "passed": passed,
    }
    print(
        f"scan: {taken:.0f} s (at most {SECONDS_BAR:g})\n"
        f"largest difference from brute force on {SAMPLE} neurons: "
        + ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
        + f" (at most {ERROR_BAR:g})\n"
        f"memory beyond the model: {needed / 1e9:.2f} GB (at most"
        f" {MEMORY_BAR / 1e9:g})\n{'pass' if passed else 'FAIL'}"
    )
    if arguments.out:
        write_figures(arguments.out, result)


if __name__ == "__main__":
    sys.exit(main())
