"""Tables and sentences about models for docs/generate/questions.py, from docs/questions/models.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from unsoft.lab.compare.sections.collapse import KEPT, MOVED
from unsoft.lab.evidence import Estimate, t_interval
from unsoft.lab.report.page import number

STORED = Path(__file__).parents[1] / "questions" / "models.json"
FIELDS = ("rank", "decoded", "moved")
LOST = 0.1
"""A share of the input below this counts as lost."""
_RULE = (
    f"The word is by a rule written before the numbers: unmoved below {MOVED:g}, collapse if the rank has"
    f" fallen below {KEPT:g} of that of the inputs, noise if less than {LOST:g} of the input can be decoded,"
    f" evolution if {KEPT:g} and more can."
)
_TITLES = ("rank", "input decoded", "moved", "")


def word(rank: Estimate, decoded: Estimate, moved: Estimate) -> str:
    """Return what has become of the input, by means: evolution, collapse, noise, or something between.

    >>> [word(*map(Estimate, values)) for values in ((0.9, 0.7, 0.5), (0.9, 0.01, 1.0), (0.1, 0.3, 0.9))]
    ['evolution', 'noise', 'collapse']
    """
    if moved.value < MOVED:
        return "unmoved"
    if rank.value < KEPT:
        return "collapse"
    if decoded.value < LOST:
        return "noise"
    return "evolution" if decoded.value >= KEPT else "between evolution and noise"


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


def _cells(values: dict[str, list[float]]) -> list[str]:
    known = [t_interval(values[field]) for field in FIELDS]
    return [*map(str, known), word(*known)]


def states_of(kept: dict[str, Any], name: str) -> list[str]:
    """Return the section about a trained model by depth."""
    record = kept.get(f"states-{name}")
    if record is None:
        return []
    rows = [[str(d), *_cells(x)] for d, x in zip(record["depths"], record["measured"], strict=True)]
    text = (
        f"{record['sequences']} sequences of {record['length']} tokens of Python's language reference;"
        " effective rank of states of length 1 over that of the embeddings, share of the embeddings that a"
        " linear map finds in sequences it was not fitted to, 1 − squared cosine to the embeddings. Intervals"
        f" over four parts of the text, held out in turn. {_RULE} {_made(f'states-{name}', record)}"
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
            for depth in range(1, len(own[0]["measured"])):
                seeds = {f: [fmean(row["measured"][depth][f]) for row in own] for f in FIELDS}
                rows.append([mechanism, network, str(depth), *_cells(seeds)])
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
