"""How many threads there are: those of torch, but one in a forked child.

The OpenMP threads of a process do not live on in a child made by ``os.fork`` (as the workers of a DataLoader
are), and code that hands work to them waits for ever; torch's own operations do too. So compiled code runs on
one thread there, and torch is told to do the same if unsoft had computed something before, which may have
started those threads.
"""

from __future__ import annotations

import os

import torch

_forked = _used = False


def thread_count() -> int:
    """How many threads a kernel may use now."""
    if _forked:
        return 1
    threads_are_used()
    return torch.get_num_threads()


def threads_are_used() -> None:
    """To be called before torch computes something on all threads."""
    global _used
    _used = True


def _after_fork() -> None:
    global _forked
    _forked = True
    if _used:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
