"""Figures of swapped models: ``python benchmarks/hf.py [--out FILE.json]``, about two minutes.

SmolLM2-135M (30 layers, 9 heads over 3 key heads), float32. Every time is a ratio to the same model with
transformers' own SDPA attention in the same interleaved run, the fastest of at least five rounds; the copies
share their weights. Swapped softmax must first give the logits of the model's own attention.

``--step`` measures one decoding step of a small Llama with random weights instead, after 256 to 4096 tokens.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import unsoft
from unsoft.lab.bench.record import write_figures
from unsoft.lab.bench.timing import fastest

PROMPT, NEW, LENGTH = 32, 64, 512
OWN = "SDPA"
FORWARD = {"softmax": 1.05, "cog": 1.1}
GENERATE = {"softmax": 1.03, "cog": 1.03}
ALSO = ("linear-elu1", "magnitude+softmax")
"""Measured with --all, without a bar: mechanisms that decode with a state of their own."""
STEP = {
    "softmax": 1.05,
    "cog": 1.05,
    "relu2": 1.05,
    "gpam": 1.25,
    "linear-elu1": 1.25,
    "magnitude": None,
    "differential2": None,
}
STEP_AFTER, STEP_TOKENS = (256, 1024, 4096), 16
"""Tokens before the first measured step, and measured steps in a round."""
_WRONG = 1e-3


def shared_copy(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A model of its own around the same weights."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def contenders(names: tuple[str, ...]) -> tuple[dict[str, transformers.PreTrainedModel], torch.Tensor]:
    model, tokenizer = unsoft.hf.load_model("smollm2")
    if model.config._attn_implementation != "sdpa":
        raise RuntimeError(f"expected SDPA, not {model.config._attn_implementation}")
    text = (Path(__file__).parent / "README.md").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :LENGTH]
    named = {OWN: model}
    for name in names:
        named[name] = unsoft.hf.swap(shared_copy(model), name)
    with torch.no_grad():
        own, ours = (named[name](ids).logits for name in (OWN, "softmax"))
    if (difference := (own - ours).abs().max().item()) > _WRONG:
        raise RuntimeError(f"swapped softmax differs from the model's own attention by {difference:g}")
    return named, ids


def forward(model: transformers.PreTrainedModel, ids: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(ids, use_cache=False)

    return call


def generate(model: transformers.PreTrainedModel, ids: torch.Tensor) -> Callable[[], object]:
    prompt = {"input_ids": ids[:, :PROMPT], "attention_mask": torch.ones_like(ids[:, :PROMPT])}
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return lambda: model.generate(**prompt, **options)


@torch.no_grad()
def step_seconds(model: transformers.PreTrainedModel, ids: torch.Tensor) -> float:
    """Return the seconds of one decoding step, with the cache that ``generate`` would use."""
    swapped = hasattr(model.model.layers[0].self_attn, "unsoft")
    preferred = swapped and unsoft.hf.MechanismCache.preferred(model)
    cache = unsoft.hf.MechanismCache(model) if preferred else transformers.DynamicCache(config=model.config)
    prompt, warm, *tokens = ids.split([ids.shape[1] - 1 - STEP_TOKENS, 1] + [1] * STEP_TOKENS, dim=1)
    for piece in (prompt, warm):
        model(piece, past_key_values=cache)
    start = time.perf_counter()
    for token in tokens:
        model(token, past_key_values=cache)
    return (time.perf_counter() - start) / STEP_TOKENS


def step_figures(after: int, rounds: int) -> list[dict]:
    """Return the times of one decoding step of a small Llama, by its own SDPA and each swapped mechanism."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**sizes, **heads)
    own = transformers.LlamaForCausalLM(config).eval()
    # Without a bar only after the shortest text: magnitude reads a long one for seconds.
    names = [name for name, bar in STEP.items() if bar is not None or after == STEP_AFTER[0]]
    named = {OWN: own} | {name: unsoft.hf.swap(shared_copy(own), name) for name in names}
    ids = torch.randint(config.vocab_size, (1, after + 1 + STEP_TOKENS))
    samples: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(rounds):
        for name, model in named.items():
            samples[name].append(step_seconds(model, ids))
    fastest = {name: min(seconds) for name, seconds in samples.items()}
    return [
        {
            "what": f"{name}, one step after {after} tokens ({1e3 * seconds:.2f} ms)",
            "measured": seconds / fastest[OWN],
            "at_most": STEP.get(name),
        }
        for name, seconds in fastest.items()
    ]


def ratios(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    seconds = fastest(calls, rounds=rounds)
    return {name: taken / seconds[OWN] for name, taken in seconds.items() if name != OWN}


def figures(rounds: int, names: tuple[str, ...]) -> list[dict]:
    named, ids = contenders(names)
    found = []
    for what, make, bars in (
        (f"forward of {ids.shape[1]} tokens", forward, FORWARD),
        (f"generate {NEW} tokens after {PROMPT}", generate, GENERATE),
    ):
        measured = ratios({name: make(model, ids) for name, model in named.items()}, rounds)
        found += [
            {"what": f"{name}, {what}", "measured": x, "at_most": bars.get(name)}
            for name, x in measured.items()
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all", action="store_true", help=f"also {', '.join(ALSO)}; three minutes more")
    parser.add_argument("--step", action="store_true", help="one decoding step of a small Llama instead")
    arguments = parser.parse_args()
    results = []
    names = (*FORWARD, *ALSO) if arguments.all else tuple(FORWARD)
    steps = (figure for after in STEP_AFTER for figure in step_figures(after, arguments.rounds))
    for figure in steps if arguments.step else figures(arguments.rounds, names):
        bar = figure["at_most"]
        verdict = "" if bar is None else f"<= {bar:<5} {'pass' if figure['measured'] <= bar else 'FAIL'}"
        print(f"{figure['what']:<60} {figure['measured']:6.2f}  {verdict}", flush=True)
        results.append(figure | {"passed": bar is None or figure["measured"] <= bar})
    if arguments.out:
        write_figures(arguments.out, results, transformers=transformers.__version__)


if __name__ == "__main__":
    sys.exit(main())
