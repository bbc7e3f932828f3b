"""Writes docs/questions/*.md from reports of ``unsoft compare``: ``python docs/questions.py report [more]``.

The first report is of random networks and single rows; the others, with ``--model``, add real models.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsoft.compare.estimate import Estimate
from unsoft.compare.jobs import Results
from unsoft.compare.sections import collapse, deletion, features, opposition
from unsoft.report.page import number

HERE = Path(__file__).parent / "questions"
STUDY = "docs/questions/influence.toml"
MODELS = (
    (
        "Cog (Lv et al. 2024)",
        "signed",
        "free",
        "one head adds and deletes",
        "withdrawn from ICLR 2026; +0.64 points at 141M, one seed",
    ),
    (
        "GPAM (Heo and Choi 2024)",
        "signed",
        "fixed",
        "slower collapse",
        "perplexity 108.3 → 106.4 on PTB, no seeds reported",
    ),
    (
        "Differential Transformer (Ye et al. 2024)",
        "signed",
        "1 − λ",
        "noise cancelled",
        "like quality with 65 % of the parameters",
    ),
    ("CoDA (Tay et al. 2019)", "signed", "free", "add, subtract or nullify", "degrades in GPAM's comparison"),
    (
        "Sigmoid attention (Ramapuram et al. 2024)",
        "not negative",
        "free",
        "no competition",
        "on par with softmax with a bias −log n",
    ),
    (
        "softmax1, learned sinks (Miller 2023; gpt-oss 2025)",
        "not negative",
        "≤ 1",
        "may attend to nothing",
        "in use",
    ),
    ("Softpick (Zuhri et al. 2025)", "not negative", "≤ 1", "no sink", "lags at 1.8B"),
    (
        "Gated attention (Qiu et al. 2025)",
        "not negative",
        "free after the gate",
        "may write nothing",
        "in use",
    ),
    ("Retention, DeltaNet (Sun et al. 2023; Yang et al. 2024)", "signed", "free", "linear time", "in use"),
)  # sign of weights, row sum, what is hoped for, what is reported


def main(paths: Sequence[Path]) -> None:
    """All four pages."""
    records = [json.loads((path / "compare.json").read_text()) for path in paths]
    HERE.mkdir(exist_ok=True)
    for name, write in PAGES.items():
        pictures = []
        for figure in FIGURES[name]:
            if (paths[0] / "figures" / f"{figure}.svg").exists():
                shutil.copyfile(paths[0] / "figures" / f"{figure}.svg", HERE / f"{figure}.svg")
                pictures += [f"![{figure}]({figure}.svg)", ""]
        (HERE / f"{name}.md").write_text("\n".join([write(records), *pictures]).rstrip() + "\n")


def _head(title: str, asked: str, records: Sequence[dict[str, Any]]) -> list[str]:
    first = records[0]
    where = f"{first['machine']}, {first['written'][:10]}"
    made = f"Written by `python docs/questions.py` from `{_command(first)}`, {where}."
    return [
        f"# {title}",
        "",
        f"Open question of the survey of negative attention (2025): {asked}",
        "",
        made,
        "",
    ]


def _command(record: dict[str, Any]) -> str:
    """Without the folder, which is of no interest here."""
    return str(record["command"].partition(" --out ")[0])


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return [
        *lines,
        *(f"| {' | '.join(x if isinstance(x, str) else number(x) for x in row)} |" for row in rows),
        "",
    ]


def _claims(record: dict[str, Any], *names: str) -> list[str]:
    """Verdict, numbers and command of each."""
    lines = []
    for claim in record["claims"]:
        if claim["name"] in names:
            lines.append(f"- **{claim['text']}** {claim['verdict']} ({claim['kind']}). {claim['found']}.")
            if claim["command"]:
                lines.append(f"  `{claim['command']}`")
    return [*lines, ""]


def _said(found: Estimate | None) -> str:
    return "" if found is None else str(found)


def irrelevant_or_opposed(records: Sequence[dict[str, Any]]) -> str:
    record, results = records[0], Results(records[0])
    lines = _head(
        "Irrelevant or opposed?",
        "which models tell irrelevant from opposed keys, and which features make them able to?",
        records,
    )
    lines += [
        "## Which mechanisms",
        "",
        "d′: difference of the weights over the noise of 63 other keys; 1 is right in 76 % of choices"
        " between two.",
        "",
    ]
    rows = [
        [label, *(_said(opposition.told_apart(results, label, pair)) for pair in opposition.PAIRS)]
        for label in results.labels
    ]
    lines += _table(
        ("mechanism", *(f"{a:g} against {b:g}" for a, b in opposition.PAIRS)), [row for row in rows if row[1]]
    )
    lines += [
        "## Which feature",
        "",
        "Formulas that differ in one feature; accuracy on support, opposition or neither (chance 0.333).",
        "",
    ]
    for part in features.parts(results):
        lines += _table(
            [c["title"] for c in part.columns], [[row[c["name"]] for c in part.columns] for row in part.rows]
        )
        lines += [part.text, ""]
    lines += [
        "## Verdicts",
        "",
        *_claims(record, "sign-decides", "erased-differences", "influence-factors", "trained-opposition"),
    ]
    return "\n".join(lines)


def influence_factors(records: Sequence[dict[str, Any]]) -> str:
    record = records[0]
    lines = _head(
        "Influence factors",
        "weights that are influence factors instead of probabilities: which models have them, and what do"
        " they gain?",
        records,
    )
    lines += ["## Models", "", *_table(("model", "weights", "row sum", "hoped for", "reported"), MODELS)]
    lines += [
        "## Two features, apart",
        "",
        "Accuracy on support, opposition or neither, by sign and by freedom of the sum.",
        "",
    ]
    rows = Results(record).get("features")
    cells = (
        ("softmax", "no", "1"),
        ("softmax1", "no", "free"),
        ("sinh, sum 1", "yes", "1"),
        ("sinh", "yes", "free"),
    )
    table = []
    for name, signed, total in cells:
        found = [row["accuracy"] for row in rows if row["formula"] == name]
        if found:
            table.append([name, signed, total, sum(found) / len(found)])
    lines += _table(("formula", "signed", "row sum", "accuracy"), table)
    lines += [
        "## Trained",
        "",
        f"The same two features as a study with softmax1 and gated attention as controls:"
        f" [{STUDY}](influence.toml).",
        "",
    ]
    lines += [f"    unsoft study {STUDY} --out influence", "    unsoft study report --out influence", ""]
    lines += ["## Verdicts", "", *_claims(record, "influence-factors", "forced-noise", "non-negativity")]
    return "\n".join(lines)


def deletion_quantified(records: Sequence[dict[str, Any]]) -> str:
    record, results = records[0], Results(records[0])
    lines = _head(
        "Deletion, quantified", "how much do heads delete, and is it the query that decides?", records
    )
    for part in deletion.parts(results):
        lines += [part.text, ""]
        rows = [
            [label, *(_said(deletion.share(results, label, f)) for f in ("removed", "negative", "dynamic"))]
            for label in results.labels
        ]
        lines += _table([c["title"] for c in part.columns], [row for row in rows if row[1]])
    for other in records[1:]:
        lines += _roles(other, "deletion")
    lines += [
        "## Verdicts",
        "",
        *_claims(record, "softmax-only-adds", "dynamic-deletion", "deletion", "trained-deletion"),
    ]
    lines += ["Deleting heads of a real model one by one: `unsoft inspect smollm2` (docs/inspection.md).", ""]
    return "\n".join(lines)


def evolution_or_collapse(records: Sequence[dict[str, Any]]) -> str:
    record, results = records[0], Results(records[0])
    lines = _head("Evolution or collapse", "do representations evolve, collapse, or drown in noise?", records)
    lines += ["## Random networks", "", collapse.SECTION.about, ""]
    noise, rows = results.get(collapse.NOISE), []
    for label in results.labels:
        found = results.get("collapse", label)
        if found and noise:
            rows.append([label, str(collapse.layers_kept(found)), str(collapse.evolved(found, noise))])
    titles = (
        "mechanism",
        "layers that keep half of rank and input",
        "input decoded beyond noise, with skip connections",
    )
    lines += _table(titles, rows)
    for other in records[1:]:
        lines += _depths(other)
    lines += [
        "## Verdicts",
        "",
        *_claims(record, "cog-robust", "slower-collapse", "cubic-collapse", "head-collapse"),
    ]
    return "\n".join(lines)


def _roles(record: dict[str, Any], word: str) -> list[str]:
    """Heads of a real model whose role has ``word`` in its name."""
    found = Results(record).get("model")
    if not found:
        return []
    heads = [head for head in found[0]["heads"] if head.get("deletion_share") is not None]
    strong = [head for head in heads if head["deletion_share"] > 0.5]
    return [
        f"## {record['model']}",
        "",
        f"{len(strong)} of {len(heads)} heads remove more than they write (`unsoft inspect"
        f" {record['model']}`).",
        "",
    ]


def _depths(record: dict[str, Any]) -> list[str]:
    """Collapse by depth in a real model, as its inspection found it."""
    found = Results(record).get("model")
    if not found:
        return []
    lines = [f"## {record['model']}", "", f"`{_command(record)}`, {record['written'][:10]}.", ""]
    rows = [
        row
        for row in found[0]["depths"]
        if not row.get("stack") or row["stack"] == found[0]["depths"][0]["stack"]
    ]
    names = [
        name
        for name, value in rows[0].items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    lines += _table(names, [[row[name] for name in names] for row in rows])
    return lines


FIGURES = {
    "irrelevant-or-opposed": ("opposition",),
    "influence-factors": ("forced-mass",),
    "deletion": (),
    "evolution-or-collapse": ("collapse-rank", "collapse-decoded", "collapse-moved", "residual"),
}
PAGES = {
    "irrelevant-or-opposed": irrelevant_or_opposed,
    "influence-factors": influence_factors,
    "deletion": deletion_quantified,
    "evolution-or-collapse": evolution_or_collapse,
}

if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
