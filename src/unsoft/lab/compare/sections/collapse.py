"""Do tokens become the same, drown in noise, or evolve? Rank, decodability and movement by depth."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from unsoft.lab.compare.claim import EXPERIMENT, SURVEY, Claim, Finding
from unsoft.lab.compare.column import Column
from unsoft.lab.compare.jobs import Job, Missing, Results
from unsoft.lab.compare.level import Level
from unsoft.lab.compare.section import Request, Section, job
from unsoft.lab.compare.stack import TOKENS, Noise, Weighs, stack
from unsoft.lab.evidence import Estimate, grade, t_interval
from unsoft.lab.report.control import Control
from unsoft.lab.report.figure import Figure, by_mechanism

HALF, MOVED = 0.5, 0.1
NOISE = "collapse of noise"


def jobs(request: Request) -> list[Job]:
    level = request.level
    seconds = level.depth * level.seeds * 0.04
    return [job("collapse", s, partial(collapse, s, level), seconds, _sizes(level)) for s in request.everyone]


def facts(level: Level) -> list[Job]:
    return [job(NOISE, None, partial(collapse, Noise(), level), 1.0, _sizes(level))]


def _sizes(level: Level) -> dict[str, Any]:
    return {"depth": level.depth, "seeds": level.seeds}


def collapse(subject: Weighs, level: Level) -> list[dict[str, Any]]:
    """Every measure after each layer, for each random network, without and with skip connections."""
    return [
        {"skip": skip, "seed": seed, "depth": depth} | row
        for skip in (False, True)
        for seed in range(level.seeds)
        for depth, row in enumerate(stack(subject, level.depth, skip, seed))
    ]


def figures(results: Results) -> Iterator[Figure]:
    rows = _means(results.each("collapse"))
    if not rows:
        return
    for field, title, note in (
        (
            "rank",
            "Effective rank",
            "Of the states, each with length 1, over that of the inputs. Noise has a high rank too.",
        ),
        (
            "decoded",
            "What of the input can be decoded",
            "By a linear map, in sequences it was not fitted to. Noise: 0.",
        ),
        (
            "moved",
            "How far tokens have moved",
            "1 − squared cosine between the states and the inputs, means removed. 0: nothing happened.",
        ),
        ("recovery", "Tokens that can be told by their input", f"1: all; at the bottom 1/{TOKENS}, chance."),
    ):
        chart = by_mechanism(
            results.labels,
            rows,
            "depth",
            field,
            x_title="layers",
            y_title=title.lower(),
            dots=[],
            choose={"skip": 1},
            y_domain=[0, 1],
        )
        yield Figure(f"collapse-{field}", title, note, rows, chart)


def _means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over networks."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["mechanism"], int(row["skip"]), row["depth"]), []).append(row)
    fields = ("rank", "decoded", "moved", "recovery", "residual")
    return [
        {"mechanism": label, "skip": skip, "depth": depth}
        | {field: sum(row[field] for row in group) / len(group) for field in fields}
        for (label, skip, depth), group in groups.items()
    ]


def layers_kept(rows: list[dict[str, Any]]) -> Estimate:
    """Layers of attention alone after which both the rank and what can be decoded have fallen to a half; a
    straight line between layers.
    """
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if not row["skip"] and row["seed"] == seed]
        kept = [min(row["rank"], row["decoded"]) for row in own]
        at = next((k for k, x in enumerate(kept) if x < HALF), None)
        if at is None:
            found.append(float(len(kept) - 1))
        else:
            found.append(at - 1 + (kept[at - 1] - HALF) / (kept[at - 1] - kept[at]) if at else 0.0)
    return t_interval(found)


def evolved(rows: list[dict[str, Any]], noise: list[dict[str, Any]]) -> Estimate:
    """What can be decoded after the last layer with skip connections, beyond what noise of the same length
    leaves: 0 is noise, 1 everything.

    0 for a network that has not moved differences between tokens: what adds nothing, or the same to all,
    has kept nothing alive.
    """
    last = max(row["depth"] for row in rows)
    floor = {row["seed"]: row["decoded"] for row in noise if row["skip"] and row["depth"] == last}
    found = []
    for row in rows:
        if row["skip"] and row["depth"] == last:
            beyond = (row["decoded"] - floor[row["seed"]]) / (1 - floor[row["seed"]])
            found.append(max(beyond, 0.0) if row["moved"] >= MOVED else 0.0)
    return t_interval(found)


def _layers(results: Results, label: str) -> Estimate | None:
    rows = results.get("collapse", label)
    return layers_kept(rows) if rows else None


def _evolved(results: Results, label: str) -> Estimate | None:
    rows, noise = results.get("collapse", label), results.get(NOISE)
    return evolved(rows, noise) if rows and noise else None


def _robust(results: Results) -> Finding:
    noise = results.rows(NOISE)
    kept = {name: layers_kept(results.rows("collapse", name)) for name in ("cog", "softmax")}
    alive = {name: evolved(results.rows("collapse", name), noise) for name in ("cog", "softmax")}
    better = [_ahead(found["cog"], found["softmax"]) for found in (kept, alive)]
    return grade(all(better), any(better)), (
        f"half of rank and input is kept for {kept['cog']} layers of cog and {kept['softmax']} of softmax;"
        f" with skip connections"
        f" {alive['cog']} and {alive['softmax']} of the input can be decoded beyond noise"
    )


def _ahead(first: Estimate, second: Estimate) -> bool:
    if first.low is None or second.high is None:
        return False
    return first.low > second.high


def _heads(results: Results) -> Finding:
    rows = [row for row in results.rows("collapse", "softmax") if not row["skip"] and row["depth"]]
    if not rows:
        raise Missing("no layer was measured")
    ends = []
    for at in (min(row["depth"] for row in rows), max(row["depth"] for row in rows)):
        ends.append(t_interval([row["alike"] for row in rows if row["depth"] == at]))
    low = ends[1].value if ends[1].low is None else ends[1].low
    high = ends[0].value if ends[0].high is None else ends[0].high
    return grade(low > 0.9, low > high), (
        f"mean cosine between the patterns of softmax heads: {ends[0]} in the first layer, {ends[1]} in the"
        f" last; what training does is the"
        " study's"
    )


SECTION = Section(
    name="collapse",
    order=40,
    title="Collapse",
    question="Do tokens collapse, drown or evolve?",
    about=(
        f"Random networks, {TOKENS} tokens; queries and keys have the same map, so that each token is its"
        f" own best match. Evolution: the"
        " input can be decoded and tokens have moved. Collapse: the rank falls. Noise: the rank stays and"
        " nothing can be decoded. With skip"
        " connections what a layer adds to a token has the same length for every mechanism."
    ),
    jobs=jobs,
    facts=facts,
    figures=figures,
    controls=[Control("skip", "Skip connections", [(0, "without"), (1, "with")], 1)],
    columns=[
        Column(
            "rank",
            "keeps rank?",
            "layers of attention alone that leave half of the effective rank and half of what can be"
            " decoded of the input",
            _layers,
            2.0,
            1.0,
            unit="layers",
            why=(
                "yes from two layers, partly from one; below that it is lost within the first, as with"
                " random weights, weights of 0 and a state in"
                " which all tokens are one. A scaled softmax gets what softmax gets."
            ),
            noise=1e-3,
        ),
        Column(
            "identity",
            "keeps tokens apart?",
            "share of the input that can be decoded after the last layer with skip connections, beyond what"
            " noise of the same length leaves",
            _evolved,
            0.4,
            0.1,
            unit="share",
            why=(
                "0 is noise; what adds nothing, or the same to all tokens, gets 0 too. A map that looks at"
                " nothing but the token itself gets"
                " about 0.8: yes from half of that, partly from 0.1."
            ),
            noise=1e-3,
        ),
    ],
    claims=[
        Claim(
            "cog-robust",
            SURVEY,
            "Cog's representations are more robust against collapse.",
            EXPERIMENT,
            "Random networks, interval over seeds: holds if cog keeps half of rank and input for more"
            " layers than softmax, and more of the input"
            " with skip connections, interval against interval; with limits if one of the two.",
            "Neither interval lies above softmax's.",
            _robust,
        ),
        Claim(
            "head-collapse",
            SURVEY,
            "Heads collapse into one another: several heads attend to the same.",
            EXPERIMENT,
            "Patterns of softmax heads in random networks without skip connections, interval over seeds:"
            " holds if their mean cosine exceeds 0.9 in"
            " the last layer; with limits if it only exceeds that of the first layer.",
            "The patterns are no more alike in the last layer than in the first.",
            _heads,
        ),
    ],
)
