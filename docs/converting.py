"""Makes the figures of docs/converting.md: ``python docs/converting.py [--run]``.

With ``--run`` SmolLM2-135M is converted to each mechanism by the command that the page shows, one after
another, one to two minutes of one core each; what is done already (in ``runs``) is not done again. Without
it the table is written from converting.json, the record of the last such run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from unsoft.files import write_json, write_whole

HERE = Path(__file__).parent
PAGE, RECORD = HERE / "converting.md", HERE / "converting.json"
MECHANISMS = ("magnitude+softmax", "cog", "sigmoid", "relu2", "linear-relu", "softmax", "softpick")
FIRST = "unsoft swap smollm2 softmax --out runs/smollm2"
"""Once, since unpacking its 4 bits takes longer than loading what is written here."""
COMMAND = (
    "unsoft convert runs/smollm2 --mechanism {} --match-steps 16 --tune-steps 8 --held-out 1024"
    " --save-every 16"
)
COLUMNS = (
    "mechanism",
    *("original", "after swap", "matched", "tuned"),
    *("layer error after swap", "matched"),
    *("seconds of a core: matching", "tuning"),
)
MARKS = "<!-- conversions -->\n", "<!-- end -->"


def run() -> None:
    """Converts, and keeps the record after every conversion."""
    if not Path("runs/smollm2").exists():
        call(FIRST)
    found = {}
    for mechanism in MECHANISMS:
        found[mechanism] = json.loads(call(COMMAND.format(mechanism) + " --json"))
        write_json(RECORD, found)


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
        cells += [number(perplexity.get(name)) for name in ("original", "swapped", "matched", "tuned")]
        cells += [number(mean(errors.get(name))) for name in ("swapped", "matched")]
        cells += [number(seconds.get(name)) for name in ("match", "tune")]
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


def page(text: str, record: dict) -> str:
    """The page with the table in its place."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return before + MARKS[0] + table(record) + MARKS[1] + after


def main() -> None:
    if "--run" in sys.argv[1:]:
        run()
    write_whole(PAGE, page(PAGE.read_text(), json.loads(RECORD.read_text())).encode())


if __name__ == "__main__":
    main()
