"""Trackers of experiments (TensorBoard, W&B, trackio, ...), which transformers' Trainer reports to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)


def check_trackers(names: Iterable[str]) -> None:
    """ValueError for a tracker that Trainer does not know, or whose package is not installed.

    >>> check_trackers(["tensorbord"])
    Traceback (most recent call last):
    ValueError: train: ...
    """
    known, there = sorted(INTEGRATION_TO_CALLBACK), get_available_reporting_integrations()
    for name in names:
        if name not in known:
            raise ValueError(f"train: Trainer knows no tracker {name!r}; it knows {', '.join(known)}")
        if name not in there:
            raise ValueError(
                f"train: the tracker {name!r} needs a package that is not here; pip install {name}"
            )


_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"
"""Trainer reads this; otherwise it writes beside the checkpoints, which are deleted when a run is done."""


@contextmanager
def tracked(names: Iterable[str], folder: Path | None) -> Iterator[None]:
    """Within it, trackers that write files do so in ``folder``, where they stay.

    >>> with tracked(["tensorboard"], Path("runs/first")):
    ...     os.environ["TENSORBOARD_LOGGING_DIR"]
    'runs/first/tensorboard'
    """
    if "tensorboard" not in names or _TENSORBOARD in os.environ:
        yield
        return
    if folder is None:
        raise ValueError(
            f"train: TensorBoard's files need a folder; give argument 'out', or set {_TENSORBOARD}"
        )
    os.environ[_TENSORBOARD] = str(folder / "tensorboard")
    try:
        yield
    finally:
        del os.environ[_TENSORBOARD]
