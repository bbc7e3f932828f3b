"""``convert``: from a pretrained model to one with another mechanism; interrupted conversions go on where
they stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

import unsoft
from unsoft.errors import Interrupted
from unsoft.files import UNFINISHED, write_json
from unsoft.hf import load_model
from unsoft.hf.quiet import quiet
from unsoft.lab.tasks.corpus import corpus
from unsoft.lab.tasks.draw import generator
from unsoft.lab.training import processes
from unsoft.lab.training.checkpoints import sweep
from unsoft.lab.training.checks import check_whole
from unsoft.lab.training.conversion.fitting import FEWEST, fit
from unsoft.lab.training.conversion.matching import Pair
from unsoft.lab.training.conversion.measuring import layer_errors, losses, margin, mean_loss, perplexity
from unsoft.lab.training.conversion.result import Converted
from unsoft.lab.training.conversion.spec import Conversion
from unsoft.lab.training.conversion.stage import FIT, MATCH, Stage, StageTrainer, stages
from unsoft.lab.training.conversion.text import split
from unsoft.lab.training.folder import CHECKPOINTS, claimed, finish, finished, why_not_written
from unsoft.lab.training.progress import ShowProgress, WriteLog
from unsoft.lab.training.stopping import StopOnSignal
from unsoft.modules.registry import label_of

_MEASURED = "measured.json"
_CLOSE = 1e-3
"""Layers whose error is less on the mean after the swap are not matched. Adam takes steps of the same size
however small a gradient is: SmolLM2 with magnitude's open start went from an error of 1e-8 to 0.2 in three
steps."""


def convert(
    spec: Conversion, out: str | Path, *, save_every: int | None = None, progress: bool = False
) -> Converted:
    """Moves a pretrained causal language model to another mechanism.

    First the swap, with the mechanism's open start. Then output projections are fitted to the original's
    output by least squares (:mod:`unsoft.lab.training.conversion.fitting`). Then every changed attention
    module
    learns to give the original's output for the original's input, all layers at once and independently. Then
    the whole model is fine-tuned on the next token. The model is saved as it was after the stage with
    the lowest loss on held-out text.

    out
        A folder: ``spec.json``, ``match.jsonl`` and ``tune.jsonl``, checkpoints while it goes on, and in the
        end ``model`` (which :func:`unsoft.hf.load` reads, float32, with the tokenizer) and ``result.json``.
        If it holds the same conversion unfinished, that is continued; if it is finished, its result is
        returned.
    save_every
        Steps from one checkpoint to the next; a quarter of each stage unless told otherwise.

    Ctrl-C and SIGTERM save a checkpoint and raise :class:`unsoft.errors.Interrupted`; a loss that is not
    finite raises :class:`unsoft.errors.DivergenceError`.
    """
    check_whole("convert", "save_every", save_every, 1)
    if processes.count() > 1:
        raise ValueError("convert: a conversion runs in one process; start it without torchrun")
    out = Path(out)
    if (found := finished(out, spec.to_dict(), "convert")) is not None:
        return Converted(**found)
    corpus(spec.text)  # a text that cannot be read is told before a model is loaded
    with ExitStack() as closing:
        closing.enter_context(quiet())
        work = _Work(spec, out, save_every, progress)  # what cannot be converted leaves no folder behind
        closing.enter_context(claimed(out, spec.to_dict(), "convert"))
        closing.enter_context(work.stop.listening())
        return work.done()


class _Work:
    """A conversion that is going on."""

    def __init__(self, spec: Conversion, out: Path, save_every: int | None, progress: bool) -> None:
        self.spec, self.out, self.save_every, self.progress = spec, out, save_every, progress
        original, self.tokenizer = _language_model(spec)
        self.train, test = split(spec.text, self.tokenizer, spec.tokens)
        self.pair = Pair(original, spec.recipe())
        if spec.tune == "attention" and spec.tune_steps and not self.pair.changed:
            raise ValueError(
                f"convert: every layer of {spec.model} has {label_of(spec.mechanism)} already, so no"
                " attention is changed that could be tuned; give 'tune' all"
            )
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        for model in (original, self.pair.student):
            model.to(device)  # type: ignore[arg-type]  # transformers wraps it for its documentation
        self.test = test.spaced(max(1, spec.held_out // spec.tokens)).to(device)
        self.stop = StopOnSignal()
        self.measured: dict[str, dict[str, Any]] = {
            name: {} for name in ("losses", "layer_errors", "seconds", "cpu_seconds")
        }
        self.holds = "swapped"
        """The stage whose weights the student has now."""
        self.shown = ShowProgress(f"{Path(spec.model).name} to {label_of(spec.mechanism)}", "")

    def done(self) -> Converted:
        (self.out / CHECKPOINTS).mkdir(exist_ok=True)
        if (known := self.out / CHECKPOINTS / _MEASURED).exists():
            self.measured = json.loads(known.read_bytes())
        assert self.pair.teacher is not None
        self._measure("original", self.pair.teacher)
        self._measure("swapped", self.pair.student)
        if self.spec.fit_tokens and self._differs():
            self._fit()
            self._measure("fitted", self.pair.student)
        for stage, name in zip(stages(self.spec), ("matched", "tuned"), strict=True):
            if stage.steps and (stage.name != MATCH or self._differs()):
                self._run(stage, name)
                self._measure(name, self.pair.student)
        self._take_best()
        result = self._result()
        finish(self.out, self.pair.student, result.to_dict(), self.tokenizer)
        return result

    def _differs(self) -> bool:
        """Is there anything to match? If layers are close already, Adam would only move them apart."""
        errors = self.measured["layer_errors"]["swapped"]
        return bool(errors) and sum(errors) / len(errors) >= _CLOSE

    def _fit(self) -> None:
        """Fits output projections, unless a checkpoint has them already."""
        if any(self._newest(stage) for stage in stages(self.spec)):
            return
        self._keep_best()
        windows = self.train.drawn(self._fit_windows, generator(self.spec.seed, FIT))
        with self._timed(FIT):
            changed = fit(self.pair, windows.to(self.test.device))
        self.holds = "fitted"
        self._say(f"fitted {changed} of {len(self.pair.changed)} output projections")

    @property
    def _fit_windows(self) -> int:
        return max(FEWEST, self.spec.fit_tokens // self.spec.tokens)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Adds the time that is spent to that of the stage."""
        clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
        begin = {name: clock() for name, clock in clocks.items()}
        yield
        for name, clock in clocks.items():
            spent = self.measured[name]
            spent[stage] = spent.get(stage, 0.0) + clock() - begin[name]

    def _measure(self, name: str, model: PreTrainedModel) -> None:
        found = self.measured
        if name not in found["losses"]:
            if name in ("swapped", "fitted", "matched"):
                found["layer_errors"][name] = layer_errors(self.pair, self.test)
            found["losses"][name] = losses(model, self.test)
            write_json(self.out / CHECKPOINTS / _MEASURED, found)
            errors = found["layer_errors"].get(name)
            self._say(
                f"{name}: perplexity {perplexity(found['losses'][name]):.4g}"
                + (f", layer error {sum(errors) / len(errors):.3g}" if errors else "")
            )
        if self.stop.came:
            raise Interrupted(self._goodbye(f"after measuring the {name} model"))

    def _run(self, stage: Stage, name: str) -> None:
        """Trains to the end of the stage, from the newest checkpoint if there is one."""
        self._keep_best()
        if stage.name == MATCH or self.spec.tune == "attention":
            self.pair.train_only_attention()
        else:
            self.pair.student.requires_grad_(True)
        if stage.name != MATCH:
            self.pair.forget_original()
        newest = self._newest(stage)
        callbacks: list[TrainerCallback] = [self.stop, WriteLog(self.out / f"{stage.name}.jsonl")]
        shown = ShowProgress(f"{self.shown.title}, {stage.name}", "")
        if self.progress:
            callbacks.append(shown)
        trainer = StageTrainer(
            stage, self.pair, self.spec, self.train, self._folder(stage), self.save_every, callbacks
        )
        with closing(shown), self._timed(stage.name):
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        self.holds = name
        write_json(self.out / CHECKPOINTS / _MEASURED, self.measured)
        if self.stop.came and trainer.state.global_step < stage.steps:
            raise Interrupted(
                self._goodbye(f"at step {trainer.state.global_step} of {stage.steps} of {stage.name}")
            )

    def _weights(self, name: str) -> Path:
        return self.out / CHECKPOINTS / f"{name}.pt"

    def _best(self) -> str:
        """Return the stage with the lowest held-out loss of those whose weights are there."""
        losses = self.measured["losses"]
        there = [name for name in losses if name == self.holds or self._weights(name).exists()]
        return min(there, key=lambda name: mean_loss(losses[name]))

    def _keep_best(self) -> None:
        """Write the best weights so far before a stage changes them, unless they are written already."""
        best = self._best()
        place = self._weights(best)
        if best != self.holds or place.exists():
            return
        unfinished = place.with_suffix(UNFINISHED)
        try:
            torch.save(self.pair.student.state_dict(), unfinished)
            os.replace(unfinished, place)
        except Exception as problem:  # torch reports a full disk as a RuntimeError
            unfinished.unlink(missing_ok=True)
            raise OSError(
                f"convert: the {best} model cannot be written to {str(place)!r}:"
                f" {why_not_written(problem, place.parent)}"
            ) from problem
        for path in place.parent.glob("*.pt"):
            if path != place:
                path.unlink()

    def _take_best(self) -> None:
        """Give the student the best weights; later stages may have made it worse."""
        best = self._best()
        if best != self.holds:
            found = self.measured["losses"]
            self._say(
                f"the {self.holds} model is worse than the {best} one (perplexity"
                f" {perplexity(found[self.holds]):.4g}, not {perplexity(found[best]):.4g}), which is saved"
            )
            self.pair.student.load_state_dict(torch.load(self._weights(best), weights_only=True))
            self.holds = best

    def _folder(self, stage: Stage) -> Path:
        return self.out / CHECKPOINTS / stage.name

    def _newest(self, stage: Stage) -> Path | None:
        """Its newest checkpoint that is whole."""
        newest, damaged = sweep(self._folder(stage))
        for name in damaged:
            self._say(f"{stage.name}/{name} is not complete and was removed")
        return newest

    def _say(self, words: str) -> None:
        if self.progress:
            self.shown.say(words)

    def _goodbye(self, where: str) -> str:
        return (
            f"convert: stopped {where}; saved in {str(self.out)!r}, and the same command goes on from there"
        )

    def _result(self) -> Converted:
        found = self.measured["losses"]
        tokens = {stage.name: stage.steps * self.spec.batch * self.spec.tokens for stage in stages(self.spec)}
        tokens[FIT] = self._fit_windows * self.spec.tokens
        return Converted(
            spec=self.spec.to_dict(),
            perplexity={name: perplexity(each) for name, each in found.items()},
            margin={name: margin(each, found["original"]) for name, each in found.items()},
            layer_errors=self.measured["layer_errors"],
            tokens={name: tokens[name] for name in self.measured["seconds"]},
            seconds=self.measured["seconds"],
            cpu_seconds=self.measured["cpu_seconds"],
            kept=self.holds,
            parameters=sum(x.numel() for x in self.pair.student.parameters()),
            versions={
                "unsoft": unsoft.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        )


def _language_model(spec: Conversion) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer, in float32; ValueError if there is no next token to predict."""
    model, tokenizer = load_model(spec.model)
    if model.get_output_embeddings() is None or not model.can_generate():
        raise ValueError(
            f"convert: {spec.model} is a {type(model).__name__}, which predicts no next token; give a"
            f" causal language"
            " model"
        )
    if tokenizer is None:
        raise ValueError(
            f"convert: {spec.model} has no tokenizer beside its weights, so a text cannot be read"
        )
    return model.float(), tokenizer
