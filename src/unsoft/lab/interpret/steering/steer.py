"""``steering``: push a model in a direction inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from transformers import PreTrainedModel

from unsoft.checks import finite
from unsoft.lab.interpret.models import hooked
from unsoft.lab.interpret.steering.directions import Directions, blocks, language_part, modules_at, states_of

ALL, PROMPT, GENERATED = "all", "prompt", "generated"
POSITIONS = (ALL, PROMPT, GENERATED)


@contextmanager
def steering(
    model: PreTrainedModel,
    directions: Directions,
    strength: float = 1.0,
    *,
    layers: int | str | Iterable[int | str] | None = None,
    positions: str | Collection[int] = ALL,
    keep_norm: bool = False,
) -> Iterator[None]:
    """Add ``strength`` times the direction of each layer to the states of the model, also in ``generate``.

    layers
        Layers to steer, by default all that have a direction.
    positions
        "all" tokens; those of the "prompt"; "generated": the last of the prompt, from which the first new
        token is predicted, and every new token; or token numbers, from 0, or from -1 at the prompt's end.
    keep_norm
        Rotate each state and keep its length.

    No weight is changed, and afterwards outputs are bit for bit as before. Blocks may be nested.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from unsoft.lab.interpret.steering.directions import fingerprint
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=9)).eval()
    >>> ahead = Directions({1: torch.ones(8)}, site="block", method="mean", model=fingerprint(model))
    >>> words = torch.tensor([[1, 2, 3]])
    >>> before = model(words).logits
    >>> with steering(model, ahead, 5.0, positions=[-1], keep_norm=True):
    ...     changed = model(words).logits != before
    >>> changed.any(-1), torch.equal(model(words).logits, before)
    (tensor([[False, False,  True]]), True)
    """
    finite("steer", "strength", strength)
    where = _Positions(positions)
    directions.check_model(model)
    if layers is not None:
        directions = directions.only(layers, len(blocks(model)))
    modules = modules_at(model, directions.site)
    hooks = [
        modules[layer].register_forward_hook(_Push(strength * vector, where, keep_norm))
        for layer, vector in directions.vectors.items()
    ]
    if positions != ALL:
        hooks.append(language_part(model).register_forward_pre_hook(where.count_past, with_kwargs=True))
    with hooked(*hooks):
        yield


class _Positions:
    """Columns of a forward pass to steer; a pass may contain the whole text, or the newest token only."""

    def __init__(self, wanted: str | Collection[int]) -> None:
        numbers = not isinstance(wanted, str)
        if numbers and not all(isinstance(n, int) and not isinstance(n, bool) for n in wanted):
            raise TypeError(f"steer: argument 'positions' must be whole numbers, not {wanted!r}")
        if not wanted or (not numbers and wanted not in POSITIONS):
            raise ValueError(
                f"steer: argument 'positions' must be one of {', '.join(POSITIONS)}, or numbers, not"
                f" {wanted!r}"
            )
        self.wanted, self.past, self.prompt = wanted, 0, 0

    def count_past(self, module: object, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Read from the cache how many tokens precede those of this pass."""
        cache = options.get("past_key_values")
        self.past = 0 if cache is None else int(cache.get_seq_length())

    def columns(self, count: int) -> slice | list[int] | None:
        """Return the columns to steer among ``count`` new tokens; None for all."""
        if self.wanted == ALL:
            return None
        if self.past == 0:
            self.prompt = count
        if self.wanted == PROMPT:
            return None if self.past == 0 else []
        if self.wanted == GENERATED:
            return slice(count - 1, count) if self.past == 0 and count > 1 else None
        absolute = {n + self.prompt if n < 0 else n for n in self.wanted if isinstance(n, int)}
        return sorted(n - self.past for n in absolute if self.past <= n < self.past + count)


class _Push:
    """The hook of one layer."""

    def __init__(self, shift: Tensor, where: _Positions, keep_norm: bool) -> None:
        self.shift, self.where, self.keep_norm = shift, where, keep_norm

    def __call__(self, module: object, inputs: object, output: Any) -> Any:
        states = states_of(output)
        columns = self.where.columns(states.shape[1])
        if columns == []:
            return output
        if self.shift.dtype != states.dtype or self.shift.device != states.device:
            self.shift = self.shift.to(states)
        if columns is None:
            moved = self._moved(states)
        else:
            moved = states.clone()
            moved[:, columns] = self._moved(states[:, columns])
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    def _moved(self, states: Tensor) -> Tensor:
        moved = states + self.shift
        if not self.keep_norm:
            return moved
        size = vector_norm(moved, dim=-1, keepdim=True).clamp_min(torch.finfo(moved.dtype).tiny)
        rotated: Tensor = moved * (vector_norm(states, dim=-1, keepdim=True) / size)
        return rotated
