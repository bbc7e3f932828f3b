"""Write docs/gallery.md and its pictures from the output folder of ``unsoft compare``.

``python docs/generate/gallery.py report``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.output import RECORD, read_record, views_of
from unsoft.lab.report.figure import Figure

HERE = Path(__file__).parents[1]


def main(report: Path) -> None:
    """Copy the figures and write the page around them."""
    record = read_record(report / RECORD)
    pictures = HERE / "gallery"
    pictures.mkdir(exist_ok=True)
    drawn = [figure for view in views_of(Results(record)) for figure in view["figures"]]
    for figure in drawn:
        shutil.copyfile(report / "figures" / f"{figure.name}.svg", pictures / f"{figure.name}.svg")
    (HERE / "gallery.md").write_text(gallery(record, drawn))


def gallery(record: dict, drawn: list[Figure]) -> str:
    """Return the page as Markdown."""
    made = (
        f"on {record['machine']}, {record['written'][:10]}; made by `python docs/generate/gallery.py report`."
    )
    lines = ["# Gallery", "", f"Figures of `{record['command'].partition(' --out ')[0]}` {made}"]
    lines += ["See [compare](compare.md) for what is measured.", ""]
    for figure in drawn:
        picture = f"![{figure.title}](gallery/{figure.name}.svg)"
        lines += [f"## {figure.title}", "", figure.note, "", picture, ""]
    lines += ["## Claims", "", "| source | claim | verdict | measured |", "|---|---|---|---|"]
    lines += [f"| {c['source']} | {c['text']} | {c['verdict']} | {c['found']} |" for c in record["claims"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
