"""Studies from TOML, with the short forms that people write, and those that come with the package: one file
each in ``claims``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from unsoft.lab.study.content import as_names, as_settings, as_table, as_tables, as_text, check_known
from unsoft.lab.study.places import places
from unsoft.lab.study.plan import Group, Study, Variant
from unsoft.lab.study.record import TUNED
from unsoft.lab.study.rule import read_rule
from unsoft.modules.registry import label_of

SEEDS = 5
_MOST_SEEDS = 10_000
"""Every seed is a training run of its own; more is a slip of the keyboard."""
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
_GROUP = ("name", "task", "knobs", "settings", "mechanisms", "variant", "controls", "choose_on")
_VARIANT = ("label", "mechanism", "options", "settings", "as_large_as")


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
    check_known(content, _STUDY, "a study")
    groups = tuple(_group(one) for one in as_tables(content.get("group", []), "group"))
    sweep = content.get("sweep", TUNED)
    study = Study(
        name=as_text(content.get("name", "study"), "name"),
        groups=groups,
        seeds=_seeds(content.get("seeds", SEEDS)),
        points=places(content, sweep, groups),
        sweep=sweep,
        tuning_seeds=content.get("tuning_seeds", 1),
        source=as_text(content.get("source", ""), "source"),
        claim=as_text(content.get("claim", ""), "claim"),
        rules=(),
    )
    labels = {group.name: [variant.label for variant in group.variants] for group in groups}
    rules = tuple(read_rule(one, labels) for one in as_tables(content.get("rule", []), "rule"))
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
    check_known(content, _GROUP, "a group")
    if "task" not in content:
        raise ValueError("study: a group needs 'task'")
    names = as_names(content.get("mechanisms", []), "mechanisms")
    variants = [Variant(label=label_of(name), mechanism=name) for name in names]
    for one in as_tables(content.get("variant", []), "variant"):
        check_known(one, _VARIANT, "a variant")
        if "mechanism" not in one:
            raise ValueError("study: a variant needs 'mechanism'")
        variants.append(
            Variant(
                label=as_text(one.get("label", one["mechanism"]), "label"),
                mechanism=as_text(one["mechanism"], "mechanism"),
                options=as_table(one.get("options", {}), "options"),
                settings=as_settings(one.get("settings", {})),
                as_large_as=as_text(one.get("as_large_as", ""), "as_large_as"),
            )
        )
    task_name = as_text(content["task"], "task")
    group = Group(
        name=as_text(content.get("name", task_name), "name"),
        task=task_name,
        knobs=as_table(content.get("knobs", {}), "knobs"),
        settings=as_settings(content.get("settings", {})),
        variants=tuple(variants),
        choose_on=as_text(content.get("choose_on", ""), "choose_on"),
    )
    _check_choose_on(group)
    controlled = content.get("controls", False)
    if not isinstance(controlled, bool):
        raise ValueError(f"study: 'controls' must be true or false, not {controlled!r}")
    if controlled:
        there = {variant.label for variant in variants}
        group = replace(
            group, variants=(*variants, *(one for one in controls(group) if one.label not in there))
        )
    return group


def _check_choose_on(group: Group) -> None:
    """ValueError unless runs of the group are measured there."""
    from unsoft.lab.tasks import task

    made = task(group.task, **group.knobs)
    there = [f"{made.difficulty}={value}" for value in made.difficulties()]
    if group.choose_on and group.choose_on not in there:
        could = f"be one of {', '.join(there)}" if there else f"be left out: {group.task} has one difficulty"
        raise ValueError(f"study: 'choose_on' of {group.name} must {could}; not {group.choose_on!r}")


def controls(group: Group) -> list[Variant]:
    """What a mechanism has to beat: softmax itself, softmax that may attend to nothing, a gate, and more
    softmax: as many parameters as the first other mechanism of the group, twice the heads, twice the layers.

    >>> group = Group(name="census", task="census", variants=(Variant(label="cog", mechanism="cog"),))
    >>> [control.label for control in controls(group)]
    ['softmax', 'softmax1', 'gated+softmax', 'softmax as large', 'softmax ×2 heads', 'softmax ×2 layers']
    """
    from unsoft.lab.tasks import task

    found = [Variant(label=name, mechanism=name) for name in ("softmax", "softmax1", "gated+softmax")]
    for first in [variant.label for variant in group.variants if variant.mechanism != "softmax"][:1]:
        found.append(Variant(label="softmax as large", mechanism="softmax", as_large_as=first))
    setup = task(group.task, **group.knobs).setup
    for name in ("heads", "layers"):
        twice = 2 * group.settings.get(name, getattr(setup, name))
        found.append(Variant(label=f"softmax ×2 {name}", mechanism="softmax", settings={name: twice}))
    return found


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
