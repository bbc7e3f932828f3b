"""Numbers that a user gives to a run, checked before any work."""

from __future__ import annotations

import math
from typing import Any

from unsoft.lab.tasks import IGNORE, Task


def check_whole(who: str, name: str, value: Any, minimum: int) -> None:
    """TypeError or ValueError unless ``value`` is a whole number that large and below 2**32, or None. More
    does not fit into what libraries make of it: a random seed, the length of a range.

    >>> check_whole("train", "steps", 0, 1)
    Traceback (most recent call last):
    ValueError: train: 'steps' must be at least 1, not 0
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{who}: {name!r} must be a whole number, not {value!r}")
    if value < minimum:
        raise ValueError(f"{who}: {name!r} must be at least {minimum}, not {value}")
    if value >= 1 << 32:
        raise ValueError(f"{who}: {name!r} must be less than 2**32, not {value}")


def check_number(who: str, name: str, value: Any) -> None:
    """TypeError or ValueError unless ``value`` is a number of at least 0, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{who}: {name!r} must be a number, not {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{who}: {name!r} must be a number of at least 0, not {value}")


def check_seed(who: str, seed: Any) -> None:
    """TypeError or ValueError unless ``seed`` is one that every generator of random numbers takes."""
    check_whole(who, "seed", seed, 0)


def check_examples(task: Task) -> None:
    """ValueError if an example of a task, perhaps a user's own, is none that a model could learn."""
    inputs, labels = task.sample(1, training=True)
    asked = labels[labels != IGNORE]
    if not len(asked):
        raise ValueError(f"{task.name}: an example asks nothing: all of its labels are {IGNORE}")
    for what, values, count, says in (
        ("token", inputs, task.size, "size"),
        ("label", asked, task.outputs, "outputs"),
    ):
        if values.is_floating_point():  # features, pictures, and labels that are vectors
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise ValueError(f"{task.name}: the {what} {wrong} is none of the {count} of its {says!r}")
