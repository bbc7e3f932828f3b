"""One run of a study, as it is stored, exported and read."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from unsoft.files import write_csv, write_json

WAITING, RUNNING, DONE, FAILED, CUT = "waiting", "running", "done", "failed", "cut"
STATUSES = (WAITING, RUNNING, DONE, FAILED, CUT)
TUNED, SHORT, FULL, NONE = "tuned", "short", "full", "none"
SWEEPS = {
    TUNED: "rates swept on the first seeds, the best by validation{where} run on all",
    SHORT: "rates swept in shorter runs, the best by validation{where} run on all other seeds",
    FULL: "every seed at every rate, the best by validation{where} shown",
    NONE: "no learning-rate sweep",
}
"""How learning rates were chosen."""
LANGUAGE_COLUMNS = {"size": "group", "rate": "lr", "bits_per_byte": "score"}
"""Names of fields in the table of language models."""
_NOT_IN_CSV = ("losses",)
"""Columns that would be most of a CSV file."""


def sweep_words(sweep: str, choose_on: str = "") -> str:
    """Describe how learning rates were chosen; shown beside every number.

    >>> sweep_words("tuned", "crowd=128")
    'rates swept on the first seeds, the best by validation with crowd=128 run on all'
    """
    return SWEEPS[sweep].format(where=f" with {choose_on}" if choose_on else "")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run: its plan and its result. Values that are not known yet are None or empty.

    >>> record = Record(study="mine", group="g", task="census", mechanism="cog", key="k", seed=0, lr=0.003)
    >>> Record.from_row(record.to_row()) == record, record.status
    (True, 'waiting')
    """

    study: str
    group: str
    """The part of the study: the task's name unless it has one of its own."""
    task: str
    mechanism: str
    """The label of the variant, such as "cog" or "softmax ×2 heads"."""
    base: str = ""
    """The registered name of the mechanism."""
    seed: int
    lr: float
    point: str = ""
    """The point of the sweep: "lr=0.003"."""
    sweep: str = NONE
    """How the study chose rates: tuned, full or none."""
    choose_on: str = ""
    """The difficulty by whose validation examples rates are chosen, such as "crowd=128"; "" for that of
    training."""
    swept: bool = False
    """True for the runs by which rates are compared."""
    status: str = WAITING
    score: float | None = None
    """On the test, after the last step."""
    validation: float | None = None
    """After the last step, at the difficulty of training."""
    best_validation: float | None = None
    metric: str = ""
    higher_is_better: bool = True
    chance: float | None = None
    known: float | None = None
    shortcut: float | None = None
    parameters: int | None = None
    steps: int | None = None
    seconds: float | None = None
    """Time of the training loop with its evaluations; of the last session if the run was resumed."""
    seconds_per_step: float | None = None
    """None for a run that was resumed."""
    wall: float = 0.0
    """Seconds of a worker, start to end, over all sessions."""
    attempts: int = 0
    harder: Mapping[str, float] = field(default_factory=dict)
    """Scores on tests of other difficulties, by label such as "repeats=64"."""
    validation_by: Mapping[str, float] = field(default_factory=dict)
    """The same on validation examples, by which rates may be chosen."""
    learned: Mapping[str, list[float]] = field(default_factory=dict)
    """Final values of the mechanism's own parameters."""
    attention: Mapping[str, list[float]] = field(default_factory=dict)
    """Statistics of the final attention, for each layer: :mod:`unsoft.lab.training.run`."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Further measurements of a language model: :mod:`unsoft.lab.training.language`."""
    curve: list[list[float]] = field(default_factory=list)
    """Pairs of step and validation score."""
    losses: list[list[float]] = field(default_factory=list)
    """Pairs of step and training loss."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The complete run; ``unsoft.lab.training.Spec.from_dict`` reads it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    code: str = ""
    """Digest of the code that made the run; for information, it is not part of the key."""
    error: str = ""
    finished: str = ""
    """When, in UTC."""
    key: str
    """Forty digits that identify the run: :func:`unsoft.lab.study.driver.key_of`."""

    @property
    def label(self) -> str:
        """Name of the run within its study.

        >>> run = {"study": "s", "group": "g", "seed": 1, "lr": 0.1, "point": "lr=0.1", "key": "k"}
        >>> Record(task="copy", mechanism="cog", **run).label
        'g cog seed 1 lr=0.1'
        """
        return f"{self.group} {self.mechanism} seed {self.seed} {self.point}"

    @property
    def merit(self) -> float | None:
        """The validation score by which rates are compared, at the difficulty that the study names for it."""
        return self.validation_by.get(self.choose_on) if self.choose_on else self.validation

    def to_row(self) -> dict[str, Any]:
        """Return a flat row for a table, with lists and mappings as JSON."""
        row = {name: getattr(self, name) for name in COLUMNS}
        return row | {name: json.dumps(row[name]) for name in NESTED}

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Record:
        """Return the record of a row of :meth:`to_row`, whose values may also be text from a CSV file.

        Fields that are missing get their defaults; ValueError for unknown ones.
        """
        row = {LANGUAGE_COLUMNS.get(name, name): value for name, value in row.items()}
        if unknown := [str(name) for name in row if name not in COLUMNS]:
            names = ", ".join(unknown)
            raise ValueError(f"unknown fields {names}; another version of unsoft may have written them")
        content: dict[str, Any] = {}
        for name, value in row.items():
            if name in NESTED and isinstance(value, str):
                value = json.loads(value) if value else NESTED[name]()
            elif name in _NUMBERS and value is not None:
                value = _NUMBERS[name](value) if value != "" else None
            content[name] = value
        return Record(**content)


COLUMNS = tuple(one.name for one in fields(Record))
NESTED: dict[str, type] = {
    one.name: kind
    for one in fields(Record)
    for kind, name in ((dict, "Mapping"), (list, "list"))
    if str(one.type).startswith(name)
}
"""Fields that a table holds as JSON."""


def _flag(value: Any) -> bool:
    return value in (True, 1, "1", "True", "true")


_NUMBERS: dict[str, Any] = {
    one.name: kind
    for one in fields(Record)
    for kind, name in ((int, "int"), (float, "float"), (_flag, "bool"))
    if str(one.type).startswith(name)
}


def read_records(path: str | Path, study: str | None = None) -> list[Record]:
    """Return the runs in a store (.db) or in an exported file (.csv, .json).

    >>> read_records("results.txt")
    Traceback (most recent call last):
    ValueError: ...
    """
    path = Path(path)
    if path.suffix not in (".db", ".csv", ".json"):
        raise ValueError(f"study: {str(path)!r} is neither a store (.db) nor an exported .csv or .json")
    if not path.is_file():
        raise ValueError(f"study: there is no file {str(path)!r}")
    if path.suffix == ".db":
        from unsoft.lab.study.store import StudyStore

        with StudyStore(path) as store:
            return store.records(study)
    try:
        text = path.read_text()
        is_json = path.suffix == ".json"
        rows: Any = json.loads(text) if is_json else csv.DictReader(io.StringIO(text, newline=""))
        if isinstance(rows, dict):
            raise ValueError("it is not a list of runs")
        records = [Record.from_row(row) for row in rows]
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        raise ValueError(f"study: {str(path)!r} is not an exported study: {problem}") from None
    return [record for record in records if study is None or record.study == study]


def write_records(records: Sequence[Record], path: str | Path) -> None:
    """Write a .csv or .json file that :func:`read_records` reads.

    >>> write_records([], "runs.xlsx")
    Traceback (most recent call last):
    ValueError: ...
    """
    path = Path(path)
    rows = [record.to_row() for record in records]
    if path.suffix == ".csv":
        write_csv(path, [{name: row[name] for name in row if name not in _NOT_IN_CSV} for row in rows])
    elif path.suffix == ".json":
        write_json(path, [row | {name: json.loads(row[name]) for name in NESTED} for row in rows])
    else:
        raise ValueError(f"study: {str(path)!r} must end in .csv or .json")
