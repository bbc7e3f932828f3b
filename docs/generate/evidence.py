"""Write docs/evidence.md, the results of the default studies, from the record in the package.

``python docs/generate/evidence.py``; ``python -m unsoft.lab.records study/study.db`` writes the record
itself.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean

from unsoft.files import write_whole
from unsoft.lab.compare.sections.training import where_and_when
from unsoft.lab.evidence import NOT_RUN, VERDICTS, between
from unsoft.lab.records import PACKAGED, command_for
from unsoft.lab.study import default_study, read_records, summarise, verdict
from unsoft.lab.study.page import write_report
from unsoft.lab.study.plan import earlier_words
from unsoft.lab.study.read import default_studies, language_studies
from unsoft.lab.study.record import Record
from unsoft.lab.study.rule import METHOD

DOCS = Path(__file__).parents[1]
PAGE, FIGURES = DOCS / "evidence.md", DOCS / "evidence_figures"
KINDS = {"curves": "learning curves", "difficulty": "score by difficulty"}
"""Charts of a study that the page shows, if it has them."""
HEAD = """# Evidence: does it help after training?

```{{toctree}}
:hidden:

questions/irrelevant-or-opposed
questions/influence-factors
questions/deletion
questions/evolution-or-collapse
heads
gallery
```

Small transformers (40,000 to 170,000 parameters) were trained from scratch, one study for each claim.
{answer}

{summary}

Each rule was committed before the first run of its study. Differences to softmax are paired by seed;
confidence intervals are 95 %, Student's t over five seeds, clipped to the possible range of the score.

<details><summary>Methods</summary>

{method}

Every mechanism gets the same learning rates on the first seed; the best by validation runs on all seeds.
`needle` and `focus` choose the rate at the difficulty that is judged. Sizes of tasks were chosen in pilot
runs with other seeds. `unsoft study --list` shows the rules; their files are in src/unsoft/lab/study/claims.

    {command}
    python -m unsoft.lab.records study/study.db && python docs/generate/evidence.py

{where}.

</details>
"""
ATTENTION = {
    "first_token": "Share of attention on the first token in the end, mean over seeds and layers",
    "first_token_at_rest": "Weight on the first token in rows that should do nothing (1: all of it, a sink)",
    "head_diversity": "How much heads differ in the end",
}
COLUMNS = (
    "mechanism",
    "score",
    "95 % CI",
    "over softmax",
    "95 % CI",
    "rate",
    "parameters",
    "at all difficulties",
)


def section(name: str, records: list[Record]) -> str:
    """Return one study: its claim, table and verdict, or that it has not been run."""
    study = default_study(name)
    title = f"## {name}\n\n*{study.claim}* ({study.source})\n\n"
    limits = f"{study.limits} " if study.limits else ""
    own = [record for record in records if record.study == name]
    if not own:
        return title + f"Not run yet: `unsoft study --default {name}`.\n"
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    summaries = summarise(own)
    for one in summaries:
        difference = one.difference
        harder = ", ".join(f"{difficulty}: {score:.3f}" for difficulty, (score, *_) in one.harder.items())
        cells = [
            one.mechanism,
            f"{one.mean:.3f}",
            between(one.low, one.high),
            "reference" if difference is None else f"{difference.mean:+.3f}",
            "" if difference is None else between(difference.low, difference.high),
            one.rate_words,
            f"{one.parameters:,}",
            harder,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    first = summaries[0]
    better = "higher is better" if first.higher_is_better else "lower is better"
    shortcut = "" if first.shortcut is None else f", of a known shortcut {first.shortcut:.3f}"
    rule = "; ".join(one.text for one in study.rules)
    outcome, numbers = verdict(study.rules, own)
    learned = "".join(
        f" Learned by {one.mechanism}: "
        + ", ".join(
            f"{name} {mean:.3g} ({low:.3g} to {high:.3g})" for name, (mean, low, high) in one.learned.items()
        )
        + "."
        for one in summaries
        if one.learned
    )
    watched = "".join(
        f" {words}: "
        + ", ".join(f"{one.mechanism} {one.attention[key]:.3f}" for one in summaries if key in one.attention)
        + "."
        for key, words in ATTENTION.items()
        if any(key in one.attention for one in summaries)
    )
    by_seed = "".join(
        f" {rule.on} by seed: "
        + "; ".join(
            f"{one.mechanism} " + ", ".join(f"{fmean(run.attention[rule.on]):.2f}" for run in one.runs)
            for one in summaries
            if one.mechanism in (rule.mechanism, *rule.over)
        )
        + "."
        for rule in study.rules
        if any(rule.on in one.attention for one in summaries)
    )
    figures = "".join(
        f"![{name}: {words}]({FIGURES.name}/{name}-{kind}.svg)\n\n"
        for kind, words in KINDS.items()
        if (FIGURES / f"{name}-{kind}.svg").is_file()
    )
    earlier = earlier_words(study, own)
    warning = (
        f" **Note**: {earlier}; `unsoft study --default {name}` runs the present one." if earlier else ""
    )
    rates = ", ".join(f"{rate:g}" for rate in sorted({run.lr for run in own}))
    seeds = sorted({run.seed for run in own})
    return (
        f"{title}**{outcome[:1].upper()}{outcome[1:]}.** {limits}{warning}\n\n{figures}"
        f"{first.metric.capitalize()}, {better}; chance {first.chance:.3f}{shortcut}.\n\n"
        + "\n".join(lines)
        + f"\n\n<details><summary>Rule and details</summary>\n\nRule: {rule}. Result: {numbers}."
        + f" Rates {rates}; seeds {seeds[0]} to {seeds[-1]}.{learned}{watched}{by_seed}\n\n</details>\n"
    )


def page() -> str:
    """Return the whole page."""
    records = read_records(PACKAGED)
    verdicts = Counter[str]()
    lines = ["| study | claim | verdict | first rule |", "|---|---|---|---|"]
    studies = [name for name in default_studies() if name not in language_studies()]
    for name in studies:
        study, own = default_study(name), [record for record in records if record.study == name]
        word, numbers = verdict(study.rules, own) if own else (NOT_RUN, "")
        verdicts[word] += 1
        first = re.match(r"[^;]*? seeds\)", numbers)  # of several comparisons, the first
        lines.append(f"| [{name}](#{name}) | {study.claim} | {word} | {first[0] if first else ''} |")
    answer = "Verdicts: " + ", ".join(f"{verdicts[word]} {word}" for word in VERDICTS if verdicts[word]) + "."
    method, summary = METHOD, "\n".join(lines)
    head = HEAD.format(
        command=command_for(records),
        where=where_and_when(records),
        method=method,
        summary=summary,
        answer=answer,
    )
    return "\n".join([head, *(section(name, records) for name in studies)])


def write_figures() -> None:
    """Write the charts of the report that the page shows."""
    records = read_records(PACKAGED)
    studies = [default_study(name) for name in dict.fromkeys(record.study for record in records)]
    with tempfile.TemporaryDirectory() as folder:
        write_report(studies, records, Path(folder))
        FIGURES.mkdir(exist_ok=True)
        for study in studies:
            for kind in KINDS:
                for file in Path(folder, "figures").glob(f"{study.name}-*-{kind}.svg"):
                    write_whole(FIGURES / f"{study.name}-{kind}.svg", file.read_bytes())


if __name__ == "__main__":
    write_figures()
    write_whole(PAGE, page().encode())
