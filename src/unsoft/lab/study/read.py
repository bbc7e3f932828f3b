"""Studies from TOML, with short forms, and those that come with the package: one file each in ``claims``."""

from __future__ import annotations

import itertools
import math
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsoft.checks import did_you_mean
from unsoft.lab.study.plan import Group, Study, Variant
from unsoft.lab.study.record import NONE, TUNED
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
    *("name", "source", "claim", "limits", "seeds", "lrs", "search", "random", "sweep", "tuning_seeds"),
    *("tuning_steps", "eliminate", "group", "rule"),
)
_GROUP = ("name", "task", "knobs", "settings", "mechanisms", "variant", "controls", "choose_on", "budget")
_VARIANT = (
    *("label", "mechanism", "options", "settings", "as_large_as", "as_costly_as", "rate_of", "seed_offset"),
)
_RULE = ("group", "mechanism", "over", "margin", "on")
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
    _check_known(content, _STUDY, "a study")
    groups = tuple(_group(one) for one in _tables(content, "group"))
    sweep = content.get("sweep", TUNED)
    study = Study(
        name=_text(content, "name", "study"),
        groups=groups,
        seeds=_seeds(content.get("seeds", SEEDS)),
        points=_points(content, sweep, groups),
        sweep=sweep,
        tuning_seeds=content.get("tuning_seeds", 1),
        tuning_steps=content.get("tuning_steps"),
        eliminate=content.get("eliminate"),
        source=_text(content, "source"),
        claim=_text(content, "claim"),
        limits=_text(content, "limits"),
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
    _check_known(content, _GROUP, "a group")
    if "task" not in content:
        raise ValueError("study: a group needs 'task'")
    names = content.get("mechanisms", [])
    if not isinstance(names, list):
        raise ValueError(f"study: 'mechanisms' must be a list of names, not {names!r}")
    variants = [Variant(label=label_of(name), mechanism=name) for name in map(_mechanism_name, names)]
    variants += [_variant(one) for one in _tables(content, "variant")]
    task_name = _text(content, "task")
    group = Group(
        name=_text(content, "name", task_name),
        task=task_name,
        knobs=_table(content, "knobs"),
        settings=_settings(content),
        variants=tuple(variants),
        budget=_table(content, "budget"),
        choose_on=_text(content, "choose_on"),
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


def _mechanism_name(name: Any) -> str:
    return _text({"mechanisms": name}, "mechanisms")


def _variant(content: Mapping[str, Any]) -> Variant:
    _check_known(content, _VARIANT, "a variant")
    if "mechanism" not in content:
        raise ValueError("study: a variant needs 'mechanism'")
    mechanism = _text(content, "mechanism")
    return Variant(
        label=_text(content, "label", mechanism),
        mechanism=mechanism,
        options=_table(content, "options"),
        settings=_settings(content),
        as_large_as=_text(content, "as_large_as"),
        as_costly_as=_text(content, "as_costly_as"),
        rate_of=_text(content, "rate_of"),
        seed_offset=content.get("seed_offset", 0),
    )


def _check_choose_on(group: Group) -> None:
    """Raise ValueError unless runs of the group are measured at that difficulty."""
    labels = _difficulties(_task_of(group))
    if group.choose_on and group.choose_on not in labels:
        could = (
            f"be one of {', '.join(labels)}" if labels else f"be left out: {group.task} has one difficulty"
        )
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
    _check_known(content, _RULE, "a rule")
    for name in ("mechanism", "over", "margin"):
        if name not in content:
            raise ValueError(f"study: a rule needs {name!r}")
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
    if math.isinf(largest) and not task.higher_is_better:
        largest = task.chance  # an error has no bound, but no baseline should be worse than a guess
    if abs(rule.margin) >= largest - smallest:
        name, cannot = (
            rule.on if rule.on in STATISTICS else task.metric,
            "pass" if rule.margin > 0 else "fail",
        )
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


def _points(content: Mapping[str, Any], sweep: str, groups: Sequence[Group]) -> tuple[dict[str, Any], ...]:
    """Return the points of the sweep: all combinations of the listed values, or ``random`` ones."""
    if "lrs" in content and "search" in content:
        raise ValueError("study: give 'lrs' or a table 'search', not both")
    if "lrs" not in content and "search" not in content and sweep == NONE:
        return ({"lr": _rate_of_task(groups)},)
    search = _table({"search": {"lr": content.get("lrs", list(RATES))}, **content}, "search")
    if "lr" not in search:
        raise ValueError("study: 'search' needs learning rates: lr = [0.001, 0.003, 0.01]")
    _settings({"settings": search})
    drawn = content.get("random")
    if drawn is None:
        for name, values in search.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"study: {name!r} of a sweep must be a list of values, not {values!r}")
        points = [dict(zip(search, values, strict=True)) for values in itertools.product(*search.values())]
        return tuple(point | {"lr": _rate(point["lr"])} for point in points)
    if isinstance(drawn, bool) or not isinstance(drawn, int) or drawn < 1:
        raise ValueError(f"study: 'random' must be a whole number of at least 1, not {drawn!r}")
    dice = random.Random(0)
    return tuple({name: _draw(name, values, dice) for name, values in search.items()} for _ in range(drawn))


def _rate(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and value > 0):
        raise ValueError(f"study: a learning rate must be a number over 0, not {value!r}")
    return float(value)


def _draw(name: str, values: Any, dice: random.Random) -> Any:
    """Draw from a list, or a number between low and high, evenly on a logarithmic scale."""
    if isinstance(values, list) and values:
        chosen = dice.choice(values)
        return _rate(chosen) if name == "lr" else chosen
    if isinstance(values, dict) and sorted(values) == ["high", "low"]:
        low, high = _rate(values["low"]), _rate(values["high"])
        return float(f"{math.exp(dice.uniform(math.log(low), math.log(high))):.3g}")
    raise ValueError(
        f"study: {name!r} of a random search must be a list or {{low = , high = }}, not {values!r}"
    )


def _rate_of_task(groups: Sequence[Group]) -> float:
    """Return the default learning rate of the tasks; ValueError if they differ."""
    rates = {_task_of(group).setup.lr for group in groups}
    if len(rates) != 1:
        raise ValueError(
            "study: these tasks have different learning rates of their own; name one: lrs = [0.003]"
        )
    return rates.pop()


def _check_known(content: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise ValueError for a name that is not ``known``."""
    for name in content:
        if name not in known:
            raise ValueError(f"study: {what} has no {name!r}; it has {', '.join(known)}")


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table 'settings'; ValueError for a setting that a run does not have."""
    from unsoft.lab.training.spec import Spec

    settings = _table(content, "settings")
    known = [one.name for one in fields(Spec) if one.name not in _FIXED]
    for name in settings:
        if name not in known:
            raise ValueError(f"study: a run has no setting {name!r}; it has {', '.join(known)}")
    return settings


def _table(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"study: {name!r} must be a table, not {value!r}")
    return dict(value)


def _tables(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = content.get(name, [])
    if not isinstance(values, list):
        raise ValueError(f"study: write [[{name}]], which may be repeated, not {values!r}")
    return [_table({name: value}, name) for value in values]


def _text(content: Mapping[str, Any], name: str, default: str = "") -> str:
    value = content.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"study: {name!r} must be a text, not {value!r}")
    return value
