"""Measure models for docs/questions: ``python experiments/real_models.py [PART ...]``.

The parts are states-smollm2, states-minilm, trained, heads, strongest, alike, mlp, distances; by default
all. Each takes
minutes of one core. Results are written to docs/questions/models.json, from which docs/generate/questions.py
generates its pages; those of alike to src/unsoft/lab/records/heads.json, which the section collapse reads.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from unsoft.checks import one_of
from unsoft.files import write_json
from unsoft.hf import load, load_model
from unsoft.lab.bench.machine import machine
from unsoft.lab.compare.sections.collapse import HEADS_OF_MODELS, measured, moved
from unsoft.lab.interpret import inspect
from unsoft.lab.interpret.inspection.ablation import Head, losses
from unsoft.lab.interpret.inspection.observe import find_layout, observe
from unsoft.lab.interpret.inspection.result import ROLES
from unsoft.lab.interpret.inspection.sequence import AttentionCall, sequences
from unsoft.lab.interpret.models import batches, evaluating, single_stack
from unsoft.lab.training import Spec, train
from unsoft.lab.training.model import build
from unsoft.lab.training.run import attention_figures
from unsoft.lab.training.trainer import evaluation_batches
from unsoft.measure import decodability
from unsoft.measure.rows import ratio

PARTS = ("head", "deletion", "as much elsewhere")
"""Parts of a head that are removed; see :func:`losses_without`."""
KEPT = Path(__file__).parents[1] / "docs" / "questions" / "models.json"
SEQUENCES, LENGTH = 16, 256
TRAINED = ("softmax", "cog")
SEEDS, LAYERS, STEPS = 5, 4, 600
ONES = (25, 50, 100, 200, 400, 800)
"""Repetitions of a token whose last states are compared with those of one repetition more."""
PROMPTS, PROMPT = 8, 16
NEAR = 8
"""Keys at most so many positions away are near."""
TESTED, CHOSEN, DRAWS, STRONGEST = (8, 64), (4, 128), 4, 5
"""Sequences and tokens of each, of the text to measure losses on and of the text to choose heads by."""


FIELDS = ("rank", "decoded", "moved", "target")
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
    which is held out in turn. ``target`` is the share of the embedding of the next token that can be decoded.

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
            target = float(decodability(after[:, :-1], before[:, 1:], len(inputs) - part))
            rows.append(whole | {"moved": moved(after[-part:], before[-part:]), "target": target})
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
            inputs = evaluation_batches(spec.make_task(), filled.width)[0]
            for kind, network in networks.items():
                first = {name: x[:32] for name, x in inputs.items() if name in ("input_ids", "inputs_embeds")}
                with torch.no_grad():
                    seen = network.eval()(**first, output_hidden_states=True).hidden_states
                row = {"mechanism": mechanism, "seed": seed, "network": kind, "measured": by_depth(seen)}
                row |= {"squashed": squashed(network, first["input_ids"][:PROMPTS, :PROMPT])}
                rows.append(row | {"score": score if kind == "trained" else None})
            print(f"{mechanism}, seed {seed}: {score:.3f}", flush=True)
    return {"task": "text", "layers": LAYERS, "steps": STEPS, "ones": ONES, "rows": rows}


def squashed(model: torch.nn.Module, prompts: Tensor) -> list[list[float]]:
    """Return how far the last token's states are apart after n and n + 1 repetitions of one token.

    This is the over-squashing measure of Barbero et al. 2024 that Cog's authors use, for each n of ``ONES``
    and each depth: |x - y| / |x|, averaged over ``prompts`` (prompts, tokens). The last token of a prompt is
    the one that is repeated.
    """
    rows = []
    for count in ONES:
        lasts = []
        for more in (0, 1):
            ones = prompts[:, -1:].expand(-1, count + more)
            with torch.no_grad():
                states = model(torch.cat([prompts, ones], 1), output_hidden_states=True).hidden_states
            lasts.append(torch.stack([layer[:, -1] for layer in states]).double())
        apart = (lasts[0] - lasts[1]).norm(dim=-1) / lasts[0].norm(dim=-1)
        rows.append(apart.mean(-1).tolist())
    return rows


def mlp() -> dict[str, Any]:
    """Measure how much of what attention wrote at a token the MLP of the same layer takes away again.

    With a the output of attention and m that of the MLP, it is (m . a) / |a|^2 of each token: -1 if the MLP
    deletes all of it. The control takes a of another token of the same sequence. There is one number for each
    layer and sequence.
    """
    results: dict[str, Any] = {}
    for name, attention, perceptron in (
        ("smollm2", "self_attn.o_proj", "mlp.down_proj"),
        ("minilm", "attention.output.dense", r"layer.\d+.output.dense"),
    ):
        model, tokenizer = load_model(name)
        tokens = read(tokenizer, *TESTED)
        written: list[list[Tensor]] = [[], []]
        modules = [
            [module for key, module in model.named_modules() if re.search(rf"{ending}$", key)]
            for ending in (attention, perceptron)
        ]
        modules[1] = [module for module in modules[1] if module not in modules[0]]
        hooks = [
            module.register_forward_hook(lambda module, x, out, kept=kept: kept.append(out))
            for kept, some in zip(written, modules, strict=True)
            for module in some
        ]
        rows = []
        with evaluating(model), torch.no_grad():
            for one in tokens:
                for side in written:
                    side.clear()
                model(one[None])
                a, m = (torch.stack(side)[:, 0].double() for side in written)
                shuffled = a[:, torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(0))]
                share = [ratio((m * x).sum(-1), x.square().sum(-1)) for x in (a, shuffled)]
                # Medians: at a few tokens, above all the first, attention writes next to nothing.
                rows.append([x.median(-1).values.tolist() for x in share])
        for hook in hooks:
            hook.remove()
        results[name] = {"layers": len(modules[0]), "deleted": rows}
    return {"sequences": TESTED[0], "length": TESTED[1], "models": results}


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


def distances() -> dict[str, Any]:
    """Measure how much attention goes to near keys, without the first token, and how many keys are near.

    Near keys are at most ``NEAR`` positions away. Rows with fewer than ``4 * NEAR`` keys are left out.
    """
    results: dict[str, Any] = {}
    for name in ("smollm2", "minilm"):
        model, tokenizer = load_model(name)
        model.set_attn_implementation("eager")
        rows = []
        with evaluating(model), torch.no_grad():
            for one in read(tokenizer, *TESTED):
                layers = torch.stack(model(one[None], output_attentions=True).attentions)[:, 0]
                position = torch.arange(len(one))
                near = (position[:, None] - position).abs() <= NEAR
                visible = layers[0, 0] > 0
                visible[:, 0] = near[:, 0] = False
                kept = visible.sum(-1) >= 4 * NEAR
                weights = (layers * visible)[:, :, kept]
                share = ratio((weights * near[kept]).sum(-1), weights.sum(-1)).mean()
                keys = ((near & visible).sum(-1) / visible.sum(-1))[kept].mean()
                rows.append([float(share), float(keys)])
        results[name] = rows
    return {"sequences": TESTED[0], "length": TESTED[1], "near": NEAR, "models": results}


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


def losses_without(
    model: torch.nn.Module,
    tokens: Tensor,
    heads: Collection[Head],
    part: str = "head",
    *,
    seed: int = 0,
    batch_size: int = 4,
) -> Tensor:
    """Return the mean loss (nats) of each sequence (sequences,) of ``tokens`` (sequences, length) while a
    part of ``heads`` is removed; heads are pairs of layer and head as in
    :func:`unsoft.lab.interpret.inspect`.

        head                   the whole output
        deletion               the part of each source's value that points against the source:
                               v - min(v.u, 0) u / |u|^2, with u = W_O r, r the residual stream of the source.
                               The rest of the head, and everything it adds, stays.
        as much elsewhere      the control: vectors of the same lengths along the u of other sources, drawn
                               with ``seed``

    The model itself is not changed.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(50, (3, 20))
    >>> whole = losses_without(model, tokens, [])
    >>> bool((losses_without(model, tokens, [(0, 1), (1, 3)]) != whole).all())
    True
    """
    model = single_stack(model)
    one_of("losses_without", "part", part, PARTS)
    with evaluating(model):
        parts = batches(tokens, None, batch_size, tokens.shape[1], model.device)
        layout = find_layout(model, parts[0])
        by_layer: dict[int, list[int]] = defaultdict(list)
        for layer, head in sorted(set(heads)):
            if layer not in layout.layers or not 0 <= head < layout.layers[layer].heads:
                raise ValueError(
                    f"losses_without: argument 'heads' has ({layer}, {head}); the model has no such head"
                )
            if part != "head" and layout.layers[layer].out_proj is None:
                raise ValueError(
                    f"losses_without: layer {layer} has no output projection, so what it deletes is unknown"
                )
            by_layer[layer].append(head)
        generator = torch.Generator().manual_seed(seed)

        def remove(call: AttentionCall) -> None:
            """Change the output of the call in place, which other observers must not do."""
            if not (chosen := by_layer.get(call.number)):
                return
            if part == "head":
                call.output[:, :, chosen] = 0
                return
            out_proj = layout.layers[call.number].out_proj
            assert out_proj is not None
            for item, sequence in enumerate(sequences(call, [slice(None)] * len(call.query))):
                assert sequence.states is not None
                value = sequence.values_by_head()[chosen]
                towards = sequence.states @ out_proj[chosen].to(value.dtype).mT
                taken = deleting_part(value, towards)
                if part != "deletion":
                    other = towards[:, torch.randperm(towards.shape[1], generator=generator)]
                    taken = other * ratio(taken.norm(dim=-1, keepdim=True), other.norm(dim=-1, keepdim=True))
                change = (sequence.whole()[chosen] @ taken).transpose(0, 1)
                call.output[item, :, chosen] -= change.to(call.output.dtype)

        with observe(model, remove, layout.blocks):
            return losses(model, parts)


def deleting_part(value: Tensor, towards: Tensor) -> Tensor:
    """Return the part of each value (..., sources, dim) that points against its source, ``towards``.

    >>> value, towards = torch.tensor([[1.0, 2.0], [-3.0, 2.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    >>> deleting_part(value, towards)
    tensor([[ 0.,  0.],
            [-3., -0.]])
    """
    along = (value * towards).sum(-1, keepdim=True).clamp(max=0)
    return ratio(along, towards.square().sum(-1, keepdim=True)) * towards


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
    "mlp": mlp,
    "distances": distances,
}


def main(parts: list[str]) -> None:
    """Measure the parts, and write each result as soon as it is complete."""
    for part in parts or list(MEASURED):
        result = MEASURED[part]() | {"machine": machine(), "written": datetime.now(UTC).isoformat()[:10]}
        if part == "alike":
            write_json(HEADS_OF_MODELS, result)
            continue
        update(part, result)
        print(f"{KEPT}: {part}", flush=True)


def update(part: str, result: dict[str, Any]) -> None:
    """Replace one part of the stored results."""
    results = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    write_json(KEPT, results | {part: result})


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - MEASURED.keys()
    if unknown:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(MEASURED)}")
    main(sys.argv[1:])
