"""Write docs/questions/*.md from a report of ``unsoft compare``.

``python docs/generate/questions.py [REPORT]``.

Without one the sections that the pages need are measured first, at the quick level: a minute or less. What
models say is kept in docs/questions/models.json (experiments/real_models.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from model_tables import heads_of, states_of, stored, table, trained_of

from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.output import RECORD, read_record
from unsoft.lab.compare.sections import collapse, deletion, features, opposition
from unsoft.lab.evidence import Estimate

HERE = Path(__file__).parents[1] / "questions"
STUDY = "docs/questions/influence.toml"
SECTIONS = (
    "opposition",
    "features",
    "deletion",
    "collapse",
    "irrelevance",
    "residual",
    "sign",
    "training",
)
"""Sections that the pages need."""
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


def main(report: Path | None) -> None:
    """Write all four pages."""
    if report is None:
        with tempfile.TemporaryDirectory() as folder:
            wanted = [word for name in SECTIONS for word in ("--only", name)]
            line = ["-m", "unsoft.cli", "compare", "--quick", *wanted, "--out", folder]
            subprocess.run([sys.executable, *line], check=True)
            main(Path(folder))
        return
    record = read_record(report / RECORD)
    HERE.mkdir(exist_ok=True)
    for name, write in PAGES.items():
        pictures = []
        for figure in FIGURES[name]:
            if (report / "figures" / f"{figure}.svg").exists():
                shutil.copyfile(report / "figures" / f"{figure}.svg", HERE / f"{figure}.svg")
                pictures += [f"![{figure}]({figure}.svg)", ""]
        (HERE / f"{name}.md").write_text("\n".join([write(record), *pictures]).rstrip() + "\n")


def _head(title: str, asked: str, first: dict[str, Any]) -> list[str]:
    where = f"{first['machine']}, {first['written'][:10]}"
    made = f"Written by `python docs/generate/questions.py` from `{_command(first)}`, {where}."
    return [
        f"# {title}",
        "",
        f"Open question of the survey of negative attention (2025): {asked}",
        "",
        made,
        "",
    ]


def _command(record: dict[str, Any]) -> str:
    """Return the command of a report without its output folder."""
    return str(record["command"].partition(" --out ")[0])


def _claims(record: dict[str, Any], *names: str) -> list[str]:
    """Return verdict, numbers and command of each claim."""
    lines = []
    for claim in record["claims"]:
        if claim["name"] in names:
            lines.append(f"- **{claim['text']}** {claim['verdict']} ({claim['kind']}). {claim['found']}.")
            if claim["command"]:
                lines.append(f"  `{claim['command']}`")
    return [*lines, ""]


def _text(estimate: Estimate | None) -> str:
    return "" if estimate is None else str(estimate)


def irrelevant_or_opposed(record: dict[str, Any]) -> str:
    results = Results(record)
    lines = _head(
        "Irrelevant or opposed?",
        "which models tell irrelevant from opposed keys, and which features make them able to?",
        record,
    )
    lines += [
        "## Which mechanisms",
        "",
        "d′: difference of the weights over the noise of 63 other keys; 1 is right in 76 % of choices"
        " between two.",
        "",
    ]
    rows = [
        [label, *(_text(opposition.distance(results, label, pair)) for pair in opposition.PAIRS)]
        for label in results.labels
    ]
    lines += table(
        ("mechanism", *(f"{a:g} against {b:g}" for a, b in opposition.PAIRS)), [row for row in rows if row[1]]
    )
    lines += [
        "## Which feature",
        "",
        "Formulas that differ in one feature; accuracy on support, opposition or neither (chance 0.333).",
        "",
    ]
    for part in features.parts(results):
        lines += table(
            [c["title"] for c in part.columns], [[row[c["name"]] for c in part.columns] for row in part.rows]
        )
        lines += [part.text, ""]
    lines += [
        "## Verdicts",
        "",
        *_claims(record, "sign-decides", "erased-differences", "influence-factors", "trained-opposition"),
    ]
    return "\n".join(lines)


def influence_factors(record: dict[str, Any]) -> str:
    lines = _head(
        "Influence factors",
        "weights that are influence factors instead of probabilities: which models have them, and what do"
        " they gain?",
        record,
    )
    lines += ["## Models", "", *table(("model", "weights", "row sum", "hoped for", "reported"), MODELS)]
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
    shown = []
    for name, signed, total in cells:
        values = [row["accuracy"] for row in rows if row["formula"] == name]
        if values:
            shown.append([name, signed, total, sum(values) / len(values)])
    lines += table(("formula", "signed", "row sum", "accuracy"), shown)
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


def deletion_quantified(record: dict[str, Any]) -> str:
    results = Results(record)
    lines = _head(
        "Deletion, quantified", "how much do heads delete, and is it the query that decides?", record
    )
    for part in deletion.parts(results):
        lines += [part.text, ""]
        rows = [
            [label, *(_text(deletion.share(results, label, f)) for f in ("removed", "negative", "dynamic"))]
            for label in results.labels
        ]
        lines += table([c["title"] for c in part.columns], [row for row in rows if row[1]])
    lines += heads_of(stored())
    lines += [
        "## Verdicts",
        "",
        *_claims(record, "softmax-only-adds", "dynamic-deletion", "deletion", "trained-deletion"),
    ]
    return "\n".join(lines)


def evolution_or_collapse(record: dict[str, Any]) -> str:
    results = Results(record)
    lines = _head("Evolution or collapse", "do representations evolve, collapse, or drown in noise?", record)
    lines += ["## Random networks", "", collapse.SECTION.about, ""]
    noise, rows = results.get(collapse.NOISE), []
    for label in results.labels:
        own = results.get("collapse", label)
        if own and noise:
            rows.append([label, str(collapse.layers_kept(own)), str(collapse.evolved(own, noise))])
    titles = (
        "mechanism",
        "layers that keep half of rank and input",
        "input decoded beyond noise, with skip connections",
    )
    lines += table(titles, rows)
    kept = stored()
    lines += [*trained_of(kept), *states_of(kept, "smollm2"), *states_of(kept, "minilm")]
    lines += [
        "## Verdicts",
        "",
        *_claims(record, "cog-robust", "slower-collapse", "cubic-collapse", "head-collapse"),
    ]
    return "\n".join(lines)


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
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
