"""Everything that a comparison leaves in its folder: the page, the record, tables and pictures."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsoft.files import write_whole
from unsoft.report.comparison.figure import Figure

PAGE, RECORD = "index.html", "compare.json"


def write_record(folder: Path, record: Mapping[str, Any]) -> Path:
    path = folder / RECORD
    write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
    return path


def write_tables(folder: Path, figures: Sequence[Figure], record: Mapping[str, Any]) -> list[Path]:
    """One CSV for each figure, the scoreboard and the claims."""
    tables = {figure.name: figure.rows for figure in figures}
    tables["scoreboard"] = [
        {"mechanism": row["mechanism"], **{name: cell["value"] for name, cell in row["cells"].items()}} for row in record["scoreboard"]
    ]  # fmt: skip
    tables["claims"] = list(record["claims"])
    paths = []
    for name, rows in tables.items():
        if rows:
            paths.append(folder / "data" / f"{name}.csv")
            write_whole(paths[-1], _csv(rows))
    return paths


def write_pictures(folder: Path, specs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """PNG and SVG of Vega-Lite specifications; pictures of the same specification are left as they are. Yields names before work."""
    import vl_convert

    index_path = folder / "figures" / "index.json"
    try:
        index = json.loads(index_path.read_text())
    except (OSError, ValueError):
        index = {}
    for name, spec in specs.items():
        digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        paths = [folder / "figures" / f"{name}.{kind}" for kind in ("svg", "png")]
        if index.get(name) == digest and all(path.exists() for path in paths):
            continue
        yield name
        svg = vl_convert.vegalite_to_svg(dict(spec))
        write_whole(paths[0], svg.encode())
        write_whole(paths[1], vl_convert.svg_to_png(svg, scale=2))
        index[name] = digest
        write_whole(index_path, json.dumps(index, indent=1).encode())


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Words that a spreadsheet would take for a formula get an apostrophe in front."""
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {
                name: f"'{x}" if isinstance(x, str) and x.lstrip()[:1] in tuple("=+-@") and x.strip() else x
                for name, x in row.items()
            }
        )
    return text.getvalue().encode()
