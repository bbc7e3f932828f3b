"""Figures of accelerated models: ``python benchmarks/acceleration.py [GROUP...] [--out FILE.json]``, minutes.

Every figure is a ratio to the same model, layer or function of transformers without ``unsoft.hf.accelerate``,
in one interleaved run, the fastest of several rounds (↓ lower is better). Outputs are compared first. Memory
is the peak of each beyond its weights, in a process of its own. Groups measured one by one are merged into
FILE.json.

``--table`` writes the table that decides between our kernel and ``sdpa`` (src/unsoft/hf/sdpa_speed.json)
instead: time of sdpa over ours (↑ higher is better), 8 heads over 2 key heads.

Not called accelerate.py: scripts of this folder would import it in place of the package of that name.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import unsoft
from unsoft.files import write_json
from unsoft.hf import fast_attention
from unsoft.hf.fast_delta import delta_rule
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.machine import machine
from unsoft.lab.bench.timing import fastest

TABLE = Path(fast_attention.__file__).parent / "sdpa_speed.json"
OSS_LENGTH = 4096
OSS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 4,  # the active ones
    "num_experts_per_tok": 4,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "sliding_window": 128,
}
SMALL = {"num_hidden_layers": 4, "vocab_size": 1000}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt-oss, 4 layers of 512, 1024 tokens": (
        "GptOssForCausalLM",
        SMALL
        | OSS
        | {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8}
        | {"num_hidden_layers": 4, "num_key_value_heads": 2},
        1024,
    ),
    "Qwen3.5-0.8B, 4 layers, 1024 tokens": (
        "Qwen3_5ForCausalLM",
        SMALL
        | {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8}
        | {"num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16},
        1024,
    ),
    "Gemma 2, 4 layers of 512, 1024 tokens": (
        "Gemma2ForCausalLM",
        SMALL
        | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
        | {"num_key_value_heads": 4, "head_dim": 64, "sliding_window": 256},
        1024,
    ),
    "T5-small, 512 tokens": ("T5ForConditionalGeneration", {"vocab_size": 1000}, 512),
}
_WRONG = 1e-3
Calls = dict[str, Callable[[], object]]


def shared_copy(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A model of its own around the same weights."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def compared(what: str, calls: Calls, limit: float, rounds: int, tolerance: float = _WRONG) -> dict:
    """Check that both calls return the same tensor, and return the ratio of their times."""
    own, ours = (calls[name]() for name in ("own", "ours"))
    if isinstance(own, torch.Tensor) and (own - ours).abs().max() > tolerance * own.abs().max():
        raise RuntimeError(f"{what}: differs by {(own - ours).abs().max():g}")
    seconds = fastest(calls, rounds=rounds, seconds=1.0)
    print(what, {name: f"{taken:.3f} s" for name, taken in seconds.items()}, flush=True)
    return {"what": what, "measured": seconds["ours"] / seconds["own"], "at_most": limit}


def oss_layer(kind: str, dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**OSS, layer_types=[kind], attn_implementation="eager")
    model = transformers.GptOssModel(config)
    torch.nn.init.normal_(model.layers[0].self_attn.sinks)
    return model.to(dtype)


def runs(model: transformers.PreTrainedModel, ids: torch.Tensor, mode: str) -> Callable[[], object]:
    inputs = {"input_ids": ids, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids

    def forward() -> object:
        with torch.no_grad():
            return model(**inputs)[0]

    def training() -> object:
        model(**inputs)[0].float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        return None

    return forward if mode == "forward" else training


def layers() -> list[dict]:
    """A layer of gpt-oss-20b's size."""
    figures = []
    ids = torch.randint(32, (1, OSS_LENGTH), generator=torch.Generator().manual_seed(0))
    for kind in ("full_attention", "sliding_attention"):
        own = oss_layer(kind)
        ours = shared_copy(own)
        unsoft.hf.accelerate(ours)
        for mode in ("forward", "training"):
            calls = {"own": runs(own, ids, mode), "ours": runs(ours, ids, mode)}
            what = f"gpt-oss-20b layer, {kind}, {mode}, {OSS_LENGTH} tokens"
            figures.append(compared(what, calls, 0.5, rounds=1, tolerance=2e-2))
    return figures


def memory() -> list[dict]:
    """Peak memory of such a layer."""
    figures = []
    for mode in ("forward", "training"):
        needed = {
            who: run_probe(__file__, "--memory", f"{who} {mode}", MALLOC_MMAP_THRESHOLD_="65536")["bytes"]
            for who in ("own", "ours")
        }
        print(mode, {who: f"{size / 2**30:.2f} GB" for who, size in needed.items()}, flush=True)
        what = f"gpt-oss-20b layer, full_attention, {mode}, {OSS_LENGTH} tokens, peak memory"
        figures.append({"what": what, "measured": needed["ours"] / needed["own"], "at_most": 0.5})
    return figures


def memory_of(who: str, mode: str) -> int:
    model = oss_layer("full_attention")
    if who == "ours":
        unsoft.hf.accelerate(model)
    ids = torch.randint(32, (1, OSS_LENGTH), generator=torch.Generator().manual_seed(0))
    runs(model, ids[:, :256], mode)()
    call = runs(model, ids, mode)
    before = reset_peak()
    call()
    return peak() - before


def delta() -> list[dict]:
    """The gated delta rule and its layer at the size of Qwen3.5-0.8B: 16 heads of 128."""
    own = transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule
    rules = {"own": own, "ours": partial(delta_rule, own=own)}
    generator = torch.Generator().manual_seed(0)
    length, figures = 2048, []
    q, k, v = (torch.randn(1, length, 16, 128, generator=generator).requires_grad_() for _ in range(3))
    g, beta = (torch.rand(1, length, 16, generator=generator).requires_grad_() for _ in range(2))

    def rule(name: str, mode: str) -> object:
        with torch.set_grad_enabled(mode == "training"):
            out, _ = rules[name](q, k, v, g=-g, beta=beta, use_qk_l2norm_in_kernel=True)
            if mode == "forward":
                return out
            return torch.autograd.grad(out, (q, k, v, g, beta), torch.ones_like(out))[0]

    sizes = MODELS["Qwen3.5-0.8B, 4 layers, 1024 tokens"][1]
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**sizes | {"num_hidden_layers": 1})
    plain = transformers.Qwen3_5TextModel(config)
    fast = shared_copy(plain)
    unsoft.hf.accelerate(fast)
    hidden = torch.randn(1, length, 1024, generator=generator)

    def layer(model: transformers.PreTrainedModel, mode: str) -> object:
        with torch.set_grad_enabled(mode == "training"):
            out = model.layers[0].linear_attn(hidden)
            if mode == "training":
                out.square().mean().backward()
        return out.detach()

    for mode, limit in (("forward", 1 / 3), ("training", 0.4)):
        calls: Calls = {name: partial(rule, name, mode) for name in rules}
        figures.append(compared(f"gated delta rule, {mode}, {length} tokens", calls, limit, rounds=3))
    for mode in ("forward", "training"):
        calls = {"own": partial(layer, plain, mode), "ours": partial(layer, fast, mode)}
        figures.append(compared(f"Qwen3.5 delta layer, {mode}, {length} tokens", calls, 1.0, rounds=3))
    return figures


def models() -> list[dict]:
    """Whole small models with random weights, and a fine-tuning step of SmolLM2."""
    figures = []
    for name, (kind, sizes, length) in MODELS.items():
        torch.manual_seed(0)
        model_class = getattr(transformers, kind)
        own = model_class(model_class.config_class(**sizes)).eval()
        figures += whole(name, own, length)
    smollm, _ = unsoft.hf.load_model("smollm2")
    return figures + whole("SmolLM2-135M, 1024 tokens", smollm, 1024)


def whole(name: str, own: transformers.PreTrainedModel, length: int) -> list[dict]:
    ours = shared_copy(own)
    unsoft.hf.accelerate(ours)
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    return [
        compared(
            f"{name}, {mode}", {"own": runs(own, ids, mode), "ours": runs(ours, ids, mode)}, 1.0, rounds=2
        )
        for mode in ("forward", "training")
    ]


KINDS = {
    "causal": (64, 256, 1024, 4096),
    "full": (64, 256, 1024),
    "window": (64, 256, 1024, 4096),
    "mask": (64, 256, 1024),
    "bias": (64, 256, 1024),
    "decode": (64, 256, 1024, 4096),
}


def table_row(kind: str, dtype: torch.dtype, width: int, keys: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=dtype)
    rows = 1 if kind == "decode" else keys
    q, k, v = (draw(1, heads, n, width) for heads, n in ((8, rows), (2, keys), (2, keys)))
    module = SimpleNamespace(num_key_value_groups=4, is_causal=kind not in ("full", "bias"), training=True)
    structure: dict[str, Any] = {"is_causal": "lower_right"} if kind == "causal" else {}
    mask, extra = None, {}
    if kind == "window":
        i = torch.arange(keys)
        mask = ((i <= i[:, None]) & (i > i[:, None] - 128))[None, None]
        structure = {"is_causal": "lower_right", "window": (127, 0)}
    if kind == "mask":
        mask = torch.ones(keys, keys, dtype=torch.bool).tril()[None, None]
    if kind == "bias":
        extra = {"position_bias": draw(1, 8, keys, keys)}
    formula = fast_attention.softmax_formula(False, None)
    ours_mask = mask if kind == "mask" else None

    def own_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict) -> torch.Tensor:
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, q, k, v, mask, scaling=0.1, **extra
        )[0]  # type: ignore[arg-type]

    def our_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict) -> torch.Tensor:
        return fast_attention._run(formula, q, k, v, ours_mask, dict(structure), scaling=0.1, **extra)

    trained = [x.clone().requires_grad_() for x in (q, k, v)]
    trained_extra = {name: x.clone().requires_grad_() for name, x in extra.items()}
    upstream = draw(1, rows, 8, width)

    def forward(call: Callable) -> object:
        with torch.no_grad():
            return call(q, k, v, extra)

    def training(call: Callable) -> object:
        return torch.autograd.grad(
            call(*trained, trained_extra), (*trained, *trained_extra.values()), upstream
        )

    row = {"kind": kind, "dtype": str(dtype).removeprefix("torch."), "width": width, "keys": keys}
    for mode, run in (("forward", forward), ("training", training)):
        if (kind, mode) != ("decode", "training"):
            calls = {"own": partial(run, own_call), "ours": partial(run, our_call)}
            seconds = fastest(calls, rounds=3, seconds=0.15)
            row[mode] = round(seconds["own"] / seconds["ours"], 2)
    return row


def write_table() -> None:
    rows = []
    for kind, lengths in KINDS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for width in (64, 128):
                for keys in lengths:
                    if keys > 1024 and (width, kind) != (64, "window") and kind != "decode":
                        continue
                    rows.append(table_row(kind, dtype, width, keys))
                    print(rows[-1], flush=True)
    content = json.dumps(rows).replace("}, {", "},\n  {")
    TABLE.write_text(f'{{"machine": {json.dumps(machine())},\n "rows": [\n  {content[1:-1]}]}}\n')


GROUPS = {"layers": layers, "memory": memory, "delta": delta, "models": models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        return write_table()
    if arguments.memory:
        print(json.dumps({"bytes": memory_of(*arguments.memory.split())}))
        return None
    figures: dict[str, dict] = {}
    if arguments.out and arguments.out.exists():
        figures = {figure["what"]: figure for figure in json.loads(arguments.out.read_text())["figures"]}
    for name in arguments.groups or GROUPS:
        for figure in GROUPS[name]():
            figure["passed"] = figure["measured"] <= figure["at_most"]
            verdict = "pass" if figure["passed"] else "FAIL"
            print(f"{figure['what']:<70} {figure['measured']:5.2f} <= {figure['at_most']:.2f} {verdict}")
            figures[figure["what"]] = figure
    if arguments.out:
        about = {"machine": machine(), "transformers": transformers.__version__}
        write_json(arguments.out, about | {"figures": list(figures.values())})
    return None


if __name__ == "__main__":
    sys.exit(main())
