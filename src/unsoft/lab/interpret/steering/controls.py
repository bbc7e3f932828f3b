"""Test whether steering is a real intervention: one table of controls, for texts or other items.

The effect of directions is the change of a score, item by item, on items that were not used to fit them. The
rules are fixed here. The effect counts as real if it exists, if no control has as much of it, and if it grows
with the strength; partly if something else suffers by more than a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.checks import finite, one_of
from unsoft.lab.bench.machine import package_versions
from unsoft.lab.evidence import NOT_SUPPORTED, PARTLY, SUPPORTED, MeanInterval, grade, resampled_mean
from unsoft.lab.interpret.records import SCHEMA, write_files
from unsoft.lab.interpret.steering.directions import ALL, BLOCK, Directions, steering
from unsoft.lab.interpret.steering.fit import LAST, METHODS, check_pairs, encoded, paired_states
from unsoft.lab.report.page import line_chart, page

HERE = Path(__file__).parent
DRAWS = 19
"""Random directions of each kind: if none has as much effect, chance has at most 1 in 20."""
DOSES = (-1.0, -0.5, 0.0, 0.5, 1.0)
"""Fractions of the strength."""
VERDICT_RULE = (
    f"{SUPPORTED!r} if every control passes; {PARTLY!r} if only side effects fail; else {NOT_SUPPORTED!r}"
)
MARGIN = 0.1
"""Nats per token by which the loss on unrelated text may rise."""
_CHUNK, _CHUNKS = 64, 12
"""Tokens of a piece of unrelated text, and the number of pieces."""
Measure = Callable[[Directions | None, float], Tensor]
"""Numbers (items,) of a model steered along directions with a strength; None for the unsteered model."""


@dataclass(frozen=True)
class Bound:
    """A measure that must not rise by more than the margin; a negative margin is a required fall."""

    name: str
    measure: Measure
    margin: float
    unit: str
    side_effect: bool = True
    """Something that steering should not change; False if it belongs to the claim."""


@dataclass(frozen=True)
class ControlResult:
    """One line of the table."""

    name: str
    effect: float
    low: float
    high: float
    rule: str
    passed: bool
    side_effect: bool = False


@dataclass(frozen=True)
class Judgement:
    """The table, the doses, and the verdict."""

    strength: float
    before: float
    after: float
    controls: list[ControlResult]
    doses: list[dict[str, float]]

    @property
    def verdict(self) -> str:
        """Verdict by :data:`VERDICT_RULE`.

        >>> side = {"name": "", "effect": 0.0, "low": 0.0, "high": 0.0, "rule": "", "side_effect": True}
        >>> results = (ControlResult(**side, passed=passed) for passed in (True, False))
        >>> [Judgement(1.0, 0.0, 0.0, [result], []).verdict for result in results]
        ['supported', 'partly supported']
        """
        failed = [control for control in self.controls if not control.passed]
        return grade(not failed, partly=all(control.side_effect for control in failed))

    def summary(self) -> str:
        """Return the reasons of the verdict in one sentence."""
        first = self.controls[0]
        failed = [control.name for control in self.controls if not control.passed]
        return (
            f"at strength {self.strength:g} the score went from {self.before:.3f} to {self.after:.3f},"
            f" by {first.effect:+.3f} ({first.low:+.3f} to {first.high:+.3f}) on {first.name};"
            f" {len(self.controls) - len(failed)} of {len(self.controls)} controls passed"
        ) + (f", not {', '.join(failed)}" if failed else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def steps(bounds: int, draws: int = DRAWS) -> int:
    """Return how often :func:`judge` calls ``progress``."""
    return 2 * draws + len(DOSES) + 1 + bounds


def judge(
    score: Measure,
    directions: Directions,
    strength: float,
    *,
    shuffled: Callable[[int], Directions],
    other: Directions,
    bounds: Sequence[Bound],
    items: str,
    draws: int = DRAWS,
    progress: Callable[[str], None] = lambda step: None,
) -> Judgement:
    """Measure every control.

    score
        Higher is better; on held-out items, which ``items`` names.
    shuffled
        From a seed, directions fitted with the labels of a random half of the pairs exchanged.
    other
        Directions of another task.

    All of them get the lengths of ``directions``, layer by layer.
    """
    doses = []
    for dose in DOSES:
        progress("dose")
        doses.append(score(directions if dose else None, strength * dose).double())
    before, after = doses[DOSES.index(0.0)], doses[-1]
    effect = after - before
    mean = resampled_mean(effect)
    controls = [_result(items, mean, "the interval lies above 0", mean.low > 0)]

    def change_along(way: Directions, step: str) -> Tensor:
        progress(step)
        return score(way.as_long_as(directions), strength).double() - before

    for kind, draw in (("random direction", directions.random), ("shuffled labels", shuffled)):
        drawn = torch.stack([change_along(draw(number), kind) for number in range(draws)])
        rule = f"the effect is larger than that of each of {draws} draws"
        larger = bool(effect.mean() > drawn.mean(1).max())
        controls.append(_result(kind, resampled_mean(drawn), rule, larger))
    elsewhere = change_along(other, "another task")
    ahead = resampled_mean(effect - elsewhere)
    rule = f"the effect less this one lies above 0: {ahead}"
    controls.append(_result("another task", resampled_mean(elsewhere), rule, ahead.low > 0))
    controls.append(_dose_response(doses, strength))
    for bound in bounds:
        progress(bound.name)
        change = bound.measure(directions, strength).double() - bound.measure(None, 0.0).double()
        rule = f"the interval ends at {bound.margin:g} {bound.unit} or below"
        mean = resampled_mean(change)
        controls.append(_result(bound.name, mean, rule, mean.high <= bound.margin, bound.side_effect))
    rows = [
        {"strength": strength * dose, **asdict(resampled_mean(scores))}
        for dose, scores in zip(DOSES, doses, strict=True)
    ]
    return Judgement(strength, before.mean().item(), after.mean().item(), controls, rows)


def _dose_response(doses: Sequence[Tensor], strength: float) -> ControlResult:
    """Test the slope of the score over the strength."""
    scores = torch.stack(list(doses))
    strengths = torch.tensor(DOSES, dtype=torch.float64) * strength
    away = strengths - strengths.mean()
    slope = resampled_mean((away[:, None] * scores).sum(0) / away.square().sum())
    rising = bool((scores.mean(1).diff() > 0).all())
    rule = "the slope's interval lies above 0, and each larger strength gives a higher mean score"
    return _result("dose-response", slope, rule, slope.low > 0 and rising)


def _result(
    name: str, mean: MeanInterval, rule: str, passed: bool, side_effect: bool = False
) -> ControlResult:
    return ControlResult(name, mean.mean, mean.low, mean.high, rule, passed, side_effect)


@dataclass(frozen=True)
class TextExamples:
    """Examples of what should change, and of what should not."""

    positive: Sequence[str]
    negative: Sequence[str]
    prompts: Sequence[str]
    """Held-out prompts, which directions are not fitted to."""
    toward: Sequence[str]
    """Words that should come next more often after the prompts, and (``away``) less often."""
    away: Sequence[str]
    other: tuple[Sequence[str], Sequence[str]]
    """Pairs of another task."""
    unrelated: str

    def __post_init__(self) -> None:
        check_pairs(self.positive, self.negative)
        check_pairs(*self.other)
        if used := set(self.prompts) & {*self.positive, *self.negative}:
            raise ValueError(f"steer: held-out prompts must not be among the pairs, as {min(used)!r} is")


def check_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: TextExamples,
    *,
    method: str = "mean",
    layers: int | str | Iterable[int | str] | None = None,
    site: str = BLOCK,
    pool: str = LAST,
    strength: float = 0.1,
    positions: str | Collection[int] = ALL,
    keep_norm: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> tuple[Directions, Judgement]:
    """Fit directions and measure all controls; see :func:`unsoft.lab.interpret.steering.fit` and
    :func:`unsoft.lab.interpret.steering.steering` for the arguments."""
    one_of("steer", "method", method, METHODS)
    finite("steer", "strength", strength)
    trial = TextTrial(model, tokenizer, examples, {"positions": positions, "keep_norm": keep_norm})
    states, elsewhere = (
        paired_states(model, *pairs, tokenizer, layers=layers, site=site, pool=pool)
        for pairs in ((examples.positive, examples.negative), examples.other)
    )
    directions = states.directions(method)
    judgement = judge(
        trial.score,
        directions,
        strength,
        shuffled=lambda seed: states.shuffled(seed, method),
        other=elsewhere.directions(method),
        bounds=[Bound("unrelated loss", trial.loss, MARGIN, "nats per token")],
        items="held-out prompts",
        progress=progress,
    )
    return directions, judgement


@dataclass(frozen=True)
class TextTrial:
    """Measurements of a steered language model: a score on prompts, and the loss on unrelated text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: TextExamples
    options: dict[str, Any]
    """Options of :func:`unsoft.lab.interpret.steering.steering`."""

    def __post_init__(self) -> None:
        if len(self.examples.prompts) < 2:
            raise ValueError(f"steer: at least 2 prompts are needed, not {len(self.examples.prompts)}")
        if both := set(self._first_tokens("toward")) & set(self._first_tokens("away")):
            word = self.tokenizer.decode([min(both)])
            raise ValueError(f"steer: words to go toward and away from begin with the same token, {word!r}")
        self._pieces()

    @torch.no_grad()
    def score(self, directions: Directions | None, strength: float) -> Tensor:
        """Return for each prompt the log odds that a word of ``toward`` comes next, not one of ``away``."""
        toward, away = self._first_tokens("toward"), self._first_tokens("away")
        scores = torch.zeros(len(self.examples.prompts), dtype=torch.float64)
        with self._steered(directions, strength):
            for numbers, ids in self._batches():
                logits = self.model(input_ids=ids).logits[:, -1].double()
                odds = logits[:, toward].logsumexp(-1) - logits[:, away].logsumexp(-1)
                scores[numbers] = odds.cpu()
        return scores

    @torch.no_grad()
    def loss(self, directions: Directions | None, strength: float) -> Tensor:
        """Return the loss (nats per token) of each piece of the unrelated text."""
        ids = self._pieces()
        with self._steered(directions, strength):
            logits = self.model(input_ids=ids).logits[:, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        return losses.mean(1).cpu()

    def _steered(self, directions: Directions | None, strength: float) -> AbstractContextManager[None]:
        if directions is None:
            return nullcontext()
        return steering(self.model, directions, strength, **self.options)

    def _batches(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yield prompts of the same length together, so that nothing is padded."""
        prompts = self.examples.prompts
        tokens = [encoded(prompt, self.tokenizer, self.model)["input_ids"] for prompt in prompts]
        for length in sorted({ids.shape[1] for ids in tokens}):
            numbers = [number for number, ids in enumerate(tokens) if ids.shape[1] == length]
            yield numbers, torch.cat([tokens[number] for number in numbers])

    def _first_tokens(self, side: str) -> list[int]:
        words: Sequence[str] = getattr(self.examples, side)
        first = [self.tokenizer(f" {word}", add_special_tokens=False)["input_ids"][:1] for word in words]
        if not first or not all(first):
            raise ValueError(
                f"steer: argument {side!r} must be words that the tokenizer knows, not {words!r}"
            )
        return sorted({ids[0] for ids in first})

    def _pieces(self) -> Tensor:
        ids = encoded(self.examples.unrelated, self.tokenizer, self.model)["input_ids"][0]
        count = min(_CHUNKS, len(ids) // _CHUNK)
        if count < 2:
            raise ValueError(
                f"steer: the unrelated text has {len(ids)} tokens; at least {2 * _CHUNK} are needed"
            )
        pieces: Tensor = ids[: count * _CHUNK].view(count, _CHUNK)
        return pieces


def write(
    folder: Path,
    model: str,
    judgement: Judgement,
    command: str,
    *,
    claim: str = "steering-text",
    score: str = "log odds of the words in toward.txt, against those in away.txt",
    measures: Sequence[dict[str, Any]] = (),
    maps: Sequence[dict[str, Any]] = (),
    pictures: Sequence[dict[str, Any]] = (),
) -> list[Path]:
    """Write steering.json, controls.csv, doses.csv and steering.html; return the paths.

    ``claim`` is the name of the claim in ``unsoft compare``, ``score`` describes the score. ``measures`` are
    rows of further measurements before and after, ``maps`` rows about the accuracy of relevance maps, and
    ``pictures`` those maps with their words; page.html shows which fields they have.
    """
    verdict = {"claim": claim, "model": model, "verdict": judgement.verdict, "found": judgement.summary()}
    record = {
        "schema": SCHEMA,
        "model": model,
        "command": command,
        "score": score,
        "verdicts": [verdict],
        "rule": VERDICT_RULE,
        **judgement.to_dict(),
        "measures": list(measures),
        "maps": list(maps),
        "versions": package_versions("transformers"),
    }
    files = {
        "steering.json": record,
        "controls.csv": [asdict(control) for control in judgement.controls],
        "doses.csv": judgement.doses,
        "steering.html": steering_page(record, pictures),
    }
    return write_files(folder, files)


def steering_page(record: dict[str, Any], pictures: Sequence[dict[str, Any]] = ()) -> str:
    """Return the text of a self-contained HTML file, from the content of steering.json."""
    doses = record["doses"]
    chart = line_chart([dose["strength"] for dose in doses], [dose["mean"] for dose in doses], "strength")
    return page(
        HERE / "page.html",
        title=f"unsoft steer: {record['model']}",
        styles=[HERE / "page.css"],
        data={},
        record=record,
        chart=chart,
        pictures=pictures,
    )
