"""Tables and sentences about models for docs/generate/questions.py, from docs/questions/models.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from unsoft.lab.compare.sections.collapse import KEPT, MOVED
from unsoft.lab.evidence import Estimate, grade, t_interval
from unsoft.lab.report.page import number

STORED = Path(__file__).parents[1] / "questions" / "models.json"
FIELDS = ("rank", "decoded", "moved", "target")
LOST = 0.1
"""A share of the input below this counts as lost, a gain of the target above it as evolution."""
_RULE = (
    f"The word is by a rule written before the numbers: unmoved below {MOVED:g}, collapse if the rank has"
    f" fallen below {KEPT:g} of that of the inputs, evolution if {KEPT:g} or more of the input can be"
    f" decoded, or if {LOST:g} more of the target can be decoded than from the inputs, noise if less than"
    f" {LOST:g} of the input can."
)
_TITLES = ("rank", "input decoded", "moved", "target decoded", "")
SQUASHED = 1.25
"""Factor by which cog must keep the states of n and n + 1 repetitions further apart than softmax."""
USED, CLEAR, CHANCE, TAKEN = 0.01, 0.55, 0.52, -0.05
"""What an intervention must cost (nats, or relative change), the AUC of a head that carries information, the
most that its shuffled control may have, and the share of attention's output that an MLP which deletes takes
away."""


def word(rank: Estimate, decoded: Estimate, moved: Estimate, target: Estimate, target_before: float) -> str:
    """Return what has become of the input, by means: evolution, collapse, noise, or something between.

    ``target_before`` is the share of the target that can be decoded from the inputs.

    >>> cases = ((0.9, 0.7, 0.5, 0.1), (0.9, 0.01, 1.0, 0.1), (0.1, 0.3, 0.9, 0.1), (0.9, 0.3, 0.9, 0.4))
    >>> [word(*map(Estimate, values), target_before=0.1) for values in cases]
    ['evolution', 'noise', 'collapse', 'evolution']
    """
    if moved.value < MOVED:
        return "unmoved"
    if rank.value < KEPT:
        return "collapse"
    if decoded.value >= KEPT or target.value >= target_before + LOST:
        return "evolution"
    return "noise" if decoded.value < LOST else "between evolution and noise"


def stored() -> dict[str, Any]:
    """Return the stored measurements of experiments/real_models.py."""
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a table as lines of Markdown."""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    shown = (" | ".join(x if isinstance(x, str) else number(x) for x in row) for row in rows)
    return [*lines, *(f"| {row} |" for row in shown), ""]


def _made(part: str, record: dict[str, Any]) -> str:
    return f"`python experiments/real_models.py {part}`, {record['machine']}, {record['written']}."


def _cells(values: dict[str, list[float]], before: dict[str, list[float]]) -> list[str]:
    known = [t_interval(values[field]) for field in FIELDS]
    return [*map(str, known), word(*known, target_before=fmean(before["target"]))]


def states_of(kept: dict[str, Any], name: str) -> list[str]:
    """Return the section about a trained model by depth."""
    record = kept.get(f"states-{name}")
    if record is None:
        return []
    first = record["measured"][0]
    rows = [[str(d), *_cells(x, first)] for d, x in zip(record["depths"], record["measured"], strict=True)]
    text = (
        f"{record['sequences']} sequences of {record['length']} tokens of Python's language reference;"
        " effective rank of states of length 1 over that of the embeddings, share of the embeddings that a"
        " linear map finds in sequences it was not fitted to, 1 − squared cosine to the embeddings, and the"
        " share of the next token's embedding that a linear map finds (the target). Intervals"
        " over four parts of the text, held out in turn. The map to the target is fitted to few tokens for"
        " the width of the model, so a target of 0 is no evidence of absence."
        f" {_RULE} {_made(f'states-{name}', record)}"
    )
    return [f"## {name}", "", text, "", *table(("depth", *_TITLES), rows)]


def trained_of(kept: dict[str, Any]) -> list[str]:
    """Return the section about small networks before and after training, over seeds."""
    record = kept.get("trained")
    if record is None:
        return []
    rows = []
    for mechanism in dict.fromkeys(row["mechanism"] for row in record["rows"]):
        for network in ("random", "trained"):
            own = [r for r in record["rows"] if (r["mechanism"], r["network"]) == (mechanism, network)]
            by_depth = [
                {f: [fmean(row["measured"][depth][f]) for row in own] for f in FIELDS}
                for depth in range(len(own[0]["measured"]))
            ]
            for depth, seeds in enumerate(by_depth[1:], 1):
                rows.append([mechanism, network, str(depth), *_cells(seeds, by_depth[0])])
    seeds_used = len({row["seed"] for row in record["rows"]})
    text = (
        f"Networks of {record['layers']} layers, with skip connections and perceptrons, before and after"
        f" {record['steps']} steps of learning to predict text; the same measures, intervals over"
        f" {seeds_used} seeds. {_made('trained', record)}"
    )
    return [
        "## Small networks, trained",
        "",
        text,
        "",
        *table(("mechanism", "network", "depth", *_TITLES), rows),
    ]


def distances_of(kept: dict[str, Any]) -> list[str]:
    """Return the section about the premise of cosFormer, that near keys matter most."""
    record = kept["distances"]
    rows, met = [], []
    for name, pairs in record["models"].items():
        share, keys = (t_interval([pair[side] for pair in pairs]) for side in (0, 1))
        assert share.low is not None or share.value
        met.append((share.value if share.low is None else share.low) > max(0.5, 2 * keys.value))
        rows.append([name, str(share), str(keys)])
    text = (
        f"cosFormer assumes that neighbours matter most. Share of attention on keys at most {record['near']}"
        " positions away, without the first token, averaged over heads and layers, and the share of keys that"
        " are so near. Rule, written before the numbers: near keys get more than half of the attention and"
        f" more than twice their share of keys (95 % interval over sequences). **Verdict:"
        f" {grade(all(met), any(met))}.** {_made('distances', record)}"
    )
    return ["## Do neighbours matter most?", "", text, "", *table(("model", "attention", "keys"), rows)]


def squashing_verdict(kept: dict[str, Any]) -> tuple[str, dict[str, Estimate]]:
    """Return the verdict on over-squashing and the ratio of cog to softmax for random and trained networks.

    Rule, written before the numbers: at the largest n and after the last layer, the states of n and n + 1
    repetitions are at least ``SQUASHED`` times as far apart with cog as with softmax (95 % interval of the
    ratio, paired by seed): supported if in random and in trained networks, partly if in one of them.
    """
    ratios = {}
    for network in ("random", "trained"):
        apart = {
            (row["mechanism"], row["seed"]): math.log(row["squashed"][-1][-1])
            for row in kept["trained"]["rows"]
            if row["network"] == network
        }
        seeds = sorted(seed for mechanism, seed in apart if mechanism == "cog")
        gap = t_interval([apart["cog", seed] - apart["softmax", seed] for seed in seeds])
        assert gap.low is not None and gap.high is not None
        ratios[network] = Estimate(math.exp(gap.value), math.exp(gap.low), math.exp(gap.high))
    met = [ratio.low is not None and ratio.low > SQUASHED for ratio in ratios.values()]
    return str(grade(all(met), any(met))), ratios


def squashing_of(kept: dict[str, Any]) -> list[str]:
    """Return the section about over-squashing."""
    record = kept["trained"]
    verdict, ratios = squashing_verdict(kept)
    rows = []
    for mechanism in dict.fromkeys(row["mechanism"] for row in record["rows"]):
        for network in ratios:
            own = [r for r in record["rows"] if (r["mechanism"], r["network"]) == (mechanism, network)]
            apart = [
                str(t_interval([row["squashed"][k][-1] for row in own])) for k in range(len(record["ones"]))
            ]
            rows.append([mechanism, network, *apart])
    text = (
        "The last token's state after n repetitions of one token and after n + 1: distance over length, after"
        f" the last layer. Rule: cog keeps them {SQUASHED:g} times as far apart as softmax at n ="
        f" {record['ones'][-1]}. Cog over softmax: {ratios['random']} in random networks,"
        f" {ratios['trained']} in trained ones. **Verdict: {verdict}.** {_made('trained', record)}"
    )
    titles = ("mechanism", "network", *(f"n = {n}" for n in record["ones"]))
    return ["## Over-squashing", "", text, "", *table(titles, rows)]


def logits_of(kept: dict[str, Any]) -> list[str]:
    """Return the section about negative logits in pretrained models."""
    record = kept["signed-logits"]
    changes, properties = [], []
    for name, model in record["models"].items():
        unit = "nats" if name == "smollm2" else "relative change of states"
        for row in model["interventions"]:
            cost = t_interval(row["lost"])
            changes.append([name, row["change"], f"{cost} {unit}"])
        for row in model["probes"][:-1]:
            kind = "shuffled control" if row["shuffled"] else "heads"
            properties.append([name, row["property"], kind, str(t_interval(row["auc"]))])
    shares = "; ".join(
        f"{name}: {model['probes'][-1]['negative']:.0%} of logits are negative and get"
        f" {model['probes'][-1]['weight']:.0%} of the weight"
        for name, model in record["models"].items()
    )
    text = (
        f"{record['sequences']} sequences of {record['length']} tokens. {shares}. Logits are changed in all"
        " heads of all layers at once; making logits equal keeps their total weight. Intervals over"
        " sequences. Rule: a model uses the sizes of negative logits if making them equal costs more than"
        f" {USED:g}."
        f" `python -m experiments.signed_logits`, {record['machine']}, {record['written']}."
    )
    lines = ["## Negative logits of pretrained models", "", text, ""]
    lines += table(("model", "change", "cost (↓)"), changes)
    text = (
        "The size of a negative logit, among negative logits only, as a predictor of a property of the key in"
        " sequences from which its direction was not chosen: mean AUC over heads (0.5 is chance). Rule: it"
        f" carries information if the mean is above {CLEAR:g} and the shuffled control below {CHANCE:g}."
    )
    return [*lines, text, "", *table(("model", "property", "", "AUC (↑)"), properties)]


def _deleting_layers(model: dict[str, Any]) -> tuple[int, int, Estimate, Estimate]:
    """Return how many MLPs delete, the strongest layer, its projection and the difference to the control."""
    layers = []
    for layer in range(model["layers"]):
        own, control = ([part[side][layer] for part in model["deleted"]] for side in (0, 1))
        layers.append((t_interval(own), t_interval([a - b for a, b in zip(own, control, strict=True)])))
    deleting = sum(
        own.high is not None and own.high < TAKEN and gap.high is not None and gap.high < 0
        for own, gap in layers
    )
    strongest = min(range(len(layers)), key=lambda layer: layers[layer][0].value)
    return deleting, strongest, *layers[strongest]


def mlp_counts(kept: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return, for each model, how many MLPs delete what attention wrote, and how many there are."""
    models = kept["mlp"]["models"]
    return {name: (_deleting_layers(model)[0], model["layers"]) for name, model in models.items()}


def mlp_sentence(kept: dict[str, Any]) -> str:
    """Return how many MLPs of each model delete what attention wrote."""
    counts = [f"{count} of {total} in {name}" for name, (count, total) in mlp_counts(kept).items()]
    return f"the output of {' and '.join(counts)} points against what attention wrote in the same layer."


def mlp_of(kept: dict[str, Any]) -> list[str]:
    """Return the section about deletion by MLPs."""
    record = kept["mlp"]
    rows = []
    for name, model in record["models"].items():
        deleting, strongest, own, gap = _deleting_layers(model)
        rows.append([name, f"{deleting} of {model['layers']}", str(strongest), str(own), str(gap)])
    text = (
        "Projection of the MLP's output onto what attention wrote at the same token of the same layer, median"
        " over tokens: −1 would delete all of it. The control takes attention's output at another token. An"
        f" MLP counts as deleting if the projection is below {TAKEN:g} and below the control (95 % intervals"
        f" over sequences). {_made('mlp', record)}"
    )
    titles = ("model", "layers whose MLP deletes", "strongest layer", "projection there", "minus control")
    return ["## Deletion by MLPs", "", text, "", *table(titles, rows)]


def heads_of(kept: dict[str, Any]) -> list[str]:
    """Return the section about ablating the deleting heads of SmolLM2, together and one at a time."""
    lines: list[str] = []
    if (record := kept.get("heads")) is not None:
        more = {
            (heads, part): _increase(record["rows"], heads, part)
            for heads, part in dict.fromkeys(
                (row["heads"], row["part"]) for row in record["rows"] if row["part"]
            )
        }
        rows = [[heads, part, str(t_interval(gains))] for (heads, part), gains in more.items()]
        draws = len({row["draw"] for row in record["rows"] if row["heads"] == "others"})
        text = (
            f"SmolLM2-135M has {record['deleting']} heads that remove at least half of what they move, found"
            f" on another part of the text. The loss, in nats, that it gains on {record['sequences']}"
            f" sequences of {record['length']} tokens when something is taken from all of them at once: the"
            " whole head; only that part of its values which points against the source; as much along the"
            " directions of other sources, the control. Others: other heads of the same layers, as many or"
            f" all there are, {draws} random draws. Intervals over sequences. {_made('heads', record)}"
        )
        lines += ["## Deleting heads of SmolLM2, ablated", "", text, ""]
        lines += table(("heads", "taken away", "loss gained"), rows)
        lines += [_compared(more), ""]
    if (record := kept.get("strongest")) is not None:
        rows = []
        for heads in dict.fromkeys(row["heads"] for row in record["rows"] if row["part"]):
            own = {row["part"]: row for row in record["rows"] if row["heads"] == heads}
            gains = [str(t_interval(_increase(record["rows"], heads, part))) for part in own]
            rows.append([heads, next(iter(own.values()))["amount"], *gains])
        titles = ("layer.head", "multiples of a source removed per row", *own)
        lines += [
            f"The heads that delete most, one at a time. {_made('strongest', record)}",
            "",
            *table(titles, rows),
        ]
    return lines


def _increase(rows: Sequence[dict[str, Any]], heads: str, part: str) -> list[float]:
    """Return the increase in loss of each sequence, averaged over draws."""
    plain = next(row["losses"] for row in rows if row["heads"] == "none")
    own = [row["losses"] for row in rows if (row["heads"], row["part"]) == (heads, part)]
    return [fmean(draw[k] for draw in own) - before for k, before in enumerate(plain)]


def _compared(more: dict[tuple[str, str], list[float]]) -> str:
    """Compare deleting heads with others, and their deletion with controls, paired over sequences."""
    pairs = (
        ("Taking the deleting heads costs", ("deleting", "head"), "taking others", ("others", "head")),
        (
            "Taking what they delete costs",
            ("deleting", "deletion"),
            "as much elsewhere",
            ("deleting", "as much elsewhere"),
        ),
        (
            "Taking what they delete costs",
            ("deleting", "deletion"),
            "what others delete",
            ("others", "deletion"),
        ),
    )
    sentences = []
    for what, one, other, two in pairs:
        gap = t_interval([a - b for a, b in zip(more[one], more[two], strict=True)])
        sentences.append(f"{what} {_word(gap)} than {other}: difference {gap} nats.")
    return " ".join(sentences)


def _word(gap: Estimate) -> str:
    if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        return "not clearly more or less"
    return "more" if gap.low > 0 else "less"
