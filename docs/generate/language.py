"""Writes docs/language.md and its curves from src/unsoft/lab/records/language.csv:
python docs/generate/language.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unsoft.files import write_whole
from unsoft.lab.evidence import between, t_interval
from unsoft.lab.records import LANGUAGE
from unsoft.lab.report.figure import Figure, by_mechanism, svg_and_png
from unsoft.lab.study import ResultSummary, Study, default_study, read_records, summarise
from unsoft.lab.study.plan import Group
from unsoft.lab.study.read import language_studies
from unsoft.lab.study.record import Record
from unsoft.lab.study.rule import Rule
from unsoft.lab.study.summary import difference
from unsoft.lab.tasks.documentation import packages
from unsoft.lab.training.spec import tokens_per_step

PAGE = Path(__file__).parents[1] / "language.md"
FIGURES = "language_figures"
"""Folder of the curves, beside the page."""
COLUMNS = (
    *("mechanism", "bits per byte ↓", "95 % CI", "over softmax ↑", "95 % CI", "seeds", "rate"),
    *("2× length ↓", "4× length ↓", "copy ↑", "induction ↑", "first token", "negative", "tokens/s ↑", ""),
)
METHODS = Path(__file__).with_name("language_methods.md")
NOT_RUN = "No run is on record yet, so there is no answer: the rules below were fixed before the first run."


def studies() -> list[Study]:
    """Return the studies of language models, from small to large."""
    return [default_study(name) for name in sorted(language_studies(), key=len)]


def effect(rule: Rule, summaries: Sequence[ResultSummary]) -> str | None:
    """Return what a rule found, such as "cog 0.012 better (difference +0.012, 95 % CI 0.003 to 0.021,
    supported)", or None if one of its mechanisms has no finished run.
    """
    pair = {one.mechanism: one for one in summaries if one.group == rule.group and one.seeds}
    if not {rule.mechanism, *rule.over} <= set(pair):
        return None
    outcome, _ = rule.judge(summaries)
    if rule.at_most is not None:
        shares = (f"{name} {pair[name].attention[rule.on]:.3f}" for name in (rule.mechanism, *rule.over))
        return f"attention on the first token: {', '.join(shares)} ({outcome})"
    gain = difference(pair[rule.mechanism].runs, pair[rule.over[0]].runs, rule.on)
    if gain is None:
        return None
    where = " where text is repeated" if "=" in rule.on else ""
    size = f"{abs(gain.mean):.3f} {'better' if gain.mean > 0 else 'worse'}"
    ends = (
        "" if gain.low is None else f"difference {gain.mean:+.3f}, 95 % CI {between(gain.low, gain.high)}, "
    )
    return f"{rule.mechanism} {size}{where} ({ends}{outcome})"


def answer(records: Sequence[Record]) -> str:
    """Return what the rules found, one sentence for each size, or that nothing has been run."""
    if not records:
        return NOT_RUN
    summaries, sentences, missing = summarise(records), [], []
    for study in studies():
        found = [(rule, effect(rule, summaries)) for rule in study.rules]
        known = [text for _, text in found if text]
        if known:
            group = study.rules[0].group
            sentences.append(f"At {group} parameters, in bits per byte against softmax: {'; '.join(known)}.")
        open_rules = [rule.mechanism for rule, text in found if not text]
        missing += [f"{name} at {study.rules[0].group}" for name in dict.fromkeys(open_rules)]
    if missing:
        sentences.append(f"Not measured yet: {', '.join(missing)}.")
    return " ".join(sentences)


def judged(records: Sequence[Record]) -> str:
    """Return the rules, each with its verdict and numbers once something has been run."""
    summaries, lines = summarise(records), []
    for study in studies():
        is_run = any(record.study == study.name for record in records)
        for rule in study.rules:
            line = f"- {rule.text}"
            if is_run and effect(rule, summaries):
                outcome, why = rule.judge(summaries)
                line = f"- **{outcome}**: {rule.text} ({why.partition(': ')[2]})"
            lines.append(line)
    return "\n".join(lines)


def curve(study: Study, group: Group, summaries: Sequence[ResultSummary]) -> Figure | None:
    """Return the learning curves of a size, with confidence intervals; None without a finished run."""
    mine = [one for one in summaries if (one.study, one.group) == (study.name, group.name) and one.seeds]
    tokens = tokens_per_step(study.expected_runs(group, group.variants[0])[-1].spec)
    rows = []
    for one in mine:
        by_step: dict[float, list[float]] = {}
        for run in one.runs:
            for step, score in run.curve:
                by_step.setdefault(step, []).append(score)
        for step, scores in by_step.items():
            mean, low, high = t_interval(scores)
            place = {"mechanism": one.mechanism, "tokens": step * tokens / 1e6}
            rows.append({**place, "bits per byte": mean, "low": low, "high": high})
    if not rows:
        return None
    labels = [one.mechanism for one in mine]
    chart = by_mechanism(
        labels,
        rows,
        "tokens",
        "bits per byte",
        x_title="million tokens",
        y_title="bits per byte, lower is better",
        ends=("low", "high"),
        fixed=True,
    )
    note = "On validation documents; mean over seeds, bars are 95 % confidence intervals (Student's t)."
    return Figure(f"language-{group.name}", f"{group.name} parameters: bits per byte", note, rows, chart)


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


def sections(records: Sequence[Record]) -> str:
    """Return curve and table of each size, and which mechanisms are missing."""
    text, summaries = [], [one for one in summarise(records) if one.mean is not None]
    for study in studies():
        wanted = len(study.seeds) - study.tuning_seeds
        for group in study.groups:
            mine = [one for one in summaries if (one.study, one.group) == (study.name, group.name)]
            done = {one.mechanism for one in mine if one.seeds == wanted}
            missing = [variant.label for variant in group.variants if variant.label not in done]
            text.append(f"## {group.name}\n")
            if mine:
                text.append(f"![Bits per byte by tokens]({FIGURES}/language-{group.name}.svg)\n")
                rows = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, mine)]
                text += [f"| {' | '.join(row)} |" for row in rows]
                trigrams = f"{mine[0].known:.3f} bits per byte"
                text.append(f"\nA trigram model that learned from as many tokens has {trigrams}.\n")
            if missing:
                text.append(f"Not complete: {', '.join(missing)}.\n")
    return "\n".join(text)


def page(records: Sequence[Record]) -> str:
    """Return the page."""
    licences = "\n".join(f"| {one['name']} {one['version']} | {one['licence']} |" for one in packages())
    methods = METHODS.read_text().replace("RULES", judged(records)).replace("LICENCES", licences)
    return f"# Does it help in a language model?\n\n{answer(records)}\n\n{sections(records)}\n{methods}"


def write(records: Sequence[Record], out: Path = PAGE) -> None:
    """Write the page, and its curves beside it."""
    summaries = summarise(records)
    for study in studies():
        for group in study.groups:
            if (figure := curve(study, group, summaries)) is not None:
                (out.parent / FIGURES).mkdir(exist_ok=True)
                picture = svg_and_png(figure.for_file())["svg"]
                write_whole(out.parent / FIGURES / f"{figure.name}.svg", picture)
    write_whole(out, page(records).encode())


if __name__ == "__main__":
    write(read_records(LANGUAGE) if LANGUAGE.is_file() else [])
