"""Studies from TOML, with the short forms that people write, and those that come with the package: one file
each in ``claims``.
"""

from __future__ import annotations

import itertools
import math
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from unsoft.mechanisms.core.inline import label_of
from unsoft.study.plan import Group, Study, Variant
from unsoft.study.record import NONE, TUNED
from unsoft.study.rule import read_rule

RATES = (0.001, 0.003, 0.01)
"""The learning rates of a study that names none."""
SEEDS = 5
_CLAIMS = Path(__file__).parent / "claims"
_STUDY = (
    "name",
    "source",
    "claim",
    "seeds",
    "lrs",
    "search",
    "random",
    "sweep",
    "tuning_seeds",
    "group",
    "rule",
)
_GROUP = ("name", "task", "knobs", "settings", "mechanisms", "variant", "controls")
_VARIANT = ("label", "mechanism", "options", "settings", "as_large_as")
_FIXED = ("task", "knobs", "mechanism", "options", "seed")
"""Fields of a run that a study decides in other ways than by settings."""


def read_study(path: str | Path) -> Study:
    """The study that a TOML file describes; its name is that of the file unless it has one.

    >>> read_study("nowhere.toml")
    Traceback (most recent call last):
    ValueError: ...
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        hint = f"; did you mean --default {path}?" if str(path) in default_studies() else ""
        raise ValueError(f"study: {str(path)!r} cannot be read: {reason}{hint}") from None
    except tomllib.TOMLDecodeError as problem:
        raise ValueError(f"study: {str(path)!r} is not TOML: {problem}") from None
    return make_study({"name": path.stem, **content})


def default_studies() -> dict[str, Path]:
    """The studies that come with the package, by name."""
    return {path.stem: path for path in sorted(_CLAIMS.glob("*.toml"))}


@cache  # frozen, and asked for by every claim that it decides
def default_study(name: str) -> Study:
    """One of the studies that come with the package.

    >>> default_study("nonsense")
    Traceback (most recent call last):
    ValueError: ...
    """
    there = default_studies()
    if name not in there:
        raise ValueError(f"study: there is no default study {name!r}; there are {', '.join(there)}")
    return read_study(there[name])


def make_study(content: Mapping[str, Any]) -> Study:
    """From plain data with short forms: seeds as a number, mechanisms as a list of names, ``controls =
    true``.

    >>> group = {"task": "census", "mechanisms": ["softmax", "cog"]}
    >>> study = make_study({"name": "mine", "seeds": 2, "group": [group]})
    >>> len(study), [variant.label for variant in study.groups[0].variants]
    (8, ['softmax', 'cog'])
    """
    _check(content, _STUDY, "a study")
    groups = tuple(_group(one) for one in _tables(content.get("group", []), "group"))
    sweep = content.get("sweep", TUNED)
    study = Study(
        name=_text(content.get("name", "study"), "name"),
        groups=groups,
        seeds=_seeds(content.get("seeds", SEEDS)),
        points=_points(content, sweep, groups),
        sweep=sweep,
        tuning_seeds=content.get("tuning_seeds", 1),
        source=_text(content.get("source", ""), "source"),
        claim=_text(content.get("claim", ""), "claim"),
        rules=(),
    )
    labels = {group.name: [variant.label for variant in group.variants] for group in groups}
    rules = tuple(read_rule(one, labels) for one in _tables(content.get("rule", []), "rule"))
    _check_decided_once(study)
    for run in study.runs():  # names and settings that cannot be trained are refused before anything runs
        _ = run.spec
    return Study(**{**vars(study), "rules": rules})


def _check_decided_once(study: Study) -> None:
    """ValueError if a setting would be hidden by the place in the sweep."""
    for group in study.groups:
        for settings in (group.settings, *(variant.settings for variant in group.variants)):
            for name in settings:
                if name in study.points[0]:
                    where = "'lrs' (--lrs)" if name == "lr" else "'search'"
                    raise ValueError(
                        f"study: {name!r} cannot be a setting, the same for all, since it is swept over; its"
                        f" values stand in {where}"
                    )


def _group(content: Mapping[str, Any]) -> Group:
    _check(content, _GROUP, "a group")
    if "task" not in content:
        raise ValueError("study: a group needs 'task'")
    names = _names(content.get("mechanisms", []), "mechanisms")
    variants = [Variant(label=label_of(name), mechanism=name) for name in names]
    for one in _tables(content.get("variant", []), "variant"):
        _check(one, _VARIANT, "a variant")
        if "mechanism" not in one:
            raise ValueError("study: a variant needs 'mechanism'")
        variants.append(
            Variant(
                label=_text(one.get("label", one["mechanism"]), "label"),
                mechanism=_text(one["mechanism"], "mechanism"),
                options=_table(one.get("options", {}), "options"),
                settings=_settings(one.get("settings", {})),
                as_large_as=_text(one.get("as_large_as", ""), "as_large_as"),
            )
        )
    task_name = _text(content["task"], "task")
    group = Group(
        name=_text(content.get("name", task_name), "name"),
        task=task_name,
        knobs=_table(content.get("knobs", {}), "knobs"),
        settings=_settings(content.get("settings", {})),
        variants=tuple(variants),
    )
    controlled = content.get("controls", False)
    if not isinstance(controlled, bool):
        raise ValueError(f"study: 'controls' must be true or false, not {controlled!r}")
    if controlled:
        there = {variant.label for variant in variants}
        group = replace(
            group, variants=(*variants, *(one for one in controls(group) if one.label not in there))
        )
    return group


def controls(group: Group) -> list[Variant]:
    """What a mechanism has to beat: softmax itself, softmax that may attend to nothing, a gate, and more
    softmax: as many parameters as the first other mechanism of the group, twice the heads, twice the layers.

    >>> group = Group(name="census", task="census", variants=(Variant(label="cog", mechanism="cog"),))
    >>> [control.label for control in controls(group)]
    ['softmax', 'softmax1', 'gated+softmax', 'softmax as large', 'softmax ×2 heads', 'softmax ×2 layers']
    """
    from unsoft.tasks import task

    found = [Variant(label=name, mechanism=name) for name in ("softmax", "softmax1", "gated+softmax")]
    for first in [variant.label for variant in group.variants if variant.mechanism != "softmax"][:1]:
        found.append(Variant(label="softmax as large", mechanism="softmax", as_large_as=first))
    setup = task(group.task, **group.knobs).setup
    for name in ("heads", "layers"):
        twice = 2 * group.settings.get(name, getattr(setup, name))
        found.append(Variant(label=f"softmax ×2 {name}", mechanism="softmax", settings={name: twice}))
    return found


def _points(content: Mapping[str, Any], sweep: str, groups: Sequence[Group]) -> tuple[dict[str, Any], ...]:
    """The places of the sweep: all combinations of the listed values, or ``random`` ones."""
    if "lrs" in content and "search" in content:
        raise ValueError("study: give 'lrs' or a table 'search', not both")
    if "lrs" not in content and "search" not in content and sweep == NONE:
        return ({"lr": _own_rate(groups)},)
    search = _table(content.get("search", {"lr": content.get("lrs", list(RATES))}), "search")
    if "lr" not in search:
        raise ValueError("study: 'search' needs learning rates: lr = [0.001, 0.003, 0.01]")
    _settings(dict.fromkeys(search))
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
    from unsoft.tasks import task

    rates = {task(group.task, **group.knobs).setup.lr for group in groups}
    if len(rates) != 1:
        raise ValueError(
            "study: these tasks have different learning rates of their own; name one: lrs = [0.003]"
        )
    return rates.pop()


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, bool) or not isinstance(value, (int, list)):
        raise ValueError(f"study: 'seeds' must be a whole number or a list of them, not {value!r}")
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"study: 'seeds' must be at least 1, not {value}")
        return tuple(range(value))
    if not all(type(seed) is int for seed in value) or len(set(value)) != len(value):
        raise ValueError(f"study: 'seeds' must be different whole numbers, not {value!r}")
    return tuple(value)


def _settings(value: Any) -> dict[str, Any]:
    from dataclasses import fields

    from unsoft.training.spec import Spec

    known = [one.name for one in fields(Spec) if one.name not in _FIXED]
    found = _table(value, "settings")
    for name in found:
        if name not in known:
            raise ValueError(f"study: a run has no setting {name!r}; it has {', '.join(known)}")
    return found


def _check(content: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in content:
        if name not in known:
            raise ValueError(f"study: {what} has no {name!r}; it has {', '.join(known)}")


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"study: {name!r} must be a table, not {value!r}")
    return dict(value)


def _tables(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"study: write [[{name}]], which may be repeated, not {value!r}")
    return [_table(one, name) for one in value]


def _names(value: Any, name: str) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"study: {name!r} must be a list of names, not {value!r}")
    return [_text(one, name) for one in value]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"study: {name!r} must be a text, not {value!r}")
    return value
