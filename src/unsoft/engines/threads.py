"""The number of threads: that of torch, but 1 in a forked child.

The OpenMP threads of a process do not exist in a child made by ``os.fork`` (such as a DataLoader worker), and
code that hands work to them never returns; torch's own operations do too. So compiled code runs on one
thread there. If unsoft had computed something before, which may have started those threads, torch is limited
to one thread too.
"""

import os

import torch

_forked = _used = False


def thread_count() -> int:
    """Return the number of threads that a kernel may use now."""
    if _forked:
        return 1
    threads_are_used()
    return torch.get_num_threads()


def threads_are_used() -> None:
    """Record that torch is about to compute something on all threads."""
    global _used
    _used = True


def _after_fork() -> None:
    global _forked
    _forked = True
    if _used:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
