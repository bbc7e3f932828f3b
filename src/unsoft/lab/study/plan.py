"""A study as data: which mechanisms on which tasks, at which learning rates, how often, and which runs that
makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unsoft.lab.study.record import FULL, NONE, SWEEPS, TUNED, Record
from unsoft.lab.study.rule import Rule
from unsoft.lab.study.summary import best_point

if TYPE_CHECKING:
    from unsoft.lab.training import Spec

_FEWEST_RATES = 3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A mechanism with its options and the model around it, under a label of its own."""

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
    """Mechanisms on one task at one difficulty, that are compared with each other."""

    name: str
    task: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of every variant, unless it has its own."""
    variants: Sequence[Variant] = ()
    choose_on: str = ""
    """The difficulty, such as "crowd=128", by whose validation examples places of the sweep are compared; ""
    for that of training. It belongs where the rule judges: at the difficulty of training several rates may
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
        """What is trained, with nothing left open."""
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
    def place(self) -> tuple[str, str, int, str]:
        """Where in the study it stands."""
        return self.group.name, self.variant.label, self.seed, label_of(self.point)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study. :func:`unsoft.lab.study.read_study` makes one from a TOML file.

    sweep
        "full": every seed at every place of the sweep. "tuned": every place on the first ``tuning_seeds``
        seeds, then the best by validation on the others. "none": one place, and every number says that there
        was no sweep.
    """

    name: str
    groups: Sequence[Group]
    seeds: Sequence[int]
    points: Sequence[Mapping[str, Any]]
    """The places of the sweep: settings, with a learning rate each. The same for every mechanism."""
    sweep: str = TUNED
    tuning_seeds: int = 1
    source: str = ""
    claim: str = ""
    rules: Sequence[Rule] = ()

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
        """How many runs there will be."""
        many, places = len(self.seeds), len(self.points)
        tuned = places * self.tuning_seeds + many - self.tuning_seeds
        each = {TUNED: tuned, FULL: places * many, NONE: many}[self.sweep]
        return each * sum(len(group.variants) for group in self.groups)

    def runs(self, known: Sequence[Record] = ()) -> Iterator[Run]:
        """The runs that are decided: all but those of a tuned study whose rate the runs so far have not
        chosen yet.
        """
        first = list(self.seeds) if self.sweep != TUNED else list(self.seeds[: self.tuning_seeds])
        swept = self.sweep != NONE
        for seed in first:
            for group in self.groups:
                for variant in group.variants:
                    for point in self.points:
                        yield Run(group=group, variant=variant, point=point, seed=seed, swept=swept)
        for seed in self.seeds[len(first) :]:
            for group in self.groups:
                for variant in group.variants:
                    mine = [
                        r for r in known if (r.group, r.mechanism) == (group.name, variant.label) and r.swept
                    ]
                    whole = len(mine) == len(self.points) * len(first)
                    best = best_point(mine) if whole else None
                    for point in self.points:
                        if label_of(point) == best:
                            yield Run(group=group, variant=variant, point=point, seed=seed, swept=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"rules": [rule.to_dict() for rule in self.rules]}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Study:
        """The inverse of :meth:`to_dict`."""
        groups = [
            Group(**{**group, "variants": tuple(Variant(**one) for one in group["variants"])})
            for group in content["groups"]
        ]
        rules = tuple(Rule(**rule) for rule in content["rules"])
        return Study(**{**content, "groups": tuple(groups), "rules": rules})

    def with_sizes(self) -> Study:
        """The same with every ``as_large_as`` replaced by the width it means; ValueError for what cannot be
        trained.
        """
        from unsoft.lab.study.sizes import width_of_equal_parameters

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
                        continue  # it is as large as it stands, so there is nothing to add to the others
                    sizes = {**variant.settings, "width": width, "mlp": 2 * width}
                    variant = replace(variant, as_large_as="", settings=sizes)
                variants.append(variant)
            groups.append(replace(group, variants=tuple(variants)))
        study = replace(self, groups=tuple(groups))
        study._check_different()
        return study

    def _example(self, group: Group, variant: Variant) -> Spec:
        run = Run(group=group, variant=variant, point=self.points[0], seed=self.seeds[0], swept=False)
        return run.spec

    def _check_different(self) -> None:
        """ValueError if two variants are the same run, or a rule is about one that was left out."""
        for group in self.groups:
            seen: list[tuple[str, Spec]] = []
            for variant in group.variants:
                spec = self._example(group, variant)
                for label, other in seen:
                    if spec == other:
                        raise ValueError(
                            f"study: {label!r} and {variant.label!r} of {group.name} are the same run"
                        )
                seen.append((variant.label, spec))
            labels = [label for label, _ in seen]
            for rule in self.rules:
                for label in (rule.mechanism, *rule.over):
                    if rule.group == group.name and label not in labels:
                        raise ValueError(
                            f"study: a rule is about {label!r}, which is as large as it stands:"
                            " a rule about the same mechanism without it says the same"
                        )


def label_of(point: Mapping[str, Any]) -> str:
    """A place in the sweep, in words.

    >>> label_of({"lr": 0.003, "weight_decay": 0})
    'lr=0.003, weight_decay=0'
    """
    return ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in point.items()
    )


def _unique(names: Sequence[str], problem: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"study: {problem} {name!r}; give them labels of their own")
