"""A study as data: mechanisms, tasks, learning rates and seeds, and the training runs that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unsoft.lab.study.record import FULL, NONE, SWEEPS, TUNED, Record
from unsoft.lab.study.rule import Rule
from unsoft.lab.study.summary import CONTROL, best_point

if TYPE_CHECKING:
    from unsoft.lab.training import Spec

_FEWEST_RATES = 3
_BASELINES = (CONTROL, "softmax1", "gated+softmax")
"""Mechanisms that the default rule does not judge."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A mechanism with its options and the model around it, under its own label."""

    label: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`unsoft.lab.training.Spec`: heads, layers, width, steps, ..."""
    as_large_as: str = ""
    """The label of another variant: the width becomes the smallest with which this one has at least as many
    parameters.
    """


@dataclass(frozen=True, kw_only=True)
class Group:
    """Mechanisms that are compared with each other on one task at one difficulty."""

    name: str
    task: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every variant that does not override them."""
    variants: Sequence[Variant] = ()
    choose_on: str = ""
    """The difficulty, such as "crowd=128", on whose validation examples points of the sweep are compared; ""
    for that of training. Choose the one that the rule judges: at the difficulty of training several rates may
    all be perfect.
    """


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of a study."""

    group: Group
    variant: Variant
    point: Mapping[str, Any]
    seed: int
    swept: bool

    @property
    def spec(self) -> Spec:
        """The complete training spec."""
        from unsoft.lab.training import Spec

        content = {**self.group.settings, **self.variant.settings, **self.point}
        return Spec(
            task=self.group.task,
            knobs=self.group.knobs,
            mechanism=self.variant.mechanism,
            options=self.variant.options,
            seed=self.seed,
            **content,
        ).filled()

    @property
    def position(self) -> tuple[str, str, int, str]:
        """Group, mechanism, seed and point of the sweep."""
        return self.group.name, self.variant.label, self.seed, label_of(self.point)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study. :func:`unsoft.lab.study.read_study` makes one from a TOML file.

    sweep
        "full": every seed at every point of the sweep. "tuned": every point on the first ``tuning_seeds``
        seeds, then the best by validation on the others. "none": one point, and every number is shown with a
        note that there was no sweep.
    """

    name: str
    groups: Sequence[Group]
    seeds: Sequence[int]
    points: Sequence[Mapping[str, Any]]
    """Points of the sweep: settings, each with a learning rate. The same for every mechanism."""
    sweep: str = TUNED
    tuning_seeds: int = 1
    source: str = ""
    claim: str = ""
    limits: str = ""
    """What the verdict does not show, in one or two sentences, for everyone who reads it."""
    rules: Sequence[Rule] = ()

    @property
    def judged_by(self) -> Sequence[Rule]:
        """The rules, or without any: every mechanism must beat softmax, and softmax of its own size.

        >>> variants = [Variant(label=name, mechanism=name) for name in ("softmax", "cog")]
        >>> group = Group(name="copy", task="copy", variants=variants)
        >>> study = Study(name="s", groups=[group], seeds=[0], points=[{"lr": 0.1}], sweep="none")
        >>> [rule.text for rule in study.judged_by]
        ['copy: cog must beat softmax on the test']
        """
        if self.rules:
            return self.rules
        return tuple(
            Rule(group=group.name, mechanism=variant.label, over=over, margin=0.0)
            for group in self.groups
            for variant in group.variants
            if variant.mechanism not in _BASELINES
            and (
                over := [
                    one.label
                    for one in group.variants
                    if one.label == CONTROL or (one.mechanism == CONTROL and one.as_large_as == variant.label)
                ]
            )
        )

    def __post_init__(self) -> None:
        if not self.groups or not all(group.variants for group in self.groups):
            raise ValueError(f"study: {self.name!r} needs at least one task and one mechanism")
        if not self.seeds:
            raise ValueError("study: 'seeds' must be at least 1, not 0")
        if not isinstance(self.sweep, str) or self.sweep not in SWEEPS:
            raise ValueError(f"study: 'sweep' must be one of {', '.join(SWEEPS)}, not {self.sweep!r}")
        rates = {point["lr"] for point in self.points}
        if self.sweep == NONE and len(self.points) != 1:
            raise ValueError(
                f"study: without a sweep there is one learning rate, and {len(self.points)} are given"
            )
        if self.sweep != NONE and len(rates) < _FEWEST_RATES:
            given = f"{len(rates)} {'is' if len(rates) == 1 else 'are'} given"
            raise ValueError(
                f"study: a sweep needs at least {_FEWEST_RATES} learning rates, and {given};"
                ' sweep = "none" (--sweep none) goes without, and says so beside every number'
            )
        for group in self.groups:
            if self.sweep == NONE and group.choose_on:
                raise ValueError(f"study: 'choose_on' of {group.name} chooses nothing without a sweep")
        if type(self.tuning_seeds) is not int or not 1 <= self.tuning_seeds <= len(self.seeds):
            raise ValueError(
                f"study: 'tuning_seeds' must be a whole number from 1 to the number of seeds,"
                f" {len(self.seeds)}, not {self.tuning_seeds!r}"
            )
        _unique([group.name for group in self.groups], "two groups are called")
        for group in self.groups:
            _unique(
                [variant.label for variant in group.variants], f"two mechanisms of {group.name} are called"
            )

    def __len__(self) -> int:
        """Return the number of runs when the study is complete."""
        seeds, points = len(self.seeds), len(self.points)
        tuned = points * self.tuning_seeds + seeds - self.tuning_seeds
        each = {TUNED: tuned, FULL: points * seeds, NONE: seeds}[self.sweep]
        return each * sum(len(group.variants) for group in self.groups)

    def runs(self, known: Sequence[Record] = ()) -> Iterator[Run]:
        """Yield the runs that are decided: in a tuned study, those of later seeds follow once the known runs
        have chosen a rate.
        """
        tuning = list(self.seeds) if self.sweep != TUNED else list(self.seeds[: self.tuning_seeds])
        variants = [(group, variant) for group in self.groups for variant in group.variants]
        for seed in tuning:
            for group, variant in variants:
                for point in self.points:
                    swept = self.sweep != NONE
                    yield Run(group=group, variant=variant, point=point, seed=seed, swept=swept)
        for seed in self.seeds[len(tuning) :]:
            for group, variant in variants:
                swept_runs = [
                    run
                    for run in known
                    if run.swept and (run.group, run.mechanism) == (group.name, variant.label)
                ]
                complete = len(swept_runs) == len(self.points) * len(tuning)
                best = best_point(swept_runs) if complete else None
                for point in self.points:
                    if label_of(point) == best:
                        yield Run(group=group, variant=variant, point=point, seed=seed, swept=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"rules": [rule.to_dict() for rule in self.rules]}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Study:
        """Return the study of :meth:`to_dict`."""
        groups = [
            Group(**{**group, "variants": tuple(Variant(**one) for one in group["variants"])})
            for group in content["groups"]
        ]
        rules = tuple(Rule(**rule) for rule in content["rules"])
        return Study(**{**content, "groups": tuple(groups), "rules": rules})

    def with_sizes(self) -> Study:
        """Return the study with every ``as_large_as`` replaced by the width it means.

        Raise ValueError if two variants would be the same run, or a rule names a variant that was left out
        because it is as large without a change.
        """
        groups = []
        for group in self.groups:
            specs = {variant.label: self._example(group, variant) for variant in group.variants}
            variants = []
            for variant in group.variants:
                if variant.as_large_as:
                    if variant.as_large_as not in specs:
                        raise ValueError(
                            f"study: {variant.label!r} is to be as large as {variant.as_large_as!r},"
                            f" and {group.name} has {', '.join(specs)}"
                        )
                    width = width_of_equal_parameters(specs[variant.label], specs[variant.as_large_as])
                    if width == specs[variant.label].width:
                        continue  # it is as large already, so there is nothing to add to the others
                    sizes = {**variant.settings, "width": width, "mlp": 2 * width}
                    variant = replace(variant, as_large_as="", settings=sizes)
                variants.append(variant)
            groups.append(replace(group, variants=tuple(variants)))
        study = replace(self, groups=tuple(groups))
        for group in study.groups:
            study._check_variants(group)
        return study

    def _example(self, group: Group, variant: Variant) -> Spec:
        run = Run(group=group, variant=variant, point=self.points[0], seed=self.seeds[0], swept=False)
        return run.spec

    def _check_variants(self, group: Group) -> None:
        specs: dict[str, Spec] = {}
        for variant in group.variants:
            spec = self._example(group, variant)
            for label, other in specs.items():
                if spec == other:
                    raise ValueError(
                        f"study: {label!r} and {variant.label!r} of {group.name} are the same run"
                    )
            specs[variant.label] = spec
        for rule in self.rules:
            for label in (rule.mechanism, *rule.over):
                if rule.group == group.name and label not in specs:
                    raise ValueError(
                        f"study: a rule is about {label!r}, which is as large as it stands:"
                        " a rule about the same mechanism without it says the same"
                    )


def label_of(point: Mapping[str, Any]) -> str:
    """Return the label of a point of the sweep.

    >>> label_of({"lr": 0.003, "weight_decay": 0})
    'lr=0.003, weight_decay=0'
    """
    return ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in point.items()
    )


def earlier_words(study: Study, records: Sequence[Record]) -> str:
    """Describe how records differ from what the study would run now; "" if they do not.

    >>> from unsoft.lab.study.read import make_study
    >>> study = make_study({"name": "s", "seeds": 3, "group": [{"task": "census", "mechanisms": ["cog"]}]})
    >>> run = {"study": "s", "group": "census", "task": "census", "mechanism": "cog", "point": "lr=0.01"}
    >>> earlier_words(study, [Record(**run, seed=7, lr=0.01, key="k")])
    'these runs are of an earlier version of the study, with other seeds'
    """
    chosen_on = {group.name: group.choose_on for group in study.groups}
    points = {label_of(point) for point in study.points}
    differs = {
        "seeds": any(run.seed not in study.seeds for run in records),
        "rates": any(run.point not in points for run in records),
        "examples by which rates are chosen": any(
            run.choose_on != chosen_on.get(run.group, run.choose_on) for run in records
        ),
    }
    names = [name for name in differs if differs[name]]
    if not names:
        return ""
    return f"these runs are of an earlier version of the study, with other {' and other '.join(names)}"


def count_parameters(spec: Spec) -> int:
    """Return the number of parameters of the model that a spec describes.

    >>> from unsoft.lab.training import Spec
    >>> count_parameters(Spec(task="copy", width=16)) < count_parameters(Spec(task="copy", width=24))
    True
    """
    from unsoft.lab.training.model import build

    full = spec.filled()
    return sum(parameter.numel() for parameter in build(full, full.make_task()).parameters())


def width_of_equal_parameters(spec: Spec, like: Spec) -> int:
    """Return the smallest width with which ``spec`` has at least the parameters of ``like``, with an MLP
    twice as wide.

    >>> from unsoft.lab.training import Spec
    >>> small = Spec(task="copy", mechanism="softmax", width=16, heads=2)
    >>> gated = Spec(task="copy", mechanism="gated+softmax", width=16, heads=2)
    >>> width_of_equal_parameters(small, small), width_of_equal_parameters(small, gated)
    (16, 20)
    """
    wanted, full = count_parameters(like), spec.filled()
    assert full.width and full.heads
    width = full.width
    while count_parameters(replace(full, width=width, mlp=2 * width)) < wanted:
        width += 2 * full.heads  # the width of a head must stay even, for rotary positions
    return width


def _unique(names: Sequence[str], problem: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"study: {problem} {name!r}; give them labels of their own")
