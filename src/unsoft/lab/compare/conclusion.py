"""Conclusions of a comparison in words: what beats softmax at what, by how much, and at which cost.

Everything is computed from the scoreboard as plain data, where each cell holds the paired difference to
softmax with its 95 % confidence interval and its reading: better, same (no clear difference) or worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unsoft.lab.compare.section import AFTER_TRAINING, BASELINE, BETTER, COST, SAME, WORSE
from unsoft.lab.report.page import brief, listed

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
_FEW = 3
"""Up to this many mechanisms, each gets a sentence of its own."""
_NAMED = 3
"""Effects that a sentence names."""


def effect(versus: Mapping[str, Any], column: Mapping[str, Any]) -> str:
    """Return the difference to softmax, or the factor, with its unit and interval.

    >>> column = {"is_ratio": False, "unit": "d′"}
    >>> effect({"value": 1.276, "low": 1.19, "high": 1.36}, column)
    '+1.28 d′, 95 % CI +1.19 to +1.36'
    >>> effect({"value": 0.49}, {"is_ratio": True, "unit": "× SDPA"})
    '0.49× softmax'
    """
    ratio = column["is_ratio"]

    def shown(x: float) -> str:
        return brief(x) if ratio or x <= 0 else f"+{brief(x)}"

    unit = "× softmax" if ratio else "" if column["unit"] == "share" else f" {column['unit']}"
    text = f"{shown(versus['value'])}{unit}"
    if versus.get("bound"):  # some draws ended at the limit
        text = f"at least {text}" if versus["value"] > 0 else text
    elif "low" in versus and versus["low"] != versus["high"]:
        text += f", 95 % CI {shown(versus['low'])} to {shown(versus['high'])}"
    return text


def verdict(label: str, record: Mapping[str, Any]) -> str:
    """Return one sentence about a mechanism: where it is better, the same and worse than softmax."""
    row = next(row for row in record["scoreboard"] if row["mechanism"] == label)
    by_reading = {reading: list(_effects(row, record, reading)) for reading in (BETTER, SAME, WORSE)}
    parts = []
    for reading, found in by_reading.items():
        if reading == SAME and found:
            parts.append(f"no clear difference in {listed(title for title, _ in found)}")
        elif found:
            parts.append(f"{reading} in {listed(f'{title} ({text})' for title, text in found)}")
    return f"{label} against softmax: {'; '.join(parts) or 'nothing was compared'}."


def sentences(record: Mapping[str, Any]) -> list[str]:
    """Return three to five sentences that summarise the scoreboard, and one about the claims."""
    whole, record = record, _undisturbed(record)
    others = [row for row in record["scoreboard"] if row["mechanism"] != BASELINE]
    compared = [row for row in others if any(_versus(row, column) for column in record["columns"])]
    said = [verdict(row["mechanism"], record) for row in compared] if len(compared) <= _FEW else []
    if len(compared) > _FEW:
        said += [_leader(compared, record), *_unbeaten(compared, record)]
        said += [*_trained(compared, record), *_cost(compared, record)]
    if len(record["columns"]) < len(whole["columns"]):
        said.append("Costs were measured on a busy machine and are left out of this summary.")
    counted = [claim["verdict"] for claim in record["claims"] if claim["counts"]]
    counts = {verdict: counted.count(verdict) for verdict in record["verdicts"] if verdict in counted}
    if set(counts) - {"not run"}:
        each = listed(f"{count} {verdict}" for verdict, count in counts.items())
        said.append(f"{len(counted)} falsifiable claims: {each}.")
    return said


def best_for(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for every need the best mechanism that beats softmax, or "" if none does."""
    cards = []
    for column in (column for column in _undisturbed(record)["columns"] if column["need"]):
        own = _compared(record["scoreboard"], column)
        better = [pair for pair in own if pair[1]["reading"] == BETTER]
        if not own:
            continue
        best = min(better, key=lambda pair: _rank(pair[0], column), default=None)
        card = {"need": column["need"], "column": column["name"], "section": column["section"]}
        card |= {"unit": column["unit"], "mechanism": "", "also": [], "compared": len(own)}
        if best is not None:
            row, found = best
            text, comma, interval = effect(found, column).partition(", ")
            card |= {"mechanism": row["mechanism"], "effect": text, "interval": comma + interval}
            card["value"] = row["cells"][column["name"]]["value"]
            card["also"] = [one["mechanism"] for one, _ in better if one is not row]
        base = record["baseline"]["cells"][column["name"]]
        cards.append(card | {"baseline": base["value"]})
    return cards


def _undisturbed(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record without the columns of cost if other programs used the machine."""
    if not any(answer["disturbed"] for answer in record.get("answers", ())):
        return record
    return {**record, "columns": [column for column in record["columns"] if column["group"] != COST]}


def _versus(row: Mapping[str, Any], column: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = row["cells"][column["name"]].get("versus")
    return found


def _rank(row: Mapping[str, Any], column: Mapping[str, Any]) -> float:
    """Return a number that is smallest for the best mechanism."""
    value = row["cells"][column["name"]]["value"]
    if column["aim"] == "1":
        return abs(math.log(value)) if value > 0 else math.inf
    return float(value if column["low_is_good"] else -value)


def _effects(row: Mapping[str, Any], record: Mapping[str, Any], reading: str) -> Iterable[tuple[str, str]]:
    """Yield title and effect of the columns with a reading."""
    for column in record["columns"]:
        found = _versus(row, column)
        if found and found["reading"] == reading:
            yield column["title"], effect(found, column)


def _leader(rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    """Return who is better than softmax most often, costs aside."""
    skills = {"columns": [column for column in record["columns"] if column["group"] != COST]}
    readings = (BETTER, SAME, WORSE)
    effects = [{reading: list(_effects(row, skills, reading)) for reading in readings} for row in rows]
    pairs = zip(rows, effects, strict=True)
    best, own = max(pairs, key=lambda pair: len(pair[1][BETTER]) - len(pair[1][WORSE]))
    better, worse, total = own[BETTER], own[WORSE], sum(map(len, own.values()))
    if not better:
        return f"None of the {len(rows)} mechanisms beats softmax in more quantities than it loses."
    text = (
        f"{best['mechanism']} beats softmax most often: better in {len(better)} of {total} quantities"
        f" ({_few(better)})"
    )
    return f"{text}, {f'worse in {len(worse)} ({_few(worse)})' if worse else 'worse in none'}."


def _unbeaten(rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Iterable[str]:
    readings = {
        column["title"]: [versus["reading"] for _, versus in _compared(rows, column)]
        for column in record["columns"]
    }
    titles = [title for title, own in readings.items() if len(own) > 1 and BETTER not in own]
    if titles:
        yield f"No mechanism here is clearly better than softmax in {listed(titles)}."


def _trained(rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Iterable[str]:
    for column in (column for column in record["columns"] if column["group"] == AFTER_TRAINING):
        own = sorted(_compared(rows, column), key=lambda pair: _rank(pair[0], column))
        parts = []
        for reading, words in ((BETTER, "above"), (SAME, "about equal to"), (WORSE, "below")):
            if names := [_named(pair, column) for pair in own if pair[1]["reading"] == reading]:
                parts.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {words} softmax")
        if parts and column["reference"] is not None:
            yield f"After training, on the tasks that both were trained on: {'; '.join(parts)}."


def _cost(rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Iterable[str]:
    for column in [column for column in record["columns"] if column["group"] == COST][:1]:
        own = sorted(_compared(rows, column), key=lambda pair: float(pair[1]["value"]))
        if len(own) > 1:
            ends = [_named(own[at], column) for at in (0, -1)]
            yield f"{column['title'].capitalize()} ranges from {ends[0]} to {ends[1]}."


def _compared(rows: Sequence[Mapping[str, Any]], column: Mapping[str, Any]) -> list[Pair]:
    """Return the mechanisms that were compared with softmax, each with the comparison."""
    return [(row, versus) for row in rows if (versus := _versus(row, column))]


def _named(pair: Pair, column: Mapping[str, Any]) -> str:
    return f"{pair[0]['mechanism']} ({effect(pair[1], column)})"


def _few(effects: Sequence[tuple[str, str]]) -> str:
    named = [f"{title} {text}" for title, text in effects[:_NAMED]]
    return "; ".join(named + ([f"and {len(effects) - _NAMED} more"] if len(effects) > _NAMED else []))
