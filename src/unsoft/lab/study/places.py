"""The places of a sweep: learning rates, and what else is tried with them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from unsoft.lab.study.content import as_settings, as_table
from unsoft.lab.study.plan import Group
from unsoft.lab.study.record import NONE

RATES = (0.001, 0.003, 0.01)
"""The learning rates of a study that names none."""


def places(content: Mapping[str, Any], sweep: str, groups: Sequence[Group]) -> tuple[dict[str, Any], ...]:
    """The places of the sweep: all combinations of the listed values, or ``random`` ones."""
    if "lrs" in content and "search" in content:
        raise ValueError("study: give 'lrs' or a table 'search', not both")
    if "lrs" not in content and "search" not in content and sweep == NONE:
        return ({"lr": _own_rate(groups)},)
    search = as_table(content.get("search", {"lr": content.get("lrs", list(RATES))}), "search")
    if "lr" not in search:
        raise ValueError("study: 'search' needs learning rates: lr = [0.001, 0.003, 0.01]")
    as_settings(dict.fromkeys(search))
    drawn = content.get("random")
    if drawn is None:
        for name, values in search.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"study: {name!r} of a sweep must be a list of values, not {values!r}")
        combinations = itertools.product(*search.values())
        return tuple(dict(zip(search, _rates(one, search), strict=True)) for one in combinations)
    if isinstance(drawn, bool) or not isinstance(drawn, int) or drawn < 1:
        raise ValueError(f"study: 'random' must be a whole number of at least 1, not {drawn!r}")
    dice = random.Random(0)
    return tuple({name: _draw(name, values, dice) for name, values in search.items()} for _ in range(drawn))


def _rates(values: Sequence[Any], names: Mapping[str, Any]) -> list[Any]:
    return [_rate(value) if name == "lr" else value for name, value in zip(names, values, strict=True)]


def _rate(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (math.isfinite(value) and value > 0)
    ):
        raise ValueError(f"study: a learning rate must be a number over 0, not {value!r}")
    return float(value)


def _draw(name: str, values: Any, dice: random.Random) -> Any:
    """One of a list, or a number between low and high, evenly on a logarithmic scale."""
    if isinstance(values, list) and values:
        chosen = dice.choice(values)
        return _rate(chosen) if name == "lr" else chosen
    if isinstance(values, dict) and sorted(values) == ["high", "low"]:
        low, high = _rate(values["low"]), _rate(values["high"])
        return float(f"{math.exp(dice.uniform(math.log(low), math.log(high))):.3g}")
    raise ValueError(
        f"study: {name!r} of a random search must be a list or {{low = , high = }}, not {values!r}"
    )


def _own_rate(groups: Sequence[Group]) -> float:
    """Of the task, if there is only one."""
    from unsoft.lab.tasks import task

    rates = {task(group.task, **group.knobs).setup.lr for group in groups}
    if len(rates) != 1:
        raise ValueError(
            "study: these tasks have different learning rates of their own; name one: lrs = [0.003]"
        )
    return rates.pop()
