"""Runs as files for other programs: CSV, JSON and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unsoft.files import write_csv, write_json, write_whole
from unsoft.lab.study.record import NESTED, Record

LEFT_OUT = ("losses",)
"""Columns that a CSV file does without: they would be most of it."""


def export(records: Sequence[Record], path: str | Path) -> None:
    """Writes what :func:`unsoft.lab.study.read_records` reads back (.csv, .json), or a table for data tools
    (.parquet).

    >>> export([], "runs.xlsx")
    Traceback (most recent call last):
    ValueError: ...
    """
    path = Path(path)
    rows = [record.to_row() for record in records]
    if path.suffix == ".csv":
        write_csv(
            path, [{name: value for name, value in row.items() if name not in LEFT_OUT} for row in rows]
        )
    elif path.suffix == ".json":
        write_json(
            path,
            [
                row | {name: getattr(one, name) for name in NESTED}
                for one, row in zip(records, rows, strict=True)
            ],
        )
    elif path.suffix == ".parquet":
        write_whole(path, _parquet(rows))
    else:
        raise ValueError(f"study: {str(path)!r} must end in .csv, .json or .parquet")


def _parquet(rows: Sequence[dict[str, object]]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            "study: Parquet needs pyarrow; install it with pip install 'unsoft[parquet]', or export .csv"
            " or .json"
        ) from None
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return bytes(sink.getvalue().to_pybytes())
