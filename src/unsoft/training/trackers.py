"""Trackers of experiments (TensorBoard, W&B, trackio, ...), which transformers' Trainer reports to."""

from __future__ import annotations

from collections.abc import Iterable

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
