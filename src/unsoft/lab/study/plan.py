"""A study as data: mechanisms, tasks, learning rates and seeds, and the training runs that they make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from unsoft.lab.study.budget import check_budget, seconds_per_step, steps_for
from unsoft.lab.study.record import NONE, SHORT, SWEEPS, TUNED, Record
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
    as_costly_as: str = ""
    """The label of another variant: the steps become those that take as long as that one's."""
    rate_of: str = ""
    """The label of another variant, earlier in the group, whose learning rate this one takes without a sweep
    of its own; only with ``sweep = "short"``."""
    seed_offset: int = 0
    """Added to every seed: the same mechanism with other seeds is a negative control."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Mechanisms that are compared with each other on one task at one difficulty."""

    name: str
    task: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every variant that does not override them."""
    variants: Sequence[Variant] = ()
    budget: Mapping[str, float] = field(default_factory=dict)
    """Steps of every variant, as ``tokens``, ``flops`` or ``seconds`` of a run."""
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
    steps: int | None = None
    """Steps of a shorter run, by which a rate is chosen."""

    @property
    def spec(self) -> Spec:
        """The complete training spec."""
        from unsoft.lab.training import Spec

        content = {**self.group.settings, **self.variant.settings, **self.point}
        if self.steps is not None:
            content["steps"] = self.steps
        return Spec(
            task=self.group.task,
            knobs=self.group.knobs,
            mechanism=self.variant.mechanism,
            options=self.variant.options,
            seed=self.seed + self.variant.seed_offset,
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
        seeds, then the best by validation on the others. "short": the same with ``tuning_steps`` steps, and
        the first seeds choose only. One mechanism follows another, so that a study that is cut short has
        complete results of some. A sweep begins with the middle three points, in the order of the learning
        rate, and continues beyond an end that is best. "none": one point, and every number is shown with a
        note that there was no sweep.
    tuning_steps, eliminate
        Only for "short": steps of the runs that choose; and by how much a mechanism may be worse than softmax
        in them, on the validation examples, to run on the other seeds at all.
    """

    name: str
    groups: Sequence[Group]
    seeds: Sequence[int]
    points: Sequence[Mapping[str, Any]]
    """Points of the sweep: settings, each with a learning rate. The same for every mechanism."""
    sweep: str = TUNED
    tuning_seeds: int = 1
    tuning_steps: int | None = None
    eliminate: float | None = None
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
            given = f"{len(self.points)} are given"
            raise ValueError(f"study: without a sweep there is one learning rate, and {given}")
        if self.sweep != NONE and len(rates) < _FEWEST_RATES:
            given = f"{len(rates)} {'is' if len(rates) == 1 else 'are'} given"
            raise ValueError(
                f"study: a sweep needs at least {_FEWEST_RATES} learning rates, and {given};"
                ' sweep = "none" (--sweep none) goes without, and says so beside every number'
            )
        self._check_short()
        for group in self.groups:
            check_budget(group.budget)
            if self.sweep == NONE and group.choose_on:
                raise ValueError(f"study: 'choose_on' of {group.name} chooses nothing without a sweep")
        if type(self.tuning_seeds) is not int or not 1 <= self.tuning_seeds <= len(self.seeds):
            raise ValueError(
                f"study: 'tuning_seeds' must be a whole number from 1 to the number of seeds,"
                f" {len(self.seeds)}, not {self.tuning_seeds!r}"
            )
        _unique([group.name for group in self.groups], "two groups are called")
        for group in self.groups:
            labels = [variant.label for variant in group.variants]
            _unique(labels, f"two mechanisms of {group.name} are called")

    def _check_short(self) -> None:
        short = self.sweep == SHORT
        if short != (self.tuning_steps is not None):
            raise ValueError("study: 'tuning_steps' and sweep = \"short\" belong together")
        if short and self.tuning_seeds == len(self.seeds):
            raise ValueError("study: sweep = \"short\" needs more seeds than 'tuning_seeds'")
        if self.eliminate is not None and not short:
            raise ValueError("study: 'eliminate' needs sweep = \"short\"")
        for group in self.groups:
            earlier: list[str] = []
            for variant in group.variants:
                if variant.rate_of and (not short or variant.rate_of not in earlier):
                    raise ValueError(
                        f"study: 'rate_of' of {variant.label!r} must be a variant before it, and needs"
                        f' sweep = "short"; not {variant.rate_of!r}'
                    )
                earlier.append(variant.label)

    def __len__(self) -> int:
        """Return the number of runs when the study is complete; more if a sweep has to be widened."""
        return self.total()

    def total(self, known: Sequence[Record] = ()) -> int:
        """Return the number of runs when the study is complete, as far as the known runs decide it."""
        return sum(len(self._runs_of(*pair, known, expected=True)) for pair in self._pairs())

    def runs(self, known: Sequence[Record] = ()) -> Iterator[Run]:
        """Yield the runs that are decided: those of later seeds follow once the known runs have chosen a
        rate.
        """
        runs = [run for pair in self._pairs() for run in self._runs_of(*pair, known)]
        if self.sweep != SHORT:
            runs.sort(key=lambda run: self.seeds.index(run.seed))
        yield from runs

    def expected_runs(self, group: Group, variant: Variant) -> list[Run]:
        """Return the runs of a mechanism when the study is complete. Their rates may be others, and a sweep
        may be widened."""
        return self._runs_of(group, variant, (), expected=True)

    def _pairs(self) -> list[tuple[Group, Variant]]:
        return [(group, variant) for group in self.groups for variant in group.variants]

    def _runs_of(
        self, group: Group, variant: Variant, known: Sequence[Record], *, expected: bool = False
    ) -> list[Run]:
        """Return the runs of a mechanism that are decided, and with ``expected`` those that will be if its
        sweep needs no more points and it is not eliminated.
        """
        count = self.tuning_seeds if self.sweep in (TUNED, SHORT) else len(self.seeds)
        tuning, others = self.seeds[:count], self.seeds[count:]
        of = variant.rate_of or variant.label
        points, best = self._swept_points(group, of, known)
        runs = []
        if not variant.rate_of:
            parts: dict[str, Any] = {"group": group, "variant": variant, "swept": self.sweep != NONE}
            pairs = itertools.product(tuning, points)
            runs = [Run(**parts, point=point, seed=seed, steps=self.tuning_steps) for seed, point in pairs]
        if (best is None and not expected) or (best is not None and self._is_eliminated(group, of, known)):
            return runs
        point = best or self.points[0]
        return [*runs, *(Run(group=group, variant=variant, point=point, seed=s, swept=False) for s in others)]

    def _swept_points(
        self, group: Group, label: str, known: Sequence[Record]
    ) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any] | None]:
        """Return the points of the sweep of a mechanism that are decided, and the best if it is, too."""
        points, first, last = self.points, 0, len(self.points) - 1
        if self.sweep == SHORT:  # begins with the middle of the rates
            points = sorted(points, key=lambda point: float(point["lr"]))
            first = max(0, (len(points) - _FEWEST_RATES) // 2)
            last = first + _FEWEST_RATES - 1
        swept = [run for run in known if run.swept and (run.group, run.mechanism) == (group.name, label)]
        while True:
            tried = [label_of(point) for point in points[first : last + 1]]
            runs = [run for run in swept if run.point in tried]
            if len(runs) < len(tried) * self.tuning_seeds or (best := best_point(runs)) is None:
                return points[first : last + 1], None
            place = first + tried.index(best)
            if place == first > 0:
                first -= 1
            elif place == last < len(points) - 1:
                last += 1
            else:
                return points[first : last + 1], points[place]

    def _is_eliminated(self, group: Group, label: str, known: Sequence[Record]) -> bool:
        """Return True if a mechanism is worse than softmax by more than ``eliminate`` in the short runs."""
        if self.eliminate is None:
            return False
        merits = []
        for name in (label, CONTROL):
            runs = [r for r in known if r.swept and (r.group, r.mechanism) == (group.name, name)]
            best = best_point(runs)
            mine = [r.merit for r in runs if r.point == best and r.merit is not None]
            if not mine:
                return False
            merits.append(sum(mine) / len(mine) * (1 if runs[0].higher_is_better else -1))
        return merits[0] < merits[1] - self.eliminate

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

    def with_sizes(self, known_steps: Mapping[tuple[str, str], int] | None = None) -> Study:
        """Return the study with every ``as_large_as`` replaced by the width it means, and every ``budget``
        and ``as_costly_as`` by steps. ``known_steps`` has those that were measured before, by group and
        label.

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
        study = replace(study, groups=tuple(study._with_steps(one, known_steps or {}) for one in groups))
        for group in study.groups:
            study._check_variants(group)
        return study

    def _with_steps(self, group: Group, known: Mapping[tuple[str, str], int]) -> Group:
        """Return the group with the steps of its budget, and of the time of another variant."""
        variants = {variant.label: variant for variant in group.variants}
        for label, variant in variants.items():
            if not group.budget and not variant.as_costly_as:
                continue
            steps = known.get((group.name, label))
            if steps is None and group.budget and not variant.as_costly_as:
                steps = steps_for(self._example(group, variant), group.budget)
            elif steps is None:
                if variant.as_costly_as not in variants:
                    raise ValueError(
                        f"study: {label!r} is to be as costly as {variant.as_costly_as!r},"
                        f" and {group.name} has {', '.join(variants)}"
                    )
                pair = [self._example(group, variants[name]) for name in (variant.as_costly_as, label)]
                like, own = seconds_per_step(pair)
                steps = max(1, round((pair[0].steps or 1) * like / own))
            settings = {**variant.settings, "steps": steps}
            variants[label] = replace(variant, as_costly_as="", settings=settings)
        return replace(group, budget={}, variants=tuple(variants.values()))

    def _example(self, group: Group, variant: Variant) -> Spec:
        run = Run(group=group, variant=variant, point=self.points[0], seed=self.seeds[0], swept=False)
        return run.spec

    def _check_variants(self, group: Group) -> None:
        specs: dict[str, Spec] = {}
        for variant in group.variants:
            spec = self._example(group, variant)
            for label, other in specs.items():
                if spec == other:
                    pair = f"{label!r} and {variant.label!r}"
                    raise ValueError(f"study: {pair} of {group.name} are the same run")
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
