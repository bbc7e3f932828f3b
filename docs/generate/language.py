"""Writes docs/language.md from src/unsoft/lab/records/language.csv: python docs/generate/language.py."""

from __future__ import annotations

from pathlib import Path

from unsoft.lab.evidence import between
from unsoft.lab.records import LANGUAGE
from unsoft.lab.study import ResultSummary, default_study, read_records, summarise
from unsoft.lab.study.read import language_studies
from unsoft.lab.study.record import Record
from unsoft.lab.tasks.documentation import packages

PAGE = Path(__file__).parents[1] / "language.md"
COLUMNS = (
    *("mechanism", "bits per byte ↓", "95 % CI", "over softmax ↑", "95 % CI", "seeds", "rate"),
    *("2× length ↓", "4× length ↓", "copy ↑", "induction ↑", "first token", "negative", "tokens/s ↑", ""),
)
METHODS = Path(__file__).with_name("language_methods.md")


def answer(records: list[Record]) -> str:
    """Return what the rules found, or that nothing has been run."""
    lines = []
    for name in language_studies():
        study, own = default_study(name), [record for record in records if record.study == name]
        summaries = summarise(own)
        for rule in study.rules if own else ():
            outcome, why = rule.judge(summaries)
            lines.append(f"- **{outcome}**: {rule.text} ({why.partition(': ')[2]})")
    if not lines:
        return (
            "No run is on record yet, so there is no answer: the rules below were fixed before the first run."
        )
    return (
        "Rules were fixed before the first run. Differences are in bits per byte, paired by seed:\n\n"
        + "\n".join(lines)
    )


def cells(one: ResultSummary) -> list[str]:
    """Return a row of the table."""
    gain = one.difference
    figures = [run.figures for run in one.runs]

    def mean(name: str) -> str:
        values = [sum(own[name]) / len(own[name]) for own in figures if own.get(name)]
        return f"{sum(values) / len(values):.2f}" if values else ""

    steps = [own["cpu_seconds_per_step"][0] for own in figures if own.get("cpu_seconds_per_step")]
    speed = f"{4096 * len(steps) / sum(steps):,.0f}" if steps else ""
    longer = [one.harder[label].value for label in one.harder if label.startswith("length=")][1:]
    return [
        one.mechanism,
        f"{one.mean:.3f}",
        between(one.low, one.high),
        "reference" if gain is None else f"{gain.mean:+.3f}",
        "" if gain is None else between(gain.low, gain.high),
        str(one.seeds),
        one.rate_words,
        *(f"{value:.3f}" for value in (*longer, *[float("nan")] * (2 - len(longer)))),
        mean("copy"),
        mean("induction"),
        f"{one.attention['first_token']:.3f}" if "first_token" in one.attention else "",
        mean("negative_share"),
        speed,
        "undertrained" if one.is_undertrained else "",
    ]


def tables(records: list[Record]) -> str:
    """Return a table for each size, and what is missing."""
    text = []
    for name in language_studies():
        study, own = default_study(name), [record for record in records if record.study == name]
        summaries = [one for one in summarise(own) if one.mean is not None]
        wanted = len(study.seeds) - study.tuning_seeds
        for group in study.groups:
            rows = [cells(one) for one in summaries if one.group == group.name]
            done = {one.mechanism for one in summaries if one.group == group.name and one.seeds == wanted}
            missing = [variant.label for variant in group.variants if variant.label not in done]
            text.append(f"## {group.name}\n")
            if rows:
                text += [f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
                known = summaries[0].known
                text.append(f"\nA trigram model of the training text has {known:.3f} bits per byte.")
            text.append(f"\nNot complete: {', '.join(missing)}.\n" if missing else "")
    return "\n".join(text)


def page() -> str:
    """Return the page."""
    records = read_records(LANGUAGE) if LANGUAGE.is_file() else []
    rules = "\n".join(f"- {rule.text}" for name in language_studies() for rule in default_study(name).rules)
    licences = "\n".join(f"| {one['name']} {one['version']} | {one['licence']} |" for one in packages())
    return (
        "# Does it help in a language model?\n\n"
        f"{answer(records)}\n\n{tables(records)}\n"
        + METHODS.read_text().replace("RULES", rules).replace("LICENCES", licences)
    )


if __name__ == "__main__":
    PAGE.write_text(page())
