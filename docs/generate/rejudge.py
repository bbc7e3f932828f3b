"""Judge claims about trained models again after their records have changed.

``python -m docs.generate.rejudge`` rewrites these claims and the column of trained scores in
docs/choose.json, and the claims in docs/gallery.md and docs/questions. Nothing is measured: the other numbers
stay those of the last comparison.
"""

from __future__ import annotations

from docs.generate import choose
from unsoft.files import write_json, write_whole
from unsoft.lab.compare.conclusion import effect
from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.sections import language, learned, training
from unsoft.lab.records import LANGUAGE, PACKAGED

SECTIONS = (training.SECTION, language.SECTION, learned.SECTION)
GALLERY = choose.HERE / "gallery.md"


def recorded() -> Results:
    """Return results that hold the shipped records and nothing else."""
    answers = [
        {"name": name, "mechanism": "", "rows": training.rows_of(path), "problem": ""}
        for name, path in ((training.STUDY, PACKAGED), (language.NAME, LANGUAGE))
    ]
    return Results({"subjects": [], "answers": answers})


def main() -> None:
    results, record = recorded(), choose.read()
    pages = {path: path.read_text() for path in (GALLERY, *choose.HERE.glob("questions/*.md"))}
    claims = {claim["name"]: claim for claim in record["claims"]}
    for claim in (claim for section in SECTIONS for claim in section.claims):
        verdict, found = claim.judge(results)
        claims[claim.name] = {"name": claim.name, "verdict": verdict, "found": found}
        row, item = f"| {claim.source} | {claim.text} | ", f"- **{claim.text}** "
        new = {row: f"{row}{verdict} | {found} |", item: f"{item}{verdict} ({claim.kind}). {found}"}
        for path, text in pages.items():
            lines = text.splitlines()
            for start, line in new.items():
                lines = [line if old.startswith(start) else old for old in lines]
            if path == GALLERY and new[row] not in lines:
                lines.append(new[row])
            pages[path] = "\n".join(lines) + "\n"
    (column,) = training.SECTION.columns
    for row in record["scoreboard"]:
        cell = column.cell(results, row["mechanism"])
        row["cells"].pop(column.name, None)
        if cell["value"] is not None:
            if versus := cell.get("versus"):
                versus["text"] = effect(versus, vars(column))
            row["cells"][column.name] = cell
    write_json(choose.RECORD, record | {"claims": list(claims.values())})
    for path, text in pages.items():
        write_whole(path, text.encode())
    write_whole(choose.PAGE, choose.page(choose.PAGE.read_text(), choose.read()).encode())


if __name__ == "__main__":
    main()
