"""Windows of tokens from a text: drawn by number for training, evenly spaced for measuring."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from unsoft.lab.tasks.corpus import corpus
from unsoft.lab.tasks.draw import generator, integers

_BYTES_A_TOKEN = 6
"""A first guess; if tokens are longer, more bytes are read."""
_UNREADABLE = 1e-3
"""A larger share of invalid UTF-8 means binary data or another encoding."""
_EDGE = 4
"""Extra tokens: at the ends of a window they may be pieces of other tokens."""


class Windows:
    """Pieces of ``length`` tokens of one part of a corpus. Only drawn windows are tokenized, so large texts
    cost no more."""

    def __init__(self, content: bytes, tokenizer: PreTrainedTokenizerBase, length: int, part: str) -> None:
        self.content, self.tokenizer, self.length = content, tokenizer, length
        self.bytes = min(_BYTES_A_TOKEN * length, len(content))
        """Bytes that suffice for a window at the end of the text."""
        while (count := len(self._tokens(content[-self.bytes :]))) < length + _EDGE:
            if self.bytes == len(content):
                raise ValueError(
                    f"convert: the {part} text has {count} tokens, too few for windows of {length}; give a"
                    " longer text or a smaller 'tokens'"
                )
            self.bytes = min(2 * self.bytes, len(content))

    def _tokens(self, content: bytes) -> list[int]:
        encoded = self.tokenizer(_text(content), add_special_tokens=False, verbose=False)
        tokens: list[int] = encoded["input_ids"]
        return tokens

    def window(self, start: int) -> Tensor:
        """Return the tokens from byte ``start`` on, without the first, which may be a piece of one."""
        size = self.bytes
        while len(tokens := self._tokens(self.content[start : start + size])) < self.length + _EDGE:
            if start + size >= len(self.content):
                raise ValueError(f"convert: the text has no {self.length} tokens from byte {start} on")
            size *= 2
        return torch.tensor(tokens[1 : self.length + 1])

    def drawn(self, count: int, random: torch.Generator) -> Tensor:
        """Return windows at random positions, (count, length)."""
        starts = integers(len(self.content) - self.bytes + 1, (count,), random)
        return torch.stack([self.window(int(start)) for start in starts])

    def spaced(self, count: int) -> Tensor:
        """Return up to ``count`` evenly spaced windows, fewer if they would overlap."""
        last = len(self.content) - self.bytes
        count = min(count, 1 + last // self.bytes)
        return torch.stack([self.window(number * last // max(count - 1, 1)) for number in range(count)])


def _text(content: bytes) -> str:
    return content.decode("utf-8", errors="ignore")  # a window may begin inside a character


def split(path: str, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[Windows, Windows]:
    """Return windows for training and for measuring, of disjoint texts."""
    train, test = (bytes(part.numpy()) for part in corpus(path))
    lost = sum(len(part) - len(_text(part).encode()) for part in (train, test))
    if lost > _UNREADABLE * (len(train) + len(test)):
        raise ValueError(
            f"convert: {path!r} is not text in UTF-8: {lost} of its {len(train) + len(test)} bytes are none"
        )
    return Windows(train, tokenizer, length, "training"), Windows(test, tokenizer, length, "held-out")


@dataclass(frozen=True)
class TextBatches(Dataset[dict[str, Tensor]]):
    """Batches drawn from their number, so that resuming needs no cursor."""

    windows: Windows
    stage: str
    count: int
    size: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.windows.drawn(self.size, generator(self.seed, self.stage, index))
        return {"input_ids": ids, "labels": ids}
