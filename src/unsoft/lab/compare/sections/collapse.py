"""Collapse by depth: rank, decodability and movement of tokens in stacked layers.

Random networks, 48 tokens; queries and keys have the same map, so that each token is its own best match.
Evolution: the input can be decoded and tokens have moved. Collapse: the rank falls. Noise: the rank stays and
nothing can be decoded. With skip connections what a layer adds to a token has the same length for every
mechanism.
"""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unsoft import measure
from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Job, Results, RowIterator, Rows, matching, mean_of, record_job
from unsoft.lab.compare.section import DEEP, DEPTH, SURVEY, Finding, Request, Section, job
from unsoft.lab.evidence import grade, t_interval
from unsoft.lab.records import PACKAGED
from unsoft.lab.report.figure import ChartControl
from unsoft.measure.rows import unit_rows

NOISE, ALIKE, MODELS = "collapse of noise", "heads with independent maps", "heads of trained models"
HEADS_OF_MODELS = PACKAGED.with_name("heads.json")
"""Written by ``python experiments/real_models.py alike``."""
SEQUENCES, TRAIN, TOKENS, HEADS, HEAD = 16, 12, 48, 4, 16
WIDTH = HEADS * HEAD
KEPT, MOVED = 0.5, 0.1
"""A rank, or a share of the input, counts as kept from a half on; states count as moved from a tenth on."""


_CONTROL = ChartControl("skip", "Skip connections", [(0, "without"), (1, "with")], 1)
_ASKED = "Do representations collapse with depth?"
SECTION = Section(order=40, group=DEEP, question=_ASKED, about=__doc__, controls=[_CONTROL])


@SECTION.each(lambda level: level.depth * level.seeds * 0.04, "softmax", "cog")
def collapse(candidate: HasWeights, depth: int, seeds: int) -> RowIterator:
    """Measure states after each layer of each random network, without and with skip connections."""
    for skip, seed in itertools.product((False, True), range(seeds)):
        for layer, row in enumerate(stack(candidate, depth, skip, seed)):
            yield {"skip": skip, "seed": seed, "depth": layer} | row


@SECTION.facts
def _facts(request: Request) -> list[Job]:
    sizes: dict[str, Any] = {"depth": request.level.depth, "seeds": request.level.seeds}
    noise = job(NOISE, None, partial(collapse, Noise()), 1.0, **sizes)
    return [noise, record_job(MODELS, [HEADS_OF_MODELS], model_heads)]


@SECTION.fact(1.0, name=ALIKE)
def independent_heads(depth: int, seeds: int) -> RowIterator:
    """Measure how alike softmax heads are by depth if queries and keys have independent maps."""
    for seed in range(seeds):
        rows = stack(Candidate("softmax", "softmax"), depth, False, seed, shared=False)
        for layer, row in enumerate(rows[1:], 1):
            yield {"seed": seed, "depth": layer, "alike": row["alike"]}


def model_heads() -> Rows:
    """Return how alike the heads of trained models are, layer by layer, from the record in the package."""
    rows: Rows = json.loads(HEADS_OF_MODELS.read_text())["rows"]
    return rows


class HasWeights(Protocol):
    """A mechanism or a negative control."""

    def weights(self, query: Tensor, key: Tensor, *, is_causal: bool = False) -> Tensor:
        """Return weights (batch, queries, keys)."""


class Noise:
    """The negative control of every measure of states: weights independent of queries and keys."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def weights(self, query: Tensor, key: Tensor, *, is_causal: bool = False) -> Tensor:
        weights = torch.randn(len(query), query.shape[1], key.shape[1], generator=self._generator)
        return weights.tril() if is_causal else weights


def stack(candidate: HasWeights, depth: int, skip: bool, seed: int, *, shared: bool = True) -> Rows:
    """Measure the states before the first layer and after each.

    ``shared``: queries and keys have the same map. With two maps no mechanism has a reason to look at the
    token itself, and all forget it in the first layer. Without skip connections values are the states
    themselves, so that only the mixing is measured. With them values and outputs have random maps.
    """
    normal = normals(100 + seed, torch.float32)
    states = inputs = normal(SEQUENCES, TOKENS, WIDTH)
    length = math.sqrt(2 / depth)  # so that noise leaves (1 + 2/depth)^-depth, about e^-2, whatever the depth
    rows = [measured(states, inputs)]
    for _ in range(depth):
        maps = normal(3, WIDTH, WIDTH) / math.sqrt(WIDTH)
        query = _split_heads(states @ maps[0])
        key = query if shared else _split_heads(states @ maps[1])
        value = _split_heads(states @ maps[1] if skip else states)
        weights = candidate.weights(query, key, is_causal=True).to(states.dtype)
        out = (weights @ value).view(SEQUENCES, HEADS, TOKENS, HEAD).transpose(1, 2).flatten(2)
        if skip:
            out = states + length * states.norm(dim=-1, keepdim=True) * unit_rows(out @ maps[2])
        # Rescaling the whole keeps it from underflow and overflow without changing any measure.
        states = out / out.square().mean().sqrt().clamp(min=1e-30)
        rows.append(measured(states, inputs) | {"alike": float(heads_alike(weights))})
    return rows


def _split_heads(x: Tensor) -> Tensor:
    """Return (sequences * heads, tokens, head)."""
    return x.view(*x.shape[:-1], HEADS, HEAD).transpose(1, 2).flatten(0, 1)


def heads_alike(weights: Tensor) -> Tensor:
    """Return the mean cosine between the patterns of different heads."""
    similar: Tensor = measure.head_similarity(weights.view(SEQUENCES, HEADS, *weights.shape[1:]))
    others = similar.sum((-2, -1)) - similar.diagonal(dim1=-2, dim2=-1).sum(-1)
    return others.mean() / (HEADS * (HEADS - 1))


def measured(states: Tensor, inputs: Tensor, train: int = TRAIN) -> dict[str, Any]:
    """Measure rank, recovery, decodability and movement of states.

    They are the effective rank over that of the inputs, the share of tokens identified by their input, the
    share of the input that a linear map decodes, and how far differences between tokens have moved from
    those of the inputs. Maps are fitted to the first ``train`` sequences.
    """
    late = states[train:], inputs[train:]  # some sequences are enough for measures of single sequences
    ranks = [float(measure.effective_rank(unit_rows(x)).mean()) for x in late]
    return {
        "rank": ranks[0] / ranks[1],
        "recovery": float(measure.recovery(*late).mean()),
        "decoded": float(measure.decodability(states, inputs, train)),
        "moved": moved(states, inputs),
    }


def moved(states: Tensor, inputs: Tensor) -> float:
    """Return 1 - squared cosine between differences of tokens and those of the inputs."""
    left, first = (x - x.mean(-2, keepdim=True) for x in (states, inputs))
    sizes = float(left.square().sum() * first.square().sum())
    return 1 - float((left * first).sum()) ** 2 / sizes if sizes > 0 else 1.0


_TITLES = {
    "rank": "Effective rank",
    "decoded": "What of the input can be decoded",
    "moved": "How far tokens have moved",
    "recovery": "Tokens that can be identified by their input",
}
_NOTES = {
    "rank": "Of the states, each with length 1, over that of the inputs. Noise has a high rank too.",
    "decoded": "By a linear map, in sequences it was not fitted to. Noise: 0.",
    "moved": "1 − squared cosine between the states and the inputs, means removed. 0: nothing happened.",
    "recovery": f"1: all; chance is 1/{TOKENS}.",
}
for _field, _title in _TITLES.items():
    _options: dict[str, Any] = {"note": _NOTES[_field], "dots": [], "choose": {"skip": 1}}
    # With skip connections recovery stays near 1.
    _options["y_domain"] = None if _field == "recovery" else [0, 1]
    SECTION.lines(
        f"collapse-{_field}", _title, x=("depth", "layers"), y=(_field, _title.lower()), **_options
    )(lambda results: _means(results.each("collapse")))


def _means(rows: Rows) -> Rows:
    """Average over networks."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault((row["mechanism"], int(row["skip"]), row["depth"]), []).append(row)
    return [
        {"mechanism": label, "skip": skip, "depth": depth}
        | {field: sum(row[field] for row in group) / len(group) for field in _TITLES}
        for (label, skip, depth), group in groups.items()
    ]


def layers_kept(rows: Rows) -> list[float]:
    """Return the layers of attention alone after which rank or decodability has fallen to a half, by network.

    Between layers both are interpolated linearly.
    """
    layers = []
    for seed in sorted({row["seed"] for row in rows}):
        kept = [min(row["rank"], row["decoded"]) for row in matching(rows, skip=False, seed=seed)]
        at = next((k for k, x in enumerate(kept) if x < KEPT), None)
        if at is None:
            layers.append(float(len(kept) - 1))
        else:
            layers.append(at - 1 + (kept[at - 1] - KEPT) / (kept[at - 1] - kept[at]) if at else 0.0)
    return layers


def evolved(rows: Rows, noise: Rows) -> list[float]:
    """Return the share of the input decoded after the last layer with skip connections, beyond noise.

    0 is what noise of the same length leaves, 1 everything. A network that has not moved differences between
    tokens gets 0: one that adds nothing, or the same to all tokens, has kept nothing alive.
    """
    if not rows or not noise:
        return []
    last = max(row["depth"] for row in rows)
    floor = {row["seed"]: row["decoded"] for row in matching(noise, skip=True, depth=last)}
    shares = []
    for row in matching(rows, skip=True, depth=last):
        beyond = (row["decoded"] - floor[row["seed"]]) / (1 - floor[row["seed"]])
        shares.append(max(beyond, 0.0) if row["moved"] >= MOVED else 0.0)
    return shares


@SECTION.column(
    "rank",
    "rank kept",
    yes=2.0,
    partly=1.0,
    possible=(0.0, math.inf),
    margin=0.1,
    noise=1e-3,
    unit="layers",
    group=DEPTH,
    need="keep the rank in deep stacks",
)
def _layers(results: Results, label: str) -> list[float]:
    """Layers of attention alone that leave half of the effective rank and half of what can be decoded of the
    input.

    Yes from two layers, partly from one; below that it is lost within the first, as with random weights,
    weights of 0 and a state in which all tokens are one. A scaled softmax gets what softmax gets.
    """
    return layers_kept(results.get("collapse", label))


@SECTION.column(
    "identity",
    "input kept",
    yes=0.4,
    partly=0.1,
    possible=(0.0, 1.0),
    margin=0.02,
    noise=1e-3,
    unit="share",
    group=DEPTH,
    need="keep tokens distinguishable",
)
def _evolved(results: Results, label: str) -> list[float]:
    """Share of the input that can be decoded after the last layer with skip connections, beyond what noise of
    the same length leaves.

    0 is noise; what adds nothing, or the same to all tokens, gets 0 too. A map that looks at nothing but the
    token itself gets about 0.8: yes from half of that, partly from 0.1.
    """
    return evolved(results.get("collapse", label), results.get(NOISE))


@SECTION.experiment(SURVEY, "Cog's representations are more robust against collapse.")
def _cog_robust(results: Results) -> Finding:
    """Random networks, interval over seeds: supported if cog keeps half of rank and input for more layers
    than softmax, and more of the input with skip connections, interval against interval; partly if one of
    the two.

    Refuted: Neither interval lies above softmax's.
    """
    rows, noise = ({x: results.rows("collapse", x) for x in ("cog", "softmax")}, results.rows(NOISE))
    kept = {name: t_interval(layers_kept(own)) for name, own in rows.items()}
    alive = {name: t_interval(evolved(own, noise)) for name, own in rows.items()}
    # One seed has no interval, and decides nothing.
    better = [one["cog"].low is not None and one["cog"].low > one["softmax"].upper for one in (kept, alive)]
    return grade(all(better), any(better)), (
        f"half of rank and input is kept for {kept['cog']} layers of cog and {kept['softmax']} of softmax;"
        f" with skip connections {alive['cog']} and {alive['softmax']} of the input can be decoded beyond"
        " noise"
    )


@SECTION.experiment(SURVEY, "Heads collapse into one another: several heads attend to the same.")
def _head_collapse(results: Results) -> Finding:
    """Mean cosine between the patterns of softmax heads of one layer: supported if in the last layer it
    exceeds 0.9 in random networks with independent maps for queries and keys, by the lower end of the
    interval over seeds, and in both trained models, by that over sequences; partly if in one of the two
    kinds. Networks in which queries and keys share a map, where heads start alike, are reported, not judged.

    Refuted: The cosine is 0.9 or less in the last layer of both kinds of networks.
    """
    rows = results.rows(ALIKE)
    ends = [min(row["depth"] for row in rows), max(row["depth"] for row in rows)]
    random = [mean_of(rows, "alike", depth=depth) for depth in ends]
    start, end = (mean_of(results.rows("collapse", "softmax", skip=False, depth=x), "alike") for x in ends)
    models = results.rows(MODELS)
    last = {row["model"]: t_interval(row["last"]) for row in models if row["trained"]}
    collapsed = [random[1].lower > 0.9, all(one.lower > 0.9 for one in last.values())]
    trained = "; ".join(
        f"{row['model']} {'trained' if row['trained'] else 'untrained'}"
        f" {t_interval(row['first']).value:.2f} → {t_interval(row['last'])}"
        for row in models
    )
    return grade(all(collapsed), any(collapsed)), (
        "mean cosine between the patterns of softmax heads in the first and in the last layer: random"
        f" networks with independent maps {random[0].value:.2f} → {random[1]}, with a shared map"
        f" {start.value:.2f} → {end}; {trained} (a record)"
    )
