"""Measure models for docs/questions: ``python experiments/real_models.py [PART ...]``.

The parts are states-smollm2, states-minilm, trained, heads, strongest, alike; by default all. Each takes
minutes of one core. Results are written to docs/questions/models.json, from which docs/generate/questions.py
generates its pages; those of alike to src/unsoft/lab/records/heads.json, which the section collapse reads.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from unsoft.files import write_json
from unsoft.hf import load, load_model
from unsoft.lab.bench.machine import machine
from unsoft.lab.compare.sections.collapse import HEADS_OF_MODELS, measured, moved
from unsoft.lab.interpret import inspect
from unsoft.lab.interpret.inspection.ablation import PARTS, losses_without
from unsoft.lab.interpret.inspection.result import ROLES
from unsoft.lab.training import Spec, train
from unsoft.lab.training.final_test import attention_figures
from unsoft.lab.training.model import build
from unsoft.lab.training.trainer import evaluation_batches

KEPT = Path(__file__).parents[1] / "docs" / "questions" / "models.json"
SEQUENCES, LENGTH = 16, 256
TRAINED = ("softmax", "cog")
SEEDS, LAYERS, STEPS = 3, 4, 200
TESTED, CHOSEN, DRAWS, STRONGEST = (8, 64), (4, 128), 4, 5
"""Sequences and tokens of each, of the text to measure losses on and of the text to choose heads by."""


FIELDS = ("rank", "decoded", "moved")
"""Measures of states at each depth."""


def read(tokenizer: Any, sequences: int, length: int, skip: int = 0) -> Tensor:
    """Return sequences of Python's language reference, after ``skip`` tokens of it."""
    count = sequences * length
    text = "\n\n".join(topics.values())[: 12 * (skip + count)]
    ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"][skip : skip + count]
    return torch.tensor(ids).view(sequences, length)


def states(name: str, every: int) -> dict[str, Any]:
    """Measure the states of a trained model, at every ``every``-th layer."""
    model, tokenizer = load_model(name)
    ids = read(tokenizer, SEQUENCES, LENGTH)
    with torch.no_grad():
        seen = [model(some, output_hidden_states=True).hidden_states for some in ids.split(2)]
    depths = sorted({*range(0, len(seen[0]), every), 1, len(seen[0]) - 1})
    measured = by_depth([torch.cat([part[depth] for part in seen]) for depth in depths])
    return {"sequences": SEQUENCES, "length": LENGTH, "depths": depths, "measured": measured}


def by_depth(states: list[Tensor] | tuple[Tensor, ...], folds: int = 4) -> list[dict[str, list[float]]]:
    """Measure rank, decodability and movement of states before the first layer and after each.

    States are (sequences, tokens, width). There is one number for each of ``folds`` parts of the sequences,
    which is held out in turn.

    >>> tokens = torch.randn(8, 32, 8, generator=torch.Generator().manual_seed(0))
    >>> start, noise = by_depth([tokens, torch.randn(8, 32, 8)])
    >>> min(start["decoded"]) > 0.9 > 0.1 > max(noise["decoded"]), min(noise["rank"]) > 0.9
    (True, True)
    """
    inputs = states[0].double()
    if len(inputs) < folds:
        raise ValueError(f"depths: {len(inputs)} sequences cannot be cut into {folds} parts")
    part = len(inputs) // folds
    measures: list[dict[str, list[float]]] = []
    for layer in states:
        rows: list[dict[str, Any]] = []
        for fold in range(folds):
            order = torch.arange(len(inputs)).roll(part * fold)  # the last are held out
            after, before = layer.double()[order], inputs[order]
            whole = measured(after, before, len(inputs) - part)
            rows.append(whole | {"moved": moved(after[-part:], before[-part:])})
        measures.append({field: [row[field] for row in rows] for field in FIELDS})
    return measures


def trained() -> dict[str, Any]:
    """Measure small networks before and after training on text, one row for each mechanism and seed."""
    rows = []
    for mechanism in TRAINED:
        for seed in range(SEEDS):
            spec = Spec(task="text", mechanism=mechanism, layers=LAYERS, steps=STEPS, seed=seed)
            filled = spec.filled()
            with tempfile.TemporaryDirectory() as folder:
                score = train(spec, folder).score
                networks = {"random": build(filled, spec.make_task()), "trained": load(f"{folder}/model")}
            inputs = evaluation_batches(spec.make_task(), filled.width, seed)[0]
            for kind, network in networks.items():
                first = {name: x[:32] for name, x in inputs.items() if name in ("input_ids", "inputs_embeds")}
                with torch.no_grad():
                    seen = network.eval()(**first, output_hidden_states=True).hidden_states
                row = {"mechanism": mechanism, "seed": seed, "network": kind, "measured": by_depth(seen)}
                rows.append(row | {"score": score if kind == "trained" else None})
    return {"task": "text", "layers": LAYERS, "steps": STEPS, "rows": rows}


def heads() -> dict[str, Any]:
    """Measure the loss of SmolLM2 without its deleting heads, without what they delete, and without other
    heads of the same layers.

    Heads are chosen on one part of the text and losses measured on another.
    """
    model, tokenizer = load_model("smollm2")
    deleting, others = _deleting(model, tokenizer)
    tokens = read(tokenizer, *TESTED, skip=CHOSEN[0] * CHOSEN[1])
    rows = [{"heads": "none", "part": "", "draw": 0, "losses": losses_without(model, tokens, []).tolist()}]
    chosen = [(layer, head) for layer, some in deleting.items() for head in some]
    for part in PARTS:
        rows.append(_row(model, tokens, "deleting", chosen, part, 0))
    for draw in range(DRAWS):
        pick = random.Random(draw)
        drawn = [
            (layer, head)
            for layer, some in deleting.items()
            for head in pick.sample(others[layer], min(len(some), len(others[layer])))
        ]
        for part in PARTS[:2]:
            rows.append(_row(model, tokens, "others", drawn, part, draw))
        print(f"others, draw {draw}", flush=True)
    return {"sequences": TESTED[0], "length": TESTED[1], "deleting": len(chosen), "rows": rows}


def alike() -> dict[str, Any]:
    """Measure how alike the heads of one layer are: the mean cosine between their attention patterns.

    The control is the same architecture untrained. There is one number for each sequence.
    """
    rows = []
    for name in ("smollm2", "minilm"):
        model, tokenizer = load_model(name)
        tokens = read(tokenizer, *TESTED)
        torch.manual_seed(0)
        for trained, network in ((True, model), (False, type(model)(model.config))):
            network.eval().set_attn_implementation("eager")  # fused attention returns no weights
            figures = [attention_figures(network, {"input_ids": one[None]}) for one in tokens]
            cosines = 1 - torch.tensor([one["head_diversity"] for one in figures])
            ends = {end: cosines[:, at].tolist() for end, at in (("first", 0), ("last", -1))}
            rows.append({"model": name, "trained": trained, **ends, "layers": cosines.mean(0).tolist()})
    return {"sequences": TESTED[0], "length": TESTED[1], "rows": rows}


def strongest() -> dict[str, Any]:
    """Measure the heads that delete most, one at a time."""
    model, tokenizer = load_model("smollm2")
    deleting = _inspected(model, tokenizer).ranked("deleting")[:STRONGEST]
    tokens = read(tokenizer, *TESTED, skip=CHOSEN[0] * CHOSEN[1])
    rows = [{"heads": "none", "part": "", "draw": 0, "losses": losses_without(model, tokens, []).tolist()}]
    for head in deleting:
        layer, number = head["layer"], head["head"]
        about = {"amount": head["deletion_amount"], "share": head["deletion_share"]}
        for part in PARTS:
            rows.append(_row(model, tokens, f"{layer}.{number}", [(layer, number)], part, 0) | about)
    return {"sequences": TESTED[0], "length": TESTED[1], "rows": rows}


def _row(
    model: Any, tokens: Tensor, name: str, chosen: list[tuple[int, int]], part: str, draw: int
) -> dict[str, Any]:
    losses = losses_without(model, tokens, chosen, part, seed=draw).tolist()
    return {"heads": name, "part": part, "draw": draw, "losses": losses}


def _inspected(model: Any, tokenizer: Any) -> Any:
    return inspect(model, read(tokenizer, *CHOSEN), batch_size=2)


def _deleting(model: Any, tokenizer: Any) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the heads in the role "deleting" by layer, and the other heads of these layers."""
    role = next(role for role in ROLES if role.name == "deleting")
    deleting: dict[int, list[int]] = {}
    others: dict[int, list[int]] = {}
    for head in _inspected(model, tokenizer).heads:
        side = deleting if head[role.measure] >= role.least else others
        side.setdefault(head["layer"], []).append(head["head"])
    return deleting, {layer: others.get(layer, []) for layer in deleting}


MEASURED: dict[str, Callable[[], dict[str, Any]]] = {
    "states-smollm2": partial(states, "smollm2", 6),
    "states-minilm": partial(states, "minilm", 1),
    "trained": trained,
    "heads": heads,
    "strongest": strongest,
    "alike": alike,
}


def main(parts: list[str]) -> None:
    """Measure the parts, and write each result as soon as it is complete."""
    for part in parts or list(MEASURED):
        result = MEASURED[part]() | {"machine": machine(), "written": datetime.now(UTC).isoformat()[:10]}
        if part == "alike":
            write_json(HEADS_OF_MODELS, result)
            continue
        results = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
        write_json(KEPT, results | {part: result})
        print(f"{KEPT}: {part}", flush=True)


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - MEASURED.keys()
    if unknown:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(MEASURED)}")
    main(sys.argv[1:])
