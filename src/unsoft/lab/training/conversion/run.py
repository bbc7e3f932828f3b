"""``convert``: from a pretrained model to one with another mechanism; interrupted conversions resume."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from unsoft.errors import Interrupted
from unsoft.files import UNFINISHED, write_json
from unsoft.hf import load_model
from unsoft.hf.attention import NAME
from unsoft.hf.quiet import quiet
from unsoft.lab.bench.machine import package_versions
from unsoft.lab.tasks.corpus import corpus
from unsoft.lab.tasks.draw import generator
from unsoft.lab.training.callbacks import ShowProgress, StopOnSignal, WriteLog, process_count
from unsoft.lab.training.conversion.fitting import FEWEST, fit
from unsoft.lab.training.conversion.matching import Pair
from unsoft.lab.training.conversion.shifting import shift_rows
from unsoft.lab.training.conversion.spec import Conversion, Converted
from unsoft.lab.training.conversion.text import TextBatches, Windows, split
from unsoft.lab.training.folder import CHECKPOINTS, claimed, finish, finished, sweep, why_not_written
from unsoft.lab.training.spec import check_whole
from unsoft.lab.training.trainer import SealedTrainer, arguments
from unsoft.modules.registry import label_of

FIT, MATCH, TUNE = "fit", "match", "tune"


@dataclass(frozen=True)
class Stage:
    """A stage of training: its name, steps and learning rate."""

    name: str
    steps: int
    lr: float


def stages(spec: Conversion) -> tuple[Stage, Stage]:
    """Return the stages of training: matching, then tuning."""
    return Stage(MATCH, spec.match_steps, spec.match_lr), Stage(TUNE, spec.tune_steps, spec.tune_lr)


class StageTrainer(SealedTrainer):
    """Trainer whose loss is the mean error of the layers, or the next-token loss."""

    def __init__(
        self,
        stage: Stage,
        pair: Pair,
        spec: Conversion,
        text: Windows,
        folder: Path,
        save_every: int | None,
        callbacks: list[TrainerCallback],
    ) -> None:
        self.stage, self.pair = stage, pair
        super().__init__(
            pair.student,
            arguments(
                folder,
                steps=stage.steps,
                lr=stage.lr,
                warmup=max(1, stage.steps // 10),
                save_every=save_every or max(1, -(-stage.steps // 4)),
                weight_decay=0.0,
                seed=spec.seed,
                logging_steps=max(1, stage.steps // 10),
                report_to="none",
            ),
            who="convert",
            mechanism_lr=spec.mechanism_lr,
            train_dataset=TextBatches(text, stage.name, stage.steps, spec.batch, spec.seed),
            callbacks=callbacks,
        )

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        """Return the loss of a batch of texts."""
        if self.stage.name == TUNE:
            return self.finite(model(**inputs, use_cache=False).loss)
        model.eval()  # the original has no dropout, so neither has what is matched to it
        return self.finite(self.pair.errors(inputs["input_ids"]).mean())


_AT_ONCE = 512
"""Tokens in a batch of measurements."""


def _batches(windows: Tensor) -> tuple[Tensor, ...]:
    batches: tuple[Tensor, ...] = windows.split(max(1, _AT_ONCE // windows.shape[1]))
    return batches


@torch.no_grad()
def losses(model: PreTrainedModel, windows: Tensor) -> list[float]:
    """Return the mean next-token loss of each window."""
    model.eval()
    means: list[float] = []
    for ids in _batches(windows):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        means += each.double().mean(1).tolist()
    return means


@torch.no_grad()
def layer_errors(pair: Pair, windows: Tensor) -> list[float]:
    """Return the errors of :meth:`Pair.errors`, averaged over batches."""
    pair.student.eval()
    if not pair.changed:
        return []
    batches = torch.stack([pair.errors(ids) for ids in _batches(windows)])
    means: list[float] = batches.double().mean(0).tolist()
    return means


def mean_loss(each: list[float]) -> float:
    """Return the mean over windows; infinite where it is not a number, so that stages can be compared.

    >>> mean_loss([1.0, 3.0]), mean_loss([1.0, math.nan])
    (2.0, inf)
    """
    mean = sum(each) / len(each)
    return math.inf if math.isnan(mean) else mean


def perplexity(each: list[float]) -> float:
    """Return exp of the mean loss; infinite where that overflows.

    >>> perplexity([0.0, 2.0]) == math.e, perplexity([1e9])
    (True, inf)
    """
    mean = mean_loss(each)
    return math.exp(mean) if mean < 700 else math.inf  # exp overflows float64 above 709.78


def margin(each: list[float], original: list[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean loss difference (nats), with
    independent windows.

    >>> margin([2.0, 2.0], [1.0, 1.0]), round(margin([2.0, 4.0], [1.0, 1.0]), 2)
    (0.0, 1.96)
    """
    # Paired: a text that is hard for one model is hard for the other, which cancels in the difference.
    changes = torch.tensor(each, dtype=torch.float64) - torch.tensor(original, dtype=torch.float64)
    return 0.0 if len(changes) < 2 else float(1.96 * changes.std() / math.sqrt(len(changes)))


_MEASURED = "measured.json"
_CLOSE = 1e-3
"""Layers are not matched if their mean error after the swap is smaller. Adam's steps have the same size
however small a gradient is: SmolLM2 with magnitude's open start went from an error of 1e-8 to 0.2 in three
steps."""


def convert(
    spec: Conversion, out: str | Path, *, save_every: int | None = None, progress: bool = False
) -> Converted:
    """Convert a pretrained causal language model to another mechanism.

    First the swap, with the mechanism's open start. Then rows of logits are shifted where that makes the
    mechanism softmax (:mod:`unsoft.lab.training.conversion.shifting`), and output projections are fitted to
    the original's output by least squares (:mod:`unsoft.lab.training.conversion.fitting`). Then every changed
    attention module learns the original's output for the original's input, all layers at once and
    independently. Then the whole model is fine-tuned on the next token. The weights of the stage with the
    lowest loss on held-out text are saved.

    out
        A folder: ``spec.json``, ``match.jsonl`` and ``tune.jsonl``, checkpoints while it runs, and finally
        ``model`` (which :func:`unsoft.hf.load` reads, float32, with the tokenizer) and ``result.json``. If it
        holds the same conversion unfinished, it resumes; if it is finished, its result is returned.
    save_every
        Steps between checkpoints; a quarter of each stage by default.

    Ctrl-C and SIGTERM save a checkpoint and raise :class:`unsoft.errors.Interrupted`; a loss that is not
    finite raises :class:`unsoft.errors.DivergenceError`.
    """
    check_whole("convert", "save_every", save_every)
    if process_count() > 1:
        raise ValueError("convert: a conversion runs in one process; start it without torchrun")
    out = Path(out)
    if (content := finished(out, spec.to_dict(), "convert")) is not None:
        return Converted(**content)
    corpus(spec.text)  # raises for a text that cannot be read before a model is loaded
    with ExitStack() as closing:
        closing.enter_context(quiet())
        work = _Work(spec, out, save_every, progress)  # before the folder: an error leaves none behind
        closing.enter_context(claimed(out, spec.to_dict(), "convert"))
        closing.enter_context(work.stop.handling())
        return work.run()


class _Work:
    """A conversion in progress."""

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
        names = ("losses", "layer_errors", "seconds", "cpu_seconds")
        self.measured: dict[str, dict[str, Any]] = {name: {} for name in names}
        self.holds = "swapped"
        """The stage whose weights the student has."""
        self.shown = ShowProgress(f"{Path(spec.model).name} to {label_of(spec.mechanism)}", "")

    def run(self) -> Converted:
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
        getattr(self.pair.student.config, NAME)["conversion"] = {
            # Names only: the card may be published, and paths belong to this machine.
            "spec": dict(result.spec) | {name: Path(result.spec[name]).name for name in ("model", "text")},
            "perplexity": {name: value for name, value in result.perplexity.items() if math.isfinite(value)},
            "kept": result.kept,
        }
        finish(self.out, self.pair.student, result.to_dict(), self.tokenizer)
        return result

    def _differs(self) -> bool:
        """Return False when all layers already match: further steps only add noise."""
        errors = self.measured["layer_errors"]["swapped"]
        return bool(errors) and sum(errors) / len(errors) >= _CLOSE

    def _fit(self) -> None:
        """Fit output projections, unless a checkpoint has them already."""
        if any(self._newest(stage) for stage in stages(self.spec)):
            return
        self._keep_best()
        windows = self.train.drawn(self._fit_windows, generator(self.spec.seed, FIT))
        windows = windows.to(self.test.device)
        with self._timed(FIT):
            shifted = shift_rows(self.pair, windows, self.spec.shift) if self.spec.shift else 0
            changed = fit(self.pair, windows)
        self.holds = "fitted"
        layers = len(self.pair.changed)
        self._print(f"shifted logits of {shifted} of {layers} layers, fitted {changed} output projections")

    @property
    def _fit_windows(self) -> int:
        return max(FEWEST, self.spec.fit_tokens // self.spec.tokens)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to that of the stage."""
        clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
        begin = {name: clock() for name, clock in clocks.items()}
        yield
        for name, clock in clocks.items():
            spent = self.measured[name]
            spent[stage] = spent.get(stage, 0.0) + clock() - begin[name]

    def _measure(self, name: str, model: PreTrainedModel) -> None:
        measured = self.measured
        if name not in measured["losses"]:
            if name in ("swapped", "fitted", "matched"):
                measured["layer_errors"][name] = layer_errors(self.pair, self.test)
            measured["losses"][name] = losses(model, self.test)
            write_json(self.out / CHECKPOINTS / _MEASURED, measured)
            errors = measured["layer_errors"].get(name)
            error = f", layer error {sum(errors) / len(errors):.3g}" if errors else ""
            self._print(f"{name}: perplexity {perplexity(measured['losses'][name]):.4g}{error}")
        if self.stop.received:
            raise Interrupted(self._interrupted(f"after measuring the {name} model"))

    def _run(self, stage: Stage, name: str) -> None:
        """Train to the end of the stage, from the newest checkpoint if there is one."""
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
        step = trainer.state.global_step
        if self.stop.received and step < stage.steps:
            raise Interrupted(self._interrupted(f"at step {step} of {stage.steps} of {stage.name}"))

    def _weights(self, name: str) -> Path:
        return self.out / CHECKPOINTS / f"{name}.safetensors"

    def _best(self) -> str:
        """Return the stage with the lowest held-out loss of those whose weights are available."""
        losses = self.measured["losses"]
        available = [name for name in losses if name == self.holds or self._weights(name).exists()]
        return min(available, key=lambda name: mean_loss(losses[name]))

    def _keep_best(self) -> None:
        """Write the best weights so far before a stage changes them, unless they are written already."""
        best = self._best()
        path = self._weights(best)
        if best != self.holds or path.exists():
            return
        unfinished = path.with_suffix(UNFINISHED)
        try:
            save_weights(self.pair.student, str(unfinished))
            os.replace(unfinished, path)
        except Exception as problem:  # safetensors reports a full disk as an error of its own
            unfinished.unlink(missing_ok=True)
            raise OSError(
                f"convert: the {best} model cannot be written to {str(path)!r}:"
                f" {why_not_written(problem, path.parent)}"
            ) from problem
        for other in path.parent.glob("*.safetensors"):
            if other != path:
                other.unlink()

    def _take_best(self) -> None:
        """Load the best weights into the student; later stages may have made it worse."""
        best = self._best()
        if best != self.holds:
            worse, better = (perplexity(self.measured["losses"][name]) for name in (self.holds, best))
            self._print(
                f"the {self.holds} model is worse than the {best} one (perplexity {worse:.4g}, not"
                f" {better:.4g}), which is saved"
            )
            load_weights(self.pair.student, str(self._weights(best)))
            self.holds = best

    def _folder(self, stage: Stage) -> Path:
        return self.out / CHECKPOINTS / stage.name

    def _newest(self, stage: Stage) -> Path | None:
        """Return the newest complete checkpoint of a stage."""
        newest, damaged = sweep(self._folder(stage))
        for name in damaged:
            self._print(f"{stage.name}/{name} is not complete and was removed")
        return newest

    def _print(self, text: str) -> None:
        if self.progress:
            self.shown.print(text)

    def _interrupted(self, where: str) -> str:
        return f"convert: stopped {where}; saved in {str(self.out)!r}; rerun the same command to resume"

    def _result(self) -> Converted:
        losses = self.measured["losses"]
        tokens = {stage.name: stage.steps * self.spec.batch * self.spec.tokens for stage in stages(self.spec)}
        tokens[FIT] = self._fit_windows * self.spec.tokens
        return Converted(
            spec=self.spec.to_dict(),
            perplexity={name: perplexity(each) for name, each in losses.items()},
            margin={name: margin(each, losses["original"]) for name, each in losses.items()},
            layer_errors=self.measured["layer_errors"],
            tokens={name: tokens[name] for name in self.measured["seconds"]},
            seconds=self.measured["seconds"],
            cpu_seconds=self.measured["cpu_seconds"],
            kept=self.holds,
            parameters=sum(x.numel() for x in self.pair.student.parameters()),
            versions=package_versions("transformers"),
        )


def _language_model(spec: Conversion) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer, in float32; ValueError unless the model predicts the next token."""
    model, tokenizer = load_model(spec.model)
    if model.get_output_embeddings() is None or not model.can_generate():
        raise ValueError(
            f"convert: {spec.model} is a {type(model).__name__}, which predicts no next token; give a"
            " causal language model"
        )
    if tokenizer is None:
        problem = "has no tokenizer beside its weights, so a text cannot be read"
        raise ValueError(f"convert: {spec.model} {problem}")
    return model.float(), tokenizer
