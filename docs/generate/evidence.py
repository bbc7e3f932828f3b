"""Write docs/evidence.md, the results of the default studies, from the record in the package.

``python docs/generate/evidence.py``; ``python -m unsoft.lab.records study/study.db`` writes the record
itself.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from statistics import fmean

from unsoft.files import write_whole
from unsoft.lab.compare.sections.training import where_and_when
from unsoft.lab.evidence import NOT_RUN, VERDICTS, between
from unsoft.lab.records import PACKAGED, command_for
from unsoft.lab.study import default_study, read_records, summarise, verdict
from unsoft.lab.study.page import write_report
from unsoft.lab.study.plan import Study, earlier_words
from unsoft.lab.study.read import default_studies, language_studies
from unsoft.lab.study.record import Record
from unsoft.lab.study.rule import METHOD
from unsoft.lab.study.summary import ResultSummary

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

{answer}
Weights of both signs help a single head that must subtract. Counting duplicates once helps a model that
must count sources, also with far more repeats than in training. Against a crowd of distractors it gains
less than the rule asks for.

Small transformers (40,000 to 170,000 parameters) were trained from scratch, one study for each claim.

{summary}

Each rule was committed before the first run of its study, unless the study's file says otherwise
(opposition, deletion). Differences to softmax are paired by seed; confidence intervals are 95 %, Student's
t over five seeds (influence: ten), clipped to the possible range of the score.

<details><summary>Methods</summary>

{method}

Every mechanism gets the same learning rates on the first seed; the best by validation runs on all seeds.
Studies that judge a harder test choose the rate there. Because one seed chooses, a rate can be too large for
other seeds (trigger, the two heads of opposition). Sizes of tasks were chosen in pilot runs with other seeds.
`unsoft study --list` shows the rules; their files are in src/unsoft/lab/study/claims.

    {command}
    python -m unsoft.lab.records study/study.db && python docs/generate/evidence.py

{where}.

</details>
"""
ATTENTION = {
    "first_token": "Share of attention on the first token in the end, mean over seeds and layers",
    "first_token_at_rest": "Weight on the first token in rows that should do nothing (1: all of it, a sink)",
    "head_diversity": "How much heads differ in the end",
    "pruned_score": "Score without one head, mean over heads",
    "perturbed_score": "Score with noise in all heads",
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
    """Return one study: verdict, claim, results of its rules, charts and tables."""
    study = default_study(name)
    title = f"## {name}\n\n"
    own = [record for record in records if record.study == name]
    if not own:
        return f"{title}*{study.claim}* ({study.source})\n\nNot run yet: `unsoft study {name}`.\n"
    summaries = summarise(own)
    outcome, numbers = verdict(study.rules, own)
    judged = [rule.judge(summaries) for rule in study.rules]
    results = "".join(f"- {word[:1].upper()}{word[1:]}: {reason}.\n" for word, reason in judged)
    limits = f"Limits: {study.limits}\n\n" if study.limits else ""
    earlier = earlier_words(study, own)
    warning = f"**Note**: {earlier}; `unsoft study {name}` runs the present one.\n\n" if earlier else ""
    figures = "".join(
        f"![{name}: {words}]({FIGURES.name}/{name}-{kind}.svg)\n\n"
        for kind, words in KINDS.items()
        if (FIGURES / f"{name}-{kind}.svg").is_file()
    )
    groups = list(dict.fromkeys(one.group for one in summaries))
    tables = "\n".join(table([one for one in summaries if one.group == group]) for group in groups)
    rule = "".join(f"- {one.text}\n" for one in study.rules)
    rates = ", ".join(f"{rate:g}" for rate in sorted({run.lr for run in own}))
    seeds = sorted({run.seed for run in own})
    sweeps = numbers.removeprefix(". ".join(reason for _, reason in judged)).removeprefix(". ")
    notes = f"Rates {rates}: {sweeps}. Seeds {seeds[0]} to {seeds[-1]}."
    details = "\n\n".join(
        words
        for group in groups
        if (words := statistics(study, [one for one in summaries if one.group == group]))
    )
    return (
        f"{title}**{outcome[:1].upper()}{outcome[1:]}**: *{study.claim}* ({study.source})\n\n"
        f"{results}\n{limits}{warning}{figures}{tables}\n"
        f"<details><summary>Rules and details</summary>\n\n{rule}\n{notes}\n"
        + (f"\n{details}\n" if details else "")
        + "\n</details>\n"
    )


def table(summaries: list[ResultSummary]) -> str:
    """Return the table of one group of a study, with the scale of its scores."""
    first = summaries[0]
    better = "higher is better" if first.higher_is_better else "lower is better"
    shortcut = "" if first.shortcut is None else f", of a known shortcut {first.shortcut:.3f}"
    lines = [
        f"**{first.group}**: {first.metric}, {better}; chance {first.chance:.3f}{shortcut}.\n",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for one in summaries:
        difference = one.difference
        cells = [
            one.mechanism,
            f"{one.mean:.3f}",
            between(one.low, one.high),
            "reference" if difference is None else f"{difference.mean:+.3f}",
            "" if difference is None else between(difference.low, difference.high),
            one.rate_words,
            f"{one.parameters:,}",
            ", ".join(f"{difficulty}: {score:.3f}" for difficulty, (score, *_) in one.harder.items()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def statistics(study: Study, summaries: list[ResultSummary]) -> str:
    """Return what mechanisms learned and what attention did in one group, as sentences."""
    sentences = [
        f"Learned by {one.mechanism}: "
        + ", ".join(
            f"{name} {mean:.3g} ({low:.3g} to {high:.3g})" for name, (mean, low, high) in one.learned.items()
        )
        for one in summaries
        if one.learned
    ]
    for key, words in ATTENTION.items():
        if values := [
            f"{one.mechanism} {one.attention[key]:.3f}" for one in summaries if key in one.attention
        ]:
            sentences.append(f"{words}: {', '.join(values)}")
    for on in dict.fromkeys(rule.on for rule in study.rules):
        if values := [
            f"{one.mechanism} " + ", ".join(f"{fmean(run.attention[on]):.2f}" for run in one.runs)
            for one in summaries
            if on in one.attention
        ]:
            sentences.append(f"{on} by seed: {'; '.join(values)}")
    return f"{summaries[0].group}. {'. '.join(sentences)}." if sentences else ""


def page() -> str:
    """Return the whole page."""
    records = read_records(PACKAGED)
    rows: dict[str, list[str]] = {word: [] for word in VERDICTS}
    studies = [name for name in default_studies() if name not in language_studies()]
    for name in studies:
        study, own = default_study(name), [record for record in records if record.study == name]
        word, numbers = verdict(study.rules, own) if own else (NOT_RUN, "")
        first = re.match(r"[^;]*? seeds\)", numbers)  # of several comparisons, the first
        rows[word].append(f"| [{name}](#{name}) | {study.claim} | {word} | {first[0] if first else ''} |")
    lines = ["| study | claim | verdict | first comparison |", "|---|---|---|---|"]
    counts = ", ".join(f"{len(own)} {word}" for word, own in rows.items() if own)
    head = HEAD.format(
        command=command_for(records),
        where=where_and_when(records),
        method=METHOD,
        summary="\n".join([*lines, *(row for own in rows.values() for row in own)]),
        answer=f"Of {len(studies)} claims: {counts}.",
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
