"""Makes the figures of docs/converting.md: ``python docs/generate/converting.py [--run]``.

With ``--run`` SmolLM2-135M is converted to each mechanism by the commands that the page shows, one after
another, one to two minutes of one core each, then to some of them with more and more steps, about 2.5 hours
of one core in all; what is done already (in ``runs``) is not done again. ``--run cog sigmoid`` runs only
these. Without it the tables are written from the records of the last such run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from unsoft.files import write_json, write_whole

HERE = Path(__file__).parents[1]
PAGE = HERE / "converting.md"
FIRST = "unsoft swap smollm2 softmax --out runs/smollm2"
"""Once, since unpacking its 4 bits takes longer than loading what is written here."""


class Series(NamedTuple):
    """Conversions by one command, their record and their place on the page."""

    name: str
    mechanisms: tuple[str, ...]
    command: str

    @property
    def record(self) -> Path:
        return HERE / f"{self.name}.json"

    @property
    def mark(self) -> str:
        return f"<!-- {self.name} -->\n"


SHORT = Series(
    "converting",
    ("magnitude+softmax", "sigmoid", "cog", "linear-relu", "relu2", "softmax", "softpick"),
    "unsoft convert runs/smollm2 MECHANISM --match-steps 12 --tune-steps 6 --held-out 1024 --save-every 16",
)
CURVE = Series(
    "converting_minutes",
    tuple(f"{name} {steps}" for name in ("cog", "sigmoid") for steps in (20, 60, 200, 400))
    + ("cog 200 --shift 0", "softmax 60", "softmax 200"),
    "unsoft convert runs/smollm2 MECHANISM --match-steps 0 --tune-steps STEPS --held-out 1024"
    " --save-every 1000",
)
"""Perplexity against minutes: each entry is a mechanism, its steps of tuning, and further options."""
COLUMNS = (
    "mechanism",
    *("original", "after swap", "fitted", "matched", "tuned"),
    *("layer error after swap", "fitted", "matched"),
    *("seconds of a core: fitting", "matching", "tuning"),
)
END = "<!-- end -->"


def run(mechanisms: list[str]) -> None:
    """Convert, and write the record after every conversion."""
    if not Path("runs/smollm2").exists():
        call(FIRST)
    for series in (SHORT, CURVE):
        record = json.loads(series.record.read_text())
        for entry in series.mechanisms:
            name, _, steps = entry.partition(" ")
            if not mechanisms or name in mechanisms:
                command = series.command.replace("MECHANISM", name).replace("STEPS", steps)
                if series is CURVE:
                    command += f" --out runs/{entry.replace(' ', '-')}"
                record[entry] = json.loads(call(f"{command} --json"))
                write_json(series.record, record)


def call(command: str) -> bytes:
    """What a command of unsoft prints."""
    arguments = command.split()[1:]
    done = subprocess.run(
        [sys.executable, "-m", "unsoft.cli", *arguments], stdout=subprocess.PIPE, check=True
    )
    return done.stdout


def table(record: dict) -> str:
    """Rows of the page."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for mechanism, found in record.items():
        perplexity, errors, seconds = (found[name] for name in ("perplexity", "layer_errors", "cpu_seconds"))
        cells = [mechanism]
        cells += [
            number(perplexity.get(name)) for name in ("original", "swapped", "fitted", "matched", "tuned")
        ]
        cells += [number(mean(errors.get(name))) for name in ("swapped", "fitted", "matched")]
        cells += [number(seconds.get(name)) for name in ("fit", "match", "tune")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mean(values: list[float] | None) -> float | None:
    """None if there is nothing to average."""
    return sum(values) / len(values) if values else None


def number(value: float | None) -> str:
    """Three digits that matter.

    >>> number(16.918), number(123456.0), number(None)
    ('16.9', '123,000', '-')
    """
    if value is None:
        return "-"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1000 else f"{value:.3g}"


def reading(record: dict, series: Series) -> str:
    """What the table says, in words made from its numbers."""
    tuned = {name: found["perplexity"]["tuned"] for name, found in record.items()}
    original = next(iter(record.values()))["perplexity"]["original"]
    control = tuned.pop("softmax", None)
    order = sorted(tuned, key=lambda name: tuned[name])
    words = f"The original has {number(original)}. "
    if control is not None:
        words += f"The control, softmax tuned on the same text, ends at {number(control)}. "
    listed = [f"{name} {number(tuned[name])} ({number(tuned[name] / original)} times)" for name in order]
    missing = [name for name in series.mechanisms if name not in record]
    words += f"From best to worst after tuning: {', '.join(listed)}."
    if missing:
        words += f" Not run yet: {', '.join(missing)}."
    return "\n".join(textwrap.wrap(words, 140)) + "\n"


def block(record: dict, series: Series = SHORT) -> str:
    """Everything on the page that comes from a record."""
    commands = f"    {series.command}\n"
    if series is SHORT:
        commands = f"    {FIRST}\n{commands}"
    if not record:
        return f"{commands}\nNot run yet: {', '.join(series.mechanisms)}.\n"
    spec = next(iter(record.values()))["spec"]
    matching, tuning = (spec[name] * spec["batch"] * spec["tokens"] for name in ("match_steps", "tune_steps"))
    about = (
        f"Perplexity on {spec['held_out']:,} held-out tokens in windows of {spec['tokens']};"
        f" {spec['fit_tokens']:,} tokens of fitting, {matching:,} of matching and {tuning:,} of tuning, one"
        " thread:"
    )
    return f"{about}\n\n{commands}\n{table(record)}\n{reading(record, series)}"


def curve(record: dict) -> str:
    """Table of perplexity against minutes."""
    lines = [
        f"Perplexity ↓ on 1,024 held-out tokens:\n\n    {CURVE.command}\n",
        "| mechanism | steps of tuning | minutes of one core | perplexity | relative to the original |",
        "|---|---|---|---|---|",
    ]
    for entry in (entry for entry in CURVE.mechanisms if entry in record):
        (name, steps, *options), found = entry.split(), record[entry]
        name = " ".join([name, *options])
        minutes, perplexity = found["cpu_seconds"], found["perplexity"]
        original, before = perplexity["original"], perplexity.get("fitted")
        points = [(steps, sum(minutes.values()), perplexity["tuned"])]
        if before is not None and not any(line.startswith(f"| {name} |") for line in lines):
            points.insert(0, ("0", minutes["fit"], before))
        for count, seconds, value in points:
            cells = (name, count, number(seconds / 60), number(value), number(value / original))
            lines.append(f"| {' | '.join(cells)} |")
    missing = [entry for entry in CURVE.mechanisms if entry not in record]
    return "\n".join(lines) + (f"\n\nNot run yet: {', '.join(missing)}." if missing else "") + "\n"


def page(text: str) -> str:
    """The page with the figures in their places."""
    for series in (SHORT, CURVE):
        before, _, rest = text.partition(series.mark)
        _, _, after = rest.partition(END)
        record = json.loads(series.record.read_text())
        made = block(record, series) if series is SHORT else curve(record)
        text = before + series.mark + made + END + after
    return text


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    write_whole(PAGE, page(PAGE.read_text()).encode())


if __name__ == "__main__":
    main()
