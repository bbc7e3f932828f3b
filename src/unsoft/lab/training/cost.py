"""Tokens, FLOPs and memory of a training run, before anything is allocated."""

from __future__ import annotations

import os

import torch

from unsoft.lab.training.spec import Spec

_STATE = 16
"""Bytes of a parameter: the weight, its gradient and two moments of AdamW."""
_FEATURES, _INSIDE, _LOGITS = 16, 4, 3
"""Numbers of 4 bytes that a token keeps for the backward pass: for each layer, times the width and the width
of the MLP; and times the outputs."""


def tokens_per_step(spec: Spec) -> int:
    """Return the tokens of a batch at the task's own difficulty; an image counts as one.

    >>> from unsoft.lab.training import Spec
    >>> tokens_per_step(Spec(task="copy", knobs={"length": 8}, batch=4).filled())
    64
    """
    task = spec.make_task()
    assert spec.batch is not None
    if task.name == "language":  # without its corpus
        return spec.batch * int(spec.knobs.get("length", task.knobs()["length"]))
    return spec.batch * (1 if task.kind == "image" else task.sample(1).inputs.shape[1])


def flops_per_step(spec: Spec) -> float:
    """Return the FLOPs of a training step: 6 for each token and parameter, and 12 for each token, layer,
    feature and key (Chowdhery 2022, PaLM). Mechanisms count alike.
    """
    task = spec.make_task()
    assert spec.width and spec.layers and spec.mlp and spec.batch
    tokens = tokens_per_step(spec)
    weights = spec.layers * (4 * spec.width**2 + 3 * spec.width * spec.mlp) + spec.width * task.outputs
    return tokens * (6.0 * weights + 12 * spec.layers * spec.width * (tokens // spec.batch))


def memory_of(spec: Spec) -> int:
    """Return about how many bytes a run of tokens needs at its peak.

    >>> memory_of(Spec(task="copy", width=64).filled()) < memory_of(Spec(task="copy", width=128).filled())
    True
    """
    task = spec.make_task()
    assert spec.width and spec.layers and spec.mlp
    weights = spec.layers * (4 * spec.width**2 + 3 * spec.width * spec.mlp) + spec.width * task.outputs
    layer = _FEATURES * spec.width + _INSIDE * spec.mlp
    kept = 4 * tokens_per_step(spec) * (spec.layers * layer + _LOGITS * task.outputs)
    return _STATE * weights + kept


def check_memory(spec: Spec) -> None:
    """Raise ValueError if a run needs more memory than this machine, or its GPU, has free."""
    if spec.init_from or spec.make_task().kind != "tokens":
        return
    needed, free = memory_of(spec), _free()
    if free is not None and needed > free:
        raise ValueError(
            f"train: this run needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; make"
            " 'batch', 'width' or 'layers' smaller"
        )


def _free() -> int | None:
    """Return the free bytes of the device that trains; None where the system does not tell."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        names = os.sysconf_names
        known = "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
