"""Writes docs/gallery.md and its pictures from a folder that ``unsoft compare`` left: ``python docs/gallery.py report``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from unsoft.report.comparison.figures import figures
from unsoft.report.results import Results

HERE = Path(__file__).parent


def main(report: Path) -> None:
    """Copies the figures and writes the page around them."""
    record = json.loads((report / "compare.json").read_text())
    pictures = HERE / "gallery"
    pictures.mkdir(exist_ok=True)
    drawn = [(figure.name, figure.title, figure.note) for figure in figures(Results(record))]
    drawn.append(("maps", "Weights on the same queries and keys", "Blue adds, orange subtracts."))
    for name, *_ in drawn:
        shutil.copyfile(report / "figures" / f"{name}.svg", pictures / f"{name}.svg")
    (HERE / "gallery.md").write_text(gallery(record, drawn))


def gallery(record: dict, drawn: list[tuple[str, str, str]]) -> str:
    """The page as Markdown."""
    lines = [
        "# Gallery", "",
        f"Figures of `{record['command']}` on {record['machine']}, {record['written'][:10]}; made by `python docs/gallery.py report`.",
        "See [compare](compare.md) for what is measured.", "",
    ]  # fmt: skip
    for name, title, note in drawn:
        lines += [f"## {title}", "", note, "", f"![{title}](gallery/{name}.svg)", ""]
    lines += ["## Claims", "", "| document | claim | verdict | measured |", "|---|---|---|---|"]
    lines += [f"| {c['document']} | {c['text']} | {c['verdict']} | {c['found']} |" for c in record["claims"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
