"""Batches for transformers' Trainer: drawn when they are asked for, from the number of the step,
so that resuming needs no cursor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset

from unsoft.lab.tasks import IGNORE, Task
from unsoft.lab.training.model import to_model

_TOKENS, _AT_ONCE = 1 << 16, 1 << 14
"""About so many tokens are a test, and go through the model at a time."""
_VALIDATION, _TEST = 1, 0
"""Seeds of the examples on which runs are watched and rates are chosen, and of the final test; the same for
every run."""
_ANSWERS, _EXAMPLES = 256, 4096
"""A test has at least so many answers, and at most so many examples."""


@dataclass(frozen=True)
class Batches(Dataset[dict[str, Tensor]]):
    """Item i is a whole batch: number i of the task's stream."""

    task: Task
    width: int
    """Of the model."""
    count: int
    size: int
    """Examples in a batch."""
    seed: int
    training: bool = False
    validation: bool = False
    pieces: int = 1
    """Processes that share each batch: item i is piece i % pieces of batch i // pieces, as accelerate deals
    items out."""

    def __len__(self) -> int:
        return self.count * self.pieces

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, piece = divmod(index, self.pieces)
        batch = self.task.sample(
            self.size, seed=self.seed, index=number, training=self.training, validation=self.validation
        )
        whole = to_model(batch, self.task, self.width)
        return {name: tensor[piece :: self.pieces] for name, tensor in whole.items()}


def evaluation_batches(task: Task, width: int, *, validation: bool = False) -> Batches:
    """The examples on which every model is tested, or validated: fewer if they are long."""
    seed = _VALIDATION if validation else _TEST
    one = task.sample(1, seed=seed, validation=validation)
    length = one.inputs.shape[1] if task.kind != "image" else 1
    answers = int((one.labels != IGNORE).sum())
    examples = min(max(_TOKENS // length, -(-_ANSWERS // answers)), _EXAMPLES)
    size = min(max(_AT_ONCE // length, 1), examples)
    return Batches(task, width, -(-examples // size), size, seed, validation=validation)


def unwrap(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What collates a list of one batch."""
    (batch,) = items
    return batch
