"""Global and shared memory with guards: who wrote and read what,
and which copies and products are under way."""

from typing import Any

import numpy as np
import torch

from tests.engines.triton.compiled.ptx.errors import PtxError

_BASE, _GAP = 1 << 40, 4096
_SEVERAL = 1 << 30


class GlobalMemory:
    """Copies of tensors, far enough apart that a stray address hits none."""

    def __init__(self, tensors: list[Any]) -> None:
        self.place, at = {}, 0
        for t in tensors:
            key, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
            if key not in self.place:
                self.place[key] = (at, size, t)
                at += -(-size // 256) * 256 + _GAP
        self.bytes, self.valid = np.zeros(at, np.uint8), np.zeros(at, bool)
        for at, size, t in self.place.values():
            self.bytes[at : at + size] = _storage(t)
            self.valid[at : at + size] = True

    def address(self, t: Any) -> int:
        return _BASE + self.place[t.untyped_storage().data_ptr()][0] + t.storage_offset() * t.element_size()

    def copy_back(self) -> None:
        for at, size, t in self.place.values():
            _storage(t)[:] = self.bytes[at : at + size]

    def places(self, addresses: Any, size: int) -> Any:
        at = (addresses - _BASE)[:, None] + np.arange(size)
        if at.size and (at.min() < 0 or at.max() >= self.bytes.size or not self.valid[at].all()):
            raise PtxError("global address outside the tensors of the launch")
        if at.size and (addresses % size).any():
            raise PtxError("misaligned global address")
        return at


def _storage(t: Any) -> Any:
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(t.untyped_storage(), 0, (t.untyped_storage().nbytes(),)).numpy()


class SharedMemory:
    """Shared memory of one program; starts as NaN. ``warp`` reads or writes; a barrier begins a new epoch."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size + 16, 0xFF, np.uint8)
        self.limit, self.epoch = size, 1
        self.writer, self.reader = (np.full(size + 16, -1, np.int64) for _ in range(2))
        self.written, self.read_at = (np.zeros(size + 16, np.int64) for _ in range(2))
        self.pending, self.unfenced, self.being_read = (np.zeros(size + 16, bool) for _ in range(3))
        self.copies: list[list[Any]] = [[]]

    def places(self, addresses: Any, size: int) -> Any:
        at = addresses[:, None] + np.arange(size)
        self.check_limits(at)
        return at

    def check_limits(self, at: Any) -> None:
        if at.size and (at.min() < 0 or at.max() >= self.limit):
            raise PtxError("shared address outside the allocation")

    def load(self, addresses: Any, size: int, warp: Any) -> Any:
        at, warp = self.places(addresses, size), warp[:, None]
        if self.pending[at].any():
            raise PtxError("shared memory read before its asynchronous copy was waited for")
        if ((self.written[at] == self.epoch) & (self.writer[at] != warp)).any():
            raise PtxError("shared memory written by another warp is read without a barrier")
        several = (self.read_at[at] == self.epoch) & (self.reader[at] != warp)
        self.reader[at] = np.where(several, _SEVERAL, warp)
        self.read_at[at] = self.epoch
        return self.bytes[at]

    def store(self, addresses: Any, raw: Any, warp: Any) -> None:
        at = self.places(addresses, raw.shape[1])
        self.claim(at, warp[:, None])
        self.bytes[at] = raw

    def claim(self, at: Any, warp: Any) -> None:
        """Before writing."""
        if ((self.written[at] == self.epoch) & (self.writer[at] != warp)).any():
            raise PtxError("two warps write the same shared memory without a barrier")
        if ((self.read_at[at] == self.epoch) & (self.reader[at] != warp)).any():
            raise PtxError("shared memory read by another warp is written without a barrier")
        if self.being_read[at].any():
            raise PtxError("shared memory is written while a matrix product that was not waited for reads it")
        self._mark(at, warp)

    def begin_copy(self, addresses: Any, raw: Any, warp: Any) -> None:
        """An asynchronous copy: what it brings is there after a wait only."""
        at = self.places(addresses, raw.shape[1])
        self.claim(at, warp[:, None])
        self.pending[at] = True
        self.copies[-1].append((at, raw, warp[:, None]))

    def wait_for_copies(self, still: int) -> None:
        """All groups of copies but the last ``still`` ones arrive."""
        done = self.copies[: len(self.copies) - 1 - still]
        self.copies = self.copies[len(done) :]
        for at, raw, warp in (copy for group in done for copy in group):
            self.bytes[at], self.pending[at] = raw, False
            self._mark(at, warp)

    def load_for_product(self, at: Any, group: int) -> Any:
        """What a matrix product of a warp group reads, by its own way to memory."""
        self.check_limits(at)
        if self.pending[at].any():
            raise PtxError("matrix product of shared memory whose asynchronous copy was not waited for")
        if self.unfenced[at].any():
            raise PtxError("matrix product of shared memory without fence.proxy.async after its writing")
        if ((self.written[at] == self.epoch) & (self.writer[at] // 4 != group)).any():
            raise PtxError("matrix product of shared memory that another warp group wrote, without a barrier")
        self.being_read[at] = True
        return self.bytes[at]

    def _mark(self, at: Any, warp: Any) -> None:
        self.writer[at], self.written[at], self.unfenced[at] = warp, self.epoch, True
