"""Figures of density attention: ``python benchmarks/density.py [--out FILE.json]``, about three minutes.

Times are ratios to ``F.scaled_dot_product_attention`` of the same shape (B=1 H=8 D=64) in the same
interleaved run, the fastest of several rounds. With a window the peers are SDPA with the same window as a
bool mask, and density without a window. Decoding: one step of a Llama of SmolLM2's shape (4 layers, 9 heads,
3 key heads of width 64, random weights), swapped, against the same model with SDPA.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import unsoft
from unsoft.files import write_json
from unsoft.hf.cache import MechanismCache
from unsoft.hf.rotary import Inverse
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.machine import machine
from unsoft.lab.bench.timing import fastest

HEADS, WIDTH, ROUNDS = 8, 64, 5


def step(
    attend: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    parameters: list[Tensor],
    upstream: Tensor | None,
    **options: object,
) -> Callable[[], object]:
    """Return a function that attends, and with ``upstream`` computes all gradients too."""
    training = upstream is not None
    inputs = [x.clone().requires_grad_(training) for x in tensors]

    def run() -> object:
        with torch.set_grad_enabled(training):
            out = attend(*inputs, **options)
            return torch.autograd.grad(out, [*inputs, *parameters], upstream) if training else out

    return run


def attention_figure(
    length: int,
    at_most: float | None = None,
    *,
    name: str = "density",
    key_heads: int = HEADS,
    is_causal: bool = True,
    training: bool = True,
    dtype: torch.dtype = torch.float32,
    rotary: bool = False,
) -> dict:
    """Return the time of one call over SDPA's, once it has been compared with the formula in float64.

    ``rotary``: the time includes undoing the rotation of keys, as in a swapped model.
    """
    g = torch.Generator().manual_seed(0)
    sizes = (HEADS, key_heads, key_heads)
    q, k, v = (torch.randn(1, heads, length, WIDTH, generator=g).to(dtype) for heads in sizes)
    upstream = torch.randn(1, HEADS, length, WIDTH, generator=g).to(dtype)
    layer = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH)
    grouped = key_heads != HEADS

    def before_rotation(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        return layer(
            query, key, value, geometry_keys=inverse.apply(key, (angles.cos(), angles.sin())), **options
        )

    inverse, angles = Inverse("halves", False, False, 1), torch.rand(length, WIDTH, generator=g)
    options = {"is_causal": is_causal, "enable_gqa": grouped}
    check(layer, q, k, v, **options)
    attend, given = before_rotation if rotary else layer, upstream if training else None
    calls = {
        "ours": step(attend, (q, k, v), list(layer.parameters()), given, **options),
        "sdpa": step(scaled_dot_product_attention, (q, k, v), [], given, **options),
    }
    seconds = fastest(calls, rounds=ROUNDS, seconds=1.5)
    order, kind = "causal" if is_causal else "bidirectional", "forward + backward" if training else "forward"
    heads = (f", {key_heads} key heads" if grouped else "") + (", rotary keys" if rotary else "")
    what = f"{name}, {order}{heads}, {str(dtype)[6:]}, {length}, {kind}"
    return {"what": what, "measured": seconds["ours"] / seconds["sdpa"]} | _bar(at_most)


@torch.no_grad()
def check(layer: unsoft.Mechanism, q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
    """Raise RuntimeError unless the first 300 tokens get what the dense engine computes in float64."""
    tokens = [x[:, :, :300] for x in (q, k, v)]
    ours = layer(*tokens, **options).double()
    exact = copy.deepcopy(layer).double()(*(x.double() for x in tokens), engine="dense", **options)
    error = float((ours - exact).abs().max())
    if error > (2e-2 if q.dtype == torch.bfloat16 else 1e-5):
        raise RuntimeError(f"the output is off by {error:.1e}")


def attention_figures() -> list[dict]:
    return [
        attention_figure(1024, 1.6),
        attention_figure(4096, 1.6),
        attention_figure(1024, 1.6, rotary=True),
        attention_figure(4096, 1.6, rotary=True),
        attention_figure(4096, training=False),
        attention_figure(4096, name="density+cog"),
        attention_figure(2048, key_heads=2),
        attention_figure(2048, is_causal=False),
        attention_figure(2048, dtype=torch.bfloat16),
    ]


def window_figure(length: int, window: int, *, training: bool) -> list[dict]:
    """Return the time of a causal call in a window over SDPA's with the same mask, and over that of density
    without a window."""
    g = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(1, HEADS, length, WIDTH, generator=g) for _ in range(4))
    layer = unsoft.mechanism("density", heads=HEADS, head_dim=WIDTH)
    i = torch.arange(length)
    mask = (i <= i[:, None]) & (i >= i[:, None] - window)
    check(layer, q, k, v, is_causal=True, window=(min(window, 100), 0))

    tokens, learned, given = (q, k, v), list(layer.parameters()), upstream if training else None
    calls = {
        "ours": step(layer, tokens, learned, given, is_causal=True, window=(window, 0)),
        "SDPA with the mask": step(scaled_dot_product_attention, tokens, [], given, attn_mask=mask),
        "density without a window": step(layer, tokens, learned, given, is_causal=True),
    }
    seconds = fastest(calls, rounds=ROUNDS, seconds=1.5)
    what = f"density, window {window} of {length}, {'forward + backward' if training else 'forward'}: over "
    return [
        {"what": what + peer, "measured": seconds["ours"] / taken}
        for peer, taken in seconds.items()
        if peer != "ours"
    ]


def window_figures() -> list[dict]:
    sizes = ((4096, 256, False), (4096, 256, True), (8192, 256, True), (8192, 1024, True))
    return [
        figure
        for length, window, training in sizes
        for figure in window_figure(length, window, training=training)
    ]


def decode_figures() -> list[dict]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    swapped = unsoft.hf.swap(copy.deepcopy(plain), "density")
    figures = []
    for context in (256, 1024, 4096):
        ids = torch.randint(1000, (1, context))

        def stepper(model, cache, ids=ids) -> Callable[[], object]:
            with torch.no_grad():
                model(ids, past_key_values=cache)

            @torch.no_grad()
            def step() -> object:
                return model(ids[:, :1], past_key_values=cache)

            return step

        calls = {
            "ours": stepper(swapped, MechanismCache(swapped)),
            "sdpa": stepper(plain, transformers.DynamicCache()),
        }
        seconds = fastest(calls, rounds=20)
        what = f"density, one step of a swapped Llama after {context} tokens"
        figures.append({"what": what, "measured": seconds["ours"] / seconds["sdpa"]} | _bar(1.2))
    return figures


def memory_probe(length: int) -> None:
    """Print the peak of one training step beyond its inputs, over the bytes of q, k and v."""
    layer = unsoft.mechanism("density", heads=HEADS, head_dim=WIDTH)
    inputs = [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
    torch.autograd.grad(layer(*(x[:, :, :256] for x in inputs), is_causal=True).sum(), inputs)  # compiles
    before = reset_peak()
    torch.autograd.grad(layer(*inputs, is_causal=True).sum(), inputs)
    print(json.dumps({"inputs": (peak() - before) / (3 * 4 * HEADS * length * WIDTH)}))


def memory_figures(length: int = 8192) -> list[dict]:
    measured = run_probe(__file__, "--memory", str(length), MALLOC_MMAP_THRESHOLD_="65536")["inputs"]
    what = f"density, causal, {length}, forward + backward: peak memory over q, k and v"
    return [{"what": what, "measured": measured} | _bar(6.0)]


def _bar(at_most: float | None) -> dict:
    return {} if at_most is None else {"at_most": at_most}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.memory:
        memory_probe(chosen.memory)
        return 0
    figures = []
    for part in (attention_figures, window_figures, decode_figures, memory_figures):
        for figure in part():
            figures.append(figure)
            bar = f"<= {figure['at_most']:g}" if "at_most" in figure else ""
            print(f"{figure['what']:<75} {figure['measured']:8.3f}  {bar}", flush=True)
    if chosen.out:
        write_json(chosen.out, {"machine": machine(), "figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
