"""Studies from TOML, with short forms, and those that come with the package: one file each in ``claims``."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsoft.checks import did_you_mean
from unsoft.lab.study.plan import Group, Study, Variant
from unsoft.lab.study.record import NONE
from unsoft.lab.study.rule import Rule
from unsoft.lab.study.summary import SCORE, STATISTICS, possible_values
from unsoft.modules.registry import label_of

if TYPE_CHECKING:
    from unsoft.lab.tasks import Task

SEEDS = 5
RATES = (0.001, 0.003, 0.01)
"""Learning rates of a study that names none."""
_MOST_SEEDS = 10_000
"""Every seed is a training run of its own; a larger number is a typing error."""
_CLAIMS = Path(__file__).parent / "claims"
_STUDY = (
    *("name", "source", "claim", "limits", "seeds", "lrs", "search", "sweep", "tuning_seeds"),
    *("tuning_steps", "eliminate", "group", "rule"),
)
_GROUP = ("name", "task", "knobs", "settings", "mechanisms", "variant", "controls", "choose_on", "budget")
_TEXTS = (
    *("name", "source", "claim", "limits", "task", "choose_on", "label", "mechanism"),
    *("as_large_as", "as_costly_as", "rate_of"),
)
_TABLES = ("knobs", "settings", "options", "budget", "search")
_FIXED = ("task", "knobs", "mechanism", "options", "seed")
"""Fields of a run that a study decides in other ways than by settings."""


def read_study(path: str | Path) -> Study:
    """Return the study of a TOML file; its name is that of the file unless it has one.

    Without a rule it has the controls, unless a group says ``controls = false``.

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
    if "rule" not in content and isinstance(content.get("group"), list):
        content["group"] = [
            {"controls": True, **group} if isinstance(group, dict) else group for group in content["group"]
        ]
    return make_study({"name": path.stem, **content})


def default_studies() -> dict[str, Path]:
    """Return the studies that come with the package, by name."""
    return {path.stem: path for path in sorted(_CLAIMS.glob("*.toml"))}


def language_studies() -> list[str]:
    """Return the names of those that train language models: their records and pages are separate."""
    return [name for name in default_studies() if name.startswith("language")]


@cache  # studies are frozen, and every claim that one decides reads it
def default_study(name: str) -> Study:
    """Return one of the studies that come with the package.

    >>> default_study("nonsense")
    Traceback (most recent call last):
    ValueError: ...
    """
    files = default_studies()
    if name not in files:
        hint = did_you_mean(name, files) or f"; there are {', '.join(files)}"
        raise ValueError(f"study: there is no default study {name!r}{hint}")
    return read_study(files[name])


def make_study(content: Mapping[str, Any]) -> Study:
    """Return a study from plain data with short forms: seeds as a number, mechanisms as a list of names,
    ``controls = true``.

    >>> group = {"task": "census", "mechanisms": ["softmax", "cog"]}
    >>> study = make_study({"name": "mine", "seeds": 2, "group": [group]})
    >>> len(study), [variant.label for variant in study.groups[0].variants]
    (8, ['softmax', 'cog'])
    """
    _check(content, "a study", _STUDY)
    groups = tuple(_group(one) for one in _tables(content, "group"))
    plain = ("source", "claim", "limits", "sweep", "tuning_seeds", "tuning_steps", "eliminate")
    study = Study(
        name=content.get("name", "study"),
        groups=groups,
        seeds=_seeds(content.get("seeds", SEEDS)),
        points=_points(content, groups),
        **{name: content[name] for name in plain if name in content},
    )
    by_name = {group.name: group for group in groups}
    rules = tuple(_rule(one, by_name) for one in _tables(content, "rule"))
    _check_no_setting_is_swept(study)
    for run in study.runs():  # raise for names and settings that cannot be trained before anything runs
        _ = run.spec
    return replace(study, rules=rules)


def _check_no_setting_is_swept(study: Study) -> None:
    """Raise ValueError if the sweep would hide a setting."""
    for group in study.groups:
        for settings in (group.settings, *(variant.settings for variant in group.variants)):
            for name in settings:
                if name in study.points[0]:
                    where = "'lrs' (--lrs)" if name == "lr" else "'search'"
                    raise ValueError(
                        f"study: {name!r} is swept, so it cannot be a setting, too; put its values in {where}"
                    )


def _group(content: Mapping[str, Any]) -> Group:
    _check(content, "a group", _GROUP, needed="task")
    names = content.get("mechanisms", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"study: 'mechanisms' must be a list of names, not {names!r}")
    variants = [Variant(label=label_of(name), mechanism=name) for name in names]
    variants += [_variant(one) for one in _tables(content, "variant")]
    plain = ("task", "knobs", "settings", "budget", "choose_on")
    group = Group(
        name=content.get("name", content["task"]),
        variants=tuple(variants),
        **{name: content[name] for name in plain if name in content},
    )
    _check_choose_on(group)
    controlled = content.get("controls", False)
    if not isinstance(controlled, bool):
        raise ValueError(f"study: 'controls' must be true or false, not {controlled!r}")
    if controlled:
        labels = {variant.label for variant in variants}
        added = [control for control in controls(group) if control.label not in labels]
        group = replace(group, variants=(*variants, *added))
    return group


def _variant(content: Mapping[str, Any]) -> Variant:
    _check(content, "a variant", [one.name for one in fields(Variant)], needed="mechanism")
    return Variant(**{"label": content["mechanism"], **content})


def _check_choose_on(group: Group) -> None:
    """Raise ValueError unless runs of the group are measured at that difficulty."""
    labels = _difficulties(_task_of(group))
    if group.choose_on and group.choose_on not in labels:
        could = f"be left out: {group.task} has one difficulty"
        could = f"be one of {', '.join(labels)}" if labels else could
        raise ValueError(f"study: 'choose_on' of {group.name} must {could}; not {group.choose_on!r}")


def _task_of(group: Group) -> Task:
    from unsoft.lab.tasks import task

    return task(group.task, **group.knobs)


def _difficulties(task: Task) -> list[str]:
    return [f"{task.difficulty}={value}" for value in task.difficulties()]


def controls(group: Group) -> list[Variant]:
    """Return the baselines that a mechanism has to beat: softmax, softmax that may attend to nothing, a gate,
    and larger softmax: the parameters of the first other mechanism of the group, twice the heads, twice the
    layers.

    >>> group = Group(name="census", task="census", variants=(Variant(label="cog", mechanism="cog"),))
    >>> [control.label for control in controls(group)]
    ['softmax', 'softmax1', 'gated+softmax', 'softmax as large', 'softmax ×2 heads', 'softmax ×2 layers']
    """
    variants = [Variant(label=name, mechanism=name) for name in ("softmax", "softmax1", "gated+softmax")]
    for first in [variant.label for variant in group.variants if variant.mechanism != "softmax"][:1]:
        variants.append(Variant(label="softmax as large", mechanism="softmax", as_large_as=first))
    setup = _task_of(group).setup
    for name in ("heads", "layers"):
        twice = 2 * group.settings.get(name, getattr(setup, name))
        variants.append(Variant(label=f"softmax ×2 {name}", mechanism="softmax", settings={name: twice}))
    return variants


def _rule(content: Mapping[str, Any], groups: Mapping[str, Group]) -> Rule:
    _check(content, "a rule", [one.name for one in fields(Rule)], needed="mechanism")
    if "over" not in content:
        raise ValueError("study: a rule needs 'over'")
    if ("margin" in content) == ("at_most" in content):
        raise ValueError("study: a rule needs 'margin' or 'at_most', and not both")
    over = [content["over"]] if isinstance(content["over"], str) else content["over"]
    if not isinstance(over, list):
        raise ValueError(f"study: 'over' of a rule must be a list of mechanisms, not {over!r}")
    group = content.get("group", next(iter(groups)))
    for name, value in (("group", group), ("on", content.get("on", SCORE))):
        if not isinstance(value, str):
            raise ValueError(f"study: {name!r} of a rule must be a text, not {value!r}")
    rule = Rule(**{**content, "group": group, "over": over})
    if group not in groups:
        raise ValueError(f"study: a rule is about {group!r}, and the study has {', '.join(groups)}")
    labels = [variant.label for variant in groups[group].variants]
    for label in (rule.mechanism, *rule.over):
        if label not in labels:
            raise ValueError(f"study: a rule is about {label!r}, and {group} has {', '.join(labels)}")
    _check_decidable(rule, _task_of(groups[group]))
    return rule


def _check_decidable(rule: Rule, task: Task) -> None:
    """Raise ValueError if nothing measures what the rule is about, or if it cannot pass or cannot fail."""
    measured = (SCORE, *_difficulties(task), *task.further(), *STATISTICS)
    if rule.on not in measured:
        raise ValueError(f"study: 'on' of a rule must be one of {', '.join(measured)}; not {rule.on!r}")
    smallest, largest = possible_values(rule.on, task.metric, higher_is_better=task.higher_is_better)
    if rule.at_most is not None:
        if rule.on not in STATISTICS or not smallest < rule.at_most < largest:
            raise ValueError(
                f"study: 'at_most' of a rule bounds a statistic of attention, 'on' {', '.join(STATISTICS)},"
                f" and must be inside its range to pass or fail; not {rule.at_most:g} of {rule.on}"
            )
        return
    if math.isinf(largest) and not task.higher_is_better:
        largest = task.chance  # an error has no bound, but no baseline should be worse than a guess
    if abs(rule.margin) >= largest - smallest:
        name = rule.on if rule.on in STATISTICS else task.metric
        cannot = "pass" if rule.margin > 0 else "fail"
        raise ValueError(
            f"study: a rule with margin {rule.margin:g} cannot {cannot}: {name} goes from {smallest:g} to"
            f" {largest:g}"
        )


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, bool) or not isinstance(value, (int, list)):
        raise ValueError(f"study: 'seeds' must be a whole number or a list of them, not {value!r}")
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"study: 'seeds' must be at least 1, not {value}")
        if value > _MOST_SEEDS:
            raise ValueError(f"study: 'seeds' must be at most {_MOST_SEEDS}, not {value}")
        return tuple(range(value))
    if not all(type(seed) is int for seed in value) or len(set(value)) != len(value):
        raise ValueError(f"study: 'seeds' must be different whole numbers, not {value!r}")
    return tuple(value)


def _points(content: Mapping[str, Any], groups: Sequence[Group]) -> tuple[dict[str, Any], ...]:
    """Return the points of the sweep: all combinations of the listed values."""
    if "lrs" in content and "search" in content:
        raise ValueError("study: give 'lrs' or a table 'search', not both")
    if "lrs" not in content and "search" not in content and content.get("sweep") == NONE:
        return ({"lr": _rate_of_task(groups)},)
    search = content.get("search", {"lr": content.get("lrs", list(RATES))})
    if "lr" not in search:
        raise ValueError("study: 'search' needs learning rates: lr = [0.001, 0.003, 0.01]")
    _check_settings(search)
    for name, values in search.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"study: {name!r} of a sweep must be a list of values, not {values!r}")
    points = [dict(zip(search, values, strict=True)) for values in itertools.product(*search.values())]
    return tuple(point | {"lr": _rate(point["lr"])} for point in points)


def _rate(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and value > 0):
        raise ValueError(f"study: a learning rate must be a number over 0, not {value!r}")
    return float(value)


def _rate_of_task(groups: Sequence[Group]) -> float:
    """Return the default learning rate of the tasks; ValueError if they differ."""
    rates = {_task_of(group).setup.lr for group in groups}
    if len(rates) != 1:
        problem = "these tasks have different learning rates of their own"
        raise ValueError(f"study: {problem}; name one: lrs = [0.003]")
    return rates.pop()


def _check(content: Mapping[str, Any], what: str, known: Sequence[str], needed: str = "") -> None:
    """Raise ValueError for an unknown or a missing name, or for a value of another type."""
    for name, value in content.items():
        if name not in known:
            raise ValueError(f"study: {what} has no {name!r}; it has {', '.join(known)}")
        for names, kind, word in ((_TEXTS, str, "text"), (_TABLES, dict, "table")):
            if name in names and not isinstance(value, kind):
                raise ValueError(f"study: {name!r} must be a {word}, not {value!r}")
    if needed and needed not in content:
        raise ValueError(f"study: {what} needs {needed!r}")
    _check_settings(content.get("settings", {}))


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that a run does not have."""
    from unsoft.lab.training.spec import Spec

    known = [one.name for one in fields(Spec) if one.name not in _FIXED]
    for name in settings:
        if name not in known:
            raise ValueError(f"study: a run has no setting {name!r}; it has {', '.join(known)}")


def _tables(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = content.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"study: write [[{name}]], which may be repeated, not {values!r}")
    return values
