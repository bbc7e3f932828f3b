"""``AttentionStats``: statistics of every attention layer while a model trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from unsoft.attention import attention
from unsoft.checks import whole_number
from unsoft.measure import entropy, negative_share, sink_mass
from unsoft.modules.module import Mechanism
from unsoft.modules.pointwise import Pointwise

_SIGNATURE = inspect.signature(Mechanism.forward)
_UNUSED = ("self", "dropout_p", "return_weights", "hidden", "geometry_keys", "first_value", "cache")
_LARGEST = 1 << 26
"""Weights of a call, above which mechanisms without kernel statistics are not measured: 256 MB."""


class AttentionStats(TrainerCallback):
    """Measures every attention layer of a model in each ``every``-th training step, on the current batch.

    For each layer it logs the mean over rows of the entropy (nats), of the share of the first key
    (``first_share``, the attention sink) and of the share of negative weights (``negative_share``), and the
    mechanism's own parameters: the mean of scalars and of one number per head, the root mean square of
    matrices. Rows of formulas are measured by the kernel, without a matrix of weights.

    log
        Called with a dictionary of numbers: ``trainer.log``, ``wandb.log``, ``trackio.log`` or a function of
        yours. ``latest`` is the same dictionary, and ``steps`` counts the optimizer's steps.
    model
        A model with mechanisms of unsoft: swapped, or built from ``unsoft.nn``. Trainers pass theirs.

    With transformers, ``trainer.add_callback(AttentionStats(trainer.log))``. With Lightning,
    ``Trainer(callbacks=[AttentionStats().lightning()])``. In a loop of your own, call :meth:`step` after each
    step of the optimizer. Modules inside ``torch.compile`` are not measured.

    >>> import torch, unsoft
    >>> layer = unsoft.nn.MultiheadAttention(16, 2, mechanism="cog", batch_first=True)
    >>> stats = AttentionStats(model=layer, every=10)
    >>> x = torch.randn(2, 30, 16)
    >>> layer(x, x, x, is_causal=True, need_weights=False)[0].sum().backward()
    >>> stats.step()
    >>> sorted(stats.latest)
    ['attention/entropy', 'attention/first_share', 'attention/negative_share']
    """

    def __init__(
        self,
        log: Callable[[dict[str, float]], Any] | None = None,
        *,
        model: nn.Module | None = None,
        every: int = 100,
    ) -> None:
        self.log, self.every = log, whole_number("AttentionStats", "every", every)
        self.steps = 0
        self.latest: dict[str, float] = {}
        self._mechanisms: dict[str, Mechanism] = {}
        self._hooks: list[Any] = []
        self._values: dict[str, float] = {}
        if model is not None:
            self.start(model)

    def start(self, model: nn.Module, steps: int = 0) -> None:
        """Measure ``model`` from now on; raise ValueError if it has no mechanism."""
        self._mechanisms = _mechanisms(model)
        if not self._mechanisms:
            raise ValueError(
                f"AttentionStats: {type(model).__name__} has no mechanism of unsoft; build it with unsoft.nn,"
                " or call unsoft.hf.swap(model, 'softmax') first, which keeps the outputs"
            )
        self.steps = steps
        self._arm()

    def step(self) -> None:
        """Count a step of the optimizer, and log what was measured in it."""
        if self._hooks:
            self.close()
            if not self._values:
                raise RuntimeError(
                    "AttentionStats: no attention was measured in this step; the model must be in training"
                    " mode (model.train()) and not compiled"
                )
            self.latest = self._values | _parameters(self._mechanisms)
            self._values = {}
            if self.log is not None:
                self.log(dict(self.latest))
        self.steps += 1
        self._arm()

    def close(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arm(self) -> None:
        self.close()
        if self.steps % self.every == 0:
            for name, mechanism in self._mechanisms.items():
                self._hooks.append(mechanism.register_forward_pre_hook(self._hook(name), with_kwargs=True))

    def _hook(self, name: str) -> Callable[..., None]:
        def measure(mechanism: Mechanism, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            call = _SIGNATURE.bind(mechanism, *args, **options).arguments
            first = f"{name}entropy" not in self._values  # checkpointing runs a layer twice
            if mechanism.training and first and call.get("cache") is None:
                self._values |= {name + key: value for key, value in _measured(mechanism, call).items()}

        return measure

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start with the model of transformers' Trainer."""
        self.start(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step of transformers' Trainer."""
        self.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove all hooks from the model."""
        self.close()

    def lightning(self) -> Any:
        """Return a callback for Lightning's Trainer, which logs to its loggers."""
        from lightning.pytorch import Callback

        stats = self

        class LightningStats(Callback):  # type: ignore[misc]  # Lightning is not installed where types are checked
            """Passes the events of Lightning's Trainer on."""

            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                stats.start(pl_module, trainer.global_step)

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step == stats.steps:  # gradients are being accumulated
                    return
                before = stats.latest
                stats.step()
                if stats.latest is not before:
                    for logger in trainer.loggers:
                        logger.log_metrics(stats.latest, step=trainer.global_step)

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                stats.close()

        return LightningStats()


def _mechanisms(model: nn.Module) -> dict[str, Mechanism]:
    """Return the mechanisms that are not parts of others, by the prefix of their logged names."""
    outer: dict[str, Mechanism] = {}
    for path, module in model.named_modules():
        if isinstance(module, Mechanism) and not any(path.startswith(f"{other}.") for other in outer):
            outer[path] = module
    short = {
        path.removesuffix("mechanism").rstrip(".").removesuffix(".unsoft"): x for path, x in outer.items()
    }
    return {f"attention/{path}/" if path else "attention/": mechanism for path, mechanism in short.items()}


@torch.no_grad()
def _measured(mechanism: Mechanism, call: Mapping[str, Any]) -> dict[str, float]:
    """Return the statistics of a call; none if its weights would take too much memory."""
    if isinstance(mechanism, Pointwise) and mechanism.source is None:
        options = {name: value for name, value in call.items() if name not in _UNUSED}
        options["value"] = options["value"][..., :0]  # weights do not depend on values
        params = dict(mechanism.values) or None
        _, rows = attention(**options, mechanism=mechanism.formula, params=params, return_stats=True)
        each = {name: getattr(rows, name) for name in ("entropy", "first_share", "negative_share")}
    else:
        if call["query"].shape[:-1].numel() * call["key"].shape[-2] > _LARGEST:
            return {}
        given = {name: value for name, value in call.items() if name != "self"}
        # Not by calling the module, which would run this hook again.
        _, weights = mechanism.forward(**given | {"return_weights": True, "dropout_p": 0.0})
        measures = {"entropy": entropy, "first_share": sink_mass, "negative_share": negative_share}
        each = {name: measure(weights.float()) for name, measure in measures.items()}
    # The first row of a causal call sees one key, so it has no choice.
    return {name: _mean(x[..., 1:] if x.shape[-1] > 1 else x) for name, x in each.items()}


def _mean(x: Tensor) -> float:
    return float(x.double().mean())


def _parameters(mechanisms: Mapping[str, Mechanism]) -> dict[str, float]:
    """Return the parameters of all mechanisms as one number each."""
    numbers = {}
    for layer, mechanism in mechanisms.items():
        for name, x in mechanism.named_parameters():
            values = x.detach().double()
            numbers[f"{layer}{name}"] = float(values.mean() if x.dim() < 2 else values.square().mean().sqrt())
    return numbers
