"""Figures of magnitude attention: ``python benchmarks/magnitude.py [--out FILE.json]``, about three minutes.

Times are ratios to ``F.scaled_dot_product_attention`` of the same shape (B=1 H=8 D=64 float32) in the same
interleaved run, the fastest of several rounds. The magnitude of one set is compared with magnipy's Cholesky
(its three lines, on a matrix from SciPy's cdist) and with linear_operator's conjugate gradients, if they are
installed (pip install --no-deps magnipy linear_operator jaxtyping scipy wadler-lindig). Streams: 2048 keys of
which 30 % are isolated and the others belong to crowds.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import unsoft
from unsoft.files import write_json
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.machine import machine
from unsoft.lab.bench.timing import fastest, interleaved
from unsoft.magnitude.points import checked_points
from unsoft.magnitude.prefix import arrival_weights
from unsoft.magnitude.streaming import CHUNK, streamed_weights

HEADS, WIDTH, ROUNDS = 8, 64, 7
EPS = 0.1


def crowds(
    systems: int, n: int, number: int, noise: float, spread: float, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys (systems, n, 64), 30 % of them isolated (label -1), the others near one of ``number`` places, and
    the labels.
    """
    g = torch.Generator().manual_seed(seed)
    places = torch.randn(systems, number, WIDTH, generator=g)
    label = torch.randint(number, (systems, n), generator=g)
    keys = places.gather(1, label[..., None].expand(-1, -1, WIDTH))
    keys = keys + noise / spread * torch.randn(keys.shape, generator=g)
    alone = torch.rand(systems, n, generator=g) < 0.3
    keys = torch.where(alone[..., None], torch.randn(keys.shape, generator=g), keys)
    return spread * keys, torch.where(alone, -1, label)


def attention_figure(
    what: str,
    at_most: float,
    length: int,
    *,
    is_causal: bool,
    training: bool,
    clustered: bool = False,
    **options: object,
) -> dict:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=g) for _ in range(3))
    if clustered:
        places = torch.randn(1, HEADS, 32, WIDTH, generator=g)
        k = places[:, :, torch.randint(32, (length,), generator=g)] + 0.01 * k
    upstream = torch.randn(1, HEADS, length, WIDTH, generator=g)
    layer = unsoft.mechanism("magnitude", heads=HEADS, head_dim=WIDTH, **options)

    def call(attend: Callable, parameters: list[Tensor]) -> Callable[[], object]:
        inputs = [x.clone().requires_grad_(training) for x in (q, k, v)]

        def run() -> object:
            with torch.set_grad_enabled(training):
                out = attend(*inputs, is_causal=is_causal)
                return torch.autograd.grad(out, [*inputs, *parameters], upstream) if training else out

        return run

    calls = {"ours": call(layer, list(layer.parameters())), "sdpa": call(scaled_dot_product_attention, [])}
    seconds = fastest(calls, rounds=ROUNDS, seconds=2.0)
    return {"what": what, "measured": seconds["ours"] / seconds["sdpa"], "at_most": at_most}


def attention_figures() -> list[dict]:
    return [
        attention_figure(
            "bidirectional, cg 5 steps, 2048, forward", 1.8, 2048, is_causal=False, training=False
        ),
        attention_figure(
            "bidirectional, cg 5 steps, 2048, forward + backward", 2.0, 2048, is_causal=False, training=True
        ),
        attention_figure(
            "low rank, 32 clusters, 4096, forward",
            1.25,
            4096,
            is_causal=False,
            training=False,
            clustered=True,
            solver="lowrank",
        ),
        attention_figure(
            "causal arrival, exact, 1024, forward + backward",
            2.5,
            1024,
            is_causal=True,
            training=True,
            causal="arrival",
        ),
        attention_figure(
            "causal auto (the default), 4096, forward", 5.0, 4096, is_causal=True, training=False
        ),
        attention_figure(
            "causal auto (the default), 1024, forward + backward", 2.5, 1024, is_causal=True, training=True
        ),
        attention_figure(
            "causal streaming, 4096, forward + backward",
            1.6,
            4096,
            is_causal=True,
            training=True,
            causal="streaming",
        ),
    ]


def one_set_figures(n: int = 4096) -> list[dict]:
    """Seconds of peers over ours, for one set of random keys at t = 1, eps = 0.01: a higher ratio
    is better.
    """
    keys = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(0))
    tolerance = 1e-4
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: unsoft.magnitude.weighting(keys, 1.0, 0.01, tolerance=tolerance).magnitude
    }
    if importlib.util.find_spec("scipy") is not None:
        calls["magnipy's Cholesky"] = lambda: cholesky_as_magnipy(keys.double().numpy(), 1.0, 0.01)
    if importlib.util.find_spec("linear_operator") is not None:
        calls["linear_operator's CG"] = lambda: linear_operator_cg(keys, 1.0, 0.01, tolerance)
    seconds = fastest(calls, rounds=5, seconds=2.0)
    chosen = unsoft.magnitude.weighting(keys, 1.0, 0.01, tolerance=tolerance)
    return [
        {
            "what": (
                f"magnitude of one set, {n}: {name} / ours ({chosen.solver}; residual {chosen.residual:.0e})"
            ),
            "measured": seconds[name] / seconds["ours"],
            "at_least": 3.0,
        }
        for name in calls
        if name != "ours"
    ]


def cholesky_as_magnipy(keys, t: float, eps: float):
    """magnipy 1.0.0: magnitude/weights.py, weights_cholesky; the kernel is ours."""
    import numpy as np
    from scipy.linalg import cho_factor, solve_triangular
    from scipy.spatial.distance import cdist

    z = np.exp(-t / keys.shape[1] * cdist(keys, keys, "sqeuclidean")) + eps * np.eye(len(keys))
    c, _ = cho_factor(z)
    x = solve_triangular(c, np.ones(len(z)), trans=1)
    return solve_triangular(c, x.T, trans=0).sum()


def linear_operator_cg(keys: Tensor, t: float, eps: float, tolerance: float) -> Tensor:
    """linear_operator's own conjugate gradients on the dense float32 matrix, to the same residual."""
    from linear_operator.utils.linear_cg import linear_cg

    z = torch.exp(-t / keys.shape[1] * torch.cdist(keys, keys).square())
    z.diagonal().add_(eps)
    ones = keys.new_ones(len(keys), 1)
    return linear_cg(z.matmul, ones, tolerance=tolerance, max_iter=1000, max_tridiag_iter=0).sum()


def stream_figures(n: int = 2048) -> list[dict]:
    """How far the streaming gates are from the exact ones (sigmoid(w), the default start)."""
    figures = []
    for noise, number, t in itertools.product((0.02, 0.1), (16, 32, 64), (1.0, 2.0, 4.0)):
        keys, label = crowds(2, n, number, noise=noise, spread=2.0)
        exact, ours = both_weights(keys, t)
        inside = ((exact.sigmoid() - ours.sigmoid()).abs() <= 0.1).double().mean()
        totals = torch.stack(
            [w[b][label[b] == c].sum() for w in (exact, ours) for b in range(2) for c in range(number)]
        ).view(2, -1)
        right = ((totals[1] / totals[0] - 1).abs() <= 0.15).double().mean()
        what = f"stream of {number} crowds, noise {noise:g}, t = {t:g}"
        figures.append({"what": f"{what}: gates within 0.1", "measured": float(inside), "at_least": 0.9})
        figures.append(
            {"what": f"{what}: crowd totals within 15 %", "measured": float(right), "at_least": 1.0}
        )
    for t in (1.0, 2.0, 4.0):
        keys = torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(1))
        exact, ours = both_weights(keys, t)
        inside = ((exact.sigmoid() - ours.sigmoid()).abs() <= 0.05).double().mean()
        figures.append({"what": f"random stream, t = {t:g}: gates within 0.05", "measured": float(inside)})
    return figures


def both_weights(keys: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Arrival weights, exact in float64 and streamed in float32."""
    points = checked_points(keys, t, None, "benchmark")
    system = points.system(EPS)
    return arrival_weights(system.to(torch.float64)), streamed_weights(system).double()


def default_decode_figures() -> list[dict]:
    """One token in the default form, whole step, against the attention of one query to as many keys; and
    prefill with a cache.
    """
    figures = []
    for context, at_most in (
        (256, 4.0),
        (1024, 3.0),
        (4096, 2.0),
    ):  # each the end of a chunk: 256 + 4 or 20 times 192
        layer = unsoft.mechanism("magnitude", heads=HEADS, head_dim=WIDTH)
        q, k, v = (torch.randn(1, HEADS, context, WIDTH) for _ in range(3))
        token = [torch.randn(1, HEADS, 1, WIDTH) for _ in range(3)]
        cache = layer.new_cache(1)
        with torch.no_grad():
            layer(q, k, v, cache=cache)

            start = cache.length, cache.arriving.state, cache.arriving.window.length

            def ours(layer=layer, token=token, cache=cache, start=start) -> None:
                """A chunk of steps, with the work at its end, after which the cache is put back to where it
                was.
                """
                for _ in range(CHUNK):
                    layer(*token, cache=cache)
                cache.length = cache.inner.length = start[0]
                cache.arriving.state, cache.arriving.window.length = start[1:]

            def sdpa(q=token[0], k=k, v=v) -> None:
                for _ in range(CHUNK):
                    scaled_dot_product_attention(q, k, v)

            seconds = interleaved({"ours": ours, "sdpa": sdpa}, rounds=ROUNDS, seconds=2.0)
        taken = {name: min(times) for name, times in seconds.items()}
        what = f"causal auto (the default), decode at {context}"
        figures.append({"what": what, "measured": taken["ours"] / taken["sdpa"], "at_most": at_most})
    held = (cache.nbytes - cache.inner.nbytes) / 2**20
    figures.append({"what": f"{what}: MB held beside keys and values", "measured": held, "at_most": 8.0})

    def prefill() -> None:
        with torch.no_grad():
            layer(q, k, v, cache=layer.new_cache(1))

    calls = {"ours": prefill, "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True)}
    taken = fastest(calls, rounds=ROUNDS, seconds=2.0)
    what = f"causal auto (the default), prefill of {context} with a cache"
    return [*figures, {"what": what, "measured": taken["ours"] / taken["sdpa"], "at_most": 5.0}]


def decode_figures() -> list[dict]:
    """The streaming gate's own cost of one token does not grow with the position."""
    layer, steps = (
        unsoft.mechanism("magnitude+linear-relu", heads=HEADS, head_dim=WIDTH, causal="streaming"),
        {},
    )
    sizes = {}
    for position in (512, 8192):
        cache = layer.new_cache(1)
        with torch.no_grad():
            layer(*(torch.randn(1, HEADS, position + 1, WIDTH) for _ in range(3)), cache=cache)
        token = [torch.randn(1, HEADS, 1, WIDTH) for _ in range(3)]

        def step(cache=cache, token=token) -> None:
            with torch.no_grad():
                layer(*token, cache=cache)

        steps[position], sizes[position] = step, cache.nbytes
    seconds = fastest(steps, rounds=40, seconds=1.0)
    return [
        {
            "what": "streaming, decode at 8192 / 512, time",
            "measured": seconds[8192] / seconds[512],
            "at_most": 1.1,
        },
        {
            "what": "streaming, decode at 8192 / 512, state",
            "measured": sizes[8192] / sizes[512],
            "at_most": 1.0,
        },
    ]


def memory_probe(length: int) -> None:
    """Prints the peak of one training step beyond its inputs, in N x N float32 matrices."""
    layer = unsoft.mechanism("magnitude", heads=HEADS, head_dim=WIDTH)
    layer(*(torch.randn(1, HEADS, 256, WIDTH) for _ in range(3)))  # compiles
    inputs = [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
    before = reset_peak()
    torch.autograd.grad(layer(*inputs).sum(), inputs)
    print(json.dumps({"matrices": (peak() - before) / (4 * length**2)}))


def memory_figures(length: int = 8192) -> list[dict]:
    measured = run_probe(__file__, "--memory", str(length), MALLOC_MMAP_THRESHOLD_="65536")["matrices"]
    threads = torch.get_num_threads()
    what = (
        f"peak memory of cg, {length}, forward + backward, in N x N matrices"
        f" ({threads} threads, {HEADS} heads)"
    )
    return [{"what": what, "measured": measured, "at_most": float(threads)}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.memory:
        memory_probe(chosen.memory)
        return 0
    figures = []
    parts = (
        attention_figures,
        default_decode_figures,
        one_set_figures,
        memory_figures,
        decode_figures,
        stream_figures,
    )
    for part in parts:
        for figure in part():
            figures.append(figure)
            print(_line(figure), flush=True)
    if chosen.out:
        write_json(chosen.out, {"machine": machine(), "figures": figures})
    return 0


def _line(figure: dict) -> str:
    bar, verdict = "", ""
    if "at_most" in figure:
        bar, verdict = (
            f"<= {figure['at_most']:g}",
            "pass" if figure["measured"] <= figure["at_most"] else "FAIL",
        )
    elif "at_least" in figure:
        bar, verdict = (
            f">= {figure['at_least']:g}",
            "pass" if figure["measured"] >= figure["at_least"] else "FAIL",
        )
    return f"{figure['what']:<95} {figure['measured']:8.3f}  {bar:<8} {verdict}"


if __name__ == "__main__":
    sys.exit(main())
