"""The controls of steering a language model with pairs of texts, from the question to the verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.lab.interpret.steering.controls import DRAWS, Bound, Judgement, judge
from unsoft.lab.interpret.steering.directions import Directions
from unsoft.lab.interpret.steering.fit import check_method, check_pairs, paired_states
from unsoft.lab.interpret.steering.places import BLOCK
from unsoft.lab.interpret.steering.states import LAST
from unsoft.lab.interpret.steering.steer import ALL, check_strength
from unsoft.lab.interpret.steering.text_trial import TextTrial

MARGIN = 0.1
"""Nats per token by which the loss on unrelated text may rise."""


@dataclass(frozen=True)
class TextQuestion:
    """What should change, by examples, and what should not."""

    positive: Sequence[str]
    negative: Sequence[str]
    prompts: Sequence[str]
    """Beginnings that directions are not found from."""
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
    question: TextQuestion,
    *,
    method: str = "mean",
    layers: int | str | Iterable[int | str] | None = None,
    site: str = BLOCK,
    pool: str = LAST,
    strength: float = 0.1,
    positions: str | Collection[int] = ALL,
    keep_norm: bool = False,
    draws: int = DRAWS,
    said: Callable[[str], None] = lambda words: None,
) -> tuple[Directions, Judgement]:
    """Directions, and what all controls say of them; see :func:`unsoft.lab.interpret.steering.fit` and
    :func:`unsoft.lab.interpret.steering.steering` for the arguments."""
    check_method(method)
    check_strength(strength)
    trial = TextTrial(
        model,
        tokenizer,
        question.prompts,
        question.toward,
        question.away,
        question.unrelated,
        {"positions": positions, "keep_norm": keep_norm},
    )
    states, elsewhere = (
        paired_states(model, *pairs, tokenizer, layers=layers, site=site, pool=pool)
        for pairs in ((question.positive, question.negative), question.other)
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
        draws=draws,
        said=said,
    )
    return directions, judgement
