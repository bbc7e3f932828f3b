"""Deletion, and whether the query decides what is deleted.

A head writes a source into the residual stream or removes it from there. With weights that cannot be
negative the value and output maps alone decide which: always the same for a source. Dynamic deletion is
both, for one source, by the query.
"""

from __future__ import annotations

import math

import torch

from unsoft import measure
from unsoft.lab.compare.candidate import WIDTH, Candidate, normals
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, mean_of
from unsoft.lab.compare.section import SIGNED, SURVEY, Finding, Section
from unsoft.lab.evidence import Estimate, grade
from unsoft.measure.erasing import gain_of

TOKENS, CONTEXTS = 48, 2
FIELDS = ("removed", "negative", "dynamic")


SECTION = Section(order=34, group=SIGNED, question="Does it delete, and does the query decide what?")


@SECTION.each(0.2, "softmax", "cog")
def deletion(candidate: Candidate, draws: int) -> RowIterator:
    """Measure the share of what random heads move that is removed, and how much of it the query decides.

    Half of the keys, the sources, and all queries meet twice, among other keys each time: what depends on
    the query alone is the same in both contexts.
    """
    for draw in range(draws):
        normal = normals(400 + draw, torch.float32)
        maps = normal(2, WIDTH, WIDTH) / math.sqrt(WIDTH)
        sources, queries = normal(TOKENS // 2, WIDTH), normal(1, TOKENS, WIDTH)
        seen = []
        for _ in range(CONTEXTS):
            keys = torch.cat([sources, normal(TOKENS - len(sources), WIDTH)])
            seen.append(candidate.weights(queries, keys[None])[0, :, : len(sources)].to(sources.dtype))
        written = sources @ maps[0]
        gain = gain_of(written, sources, maps[1])
        removed = measure.deletion(seen[0], written, residual=sources, out_proj=maps[1]).share
        negative = measure.negative_share(seen[0]).mean()
        dynamic = measure.dynamic_deletion(*(weights * gain for weights in seen))
        row = {"draw": draw, "removed": float(removed), "negative": float(negative)}
        yield row | {"dynamic": float(dynamic)}


@SECTION.column(
    "deletes",
    "deletion by query",
    yes=0.5,
    partly=0.05,
    possible=(0.0, 1.0),
    margin=0.05,
    noise=1e-3,
    unit="share",
    need="remove what the query opposes",
)
def _dynamic(results: Results, label: str) -> list[float]:
    """Share of what sources are moved that the query decides: written for some queries, removed for others.

    0 is what softmax gets, whose maps alone decide, and what random weights, weights of 0 and a scaled
    softmax get too; 1 is a sign that follows the query throughout. Yes nearer to that, partly from a
    twentieth.
    """
    return [row["dynamic"] for row in results.get("deletion", label)]


def share(results: Results, label: str, field: str = "dynamic") -> Estimate | None:
    rows = results.get("deletion", label)
    return mean_of(rows, field) if rows else None


@SECTION.table(
    "What is written and what is removed", "mechanism", "removed", "of negative weight", "by the query"
)
def _table(results: Results) -> Rows:
    """Random heads of width 64 with value and output maps, 48 tokens.

    Removed: fraction of each source direction that the head subtracts. By the query: fraction whose sign
    depends on the query (0: fixed by the maps; 1: the query decides all).
    """
    measured = {label: results.get("deletion", label) for label in results.labels}
    return [(x, *(mean_of(own, field).value for field in FIELDS)) for x, own in measured.items() if own]


@SECTION.experiment(SURVEY, "Softmax can only add; what is irrelevant cannot be taken away by the query.")
def _softmax_only_adds(results: Results) -> Finding:
    """Random value and output maps, interval over draws: supported if softmax removes less than 1 % of
    what it moves and the query decides less than 1 %; partly if only one of the two is so.

    Refuted: softmax removes sources, and the query decides which.
    """
    removed, dynamic = (mean_of(results.rows("deletion", "softmax"), x) for x in ("removed", "dynamic"))
    never, fixed = removed.upper < 0.01, dynamic.upper < 0.01
    return grade(never and fixed, never or fixed), (
        f"through random value and output maps softmax removes {removed} of what it moves; the query"
        f" decides {dynamic} of it"
        + (": it deletes, but always the same sources" if fixed and not never else "")
    )


@SECTION.experiment(SURVEY, "Negative weights let a head delete or suppress by the query.")
def _dynamic_deletion(results: Results) -> Finding:
    """Interval over draws: supported if the query decides more than half of what cog moves, and more than
    under softmax; partly if only more than under softmax.

    Refuted: Under cog the query decides no more than under softmax.
    """
    cog, softmax = (mean_of(results.rows("deletion", name), "dynamic") for name in ("cog", "softmax"))
    more = cog.lower > softmax.upper
    return grade(cog.lower > 0.5 and more, more), (
        f"the query decides {cog} of what cog writes and removes, {softmax} under softmax"
    )
