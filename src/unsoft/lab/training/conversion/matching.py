"""Layer-wise distillation: every attention module gets the input that the original has at that layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unsoft.hf import swap
from unsoft.hf.architecture import attention_modules
from unsoft.hf.attention import NAME
from unsoft.hf.recipe import KEPT, Recipe


class Pair:
    """The original model, its copy with another mechanism, and the attention modules in which they differ."""

    def __init__(self, original: PreTrainedModel, recipe: Recipe) -> None:
        names = [attention.name for attention in attention_modules(original)]
        own = {id(x) for name in names for x in original.get_submodule(name).parameters()}
        # Only attention changes while layers are matched, so both models share all other tensors.
        shared = {id(x): x for x in (*original.parameters(), *original.buffers()) if id(x) not in own}
        options = (recipe.mechanism, recipe.layers, recipe.keep_first_last, recipe.init)
        self.student = swap(copy.deepcopy(original, shared), *options, **recipe.options)
        if not hasattr(original.config, NAME):
            swap(original, "softmax")  # same outputs, and masks in the form that the copy uses
        self.teacher: PreTrainedModel | None = original
        before = Recipe.from_dict(getattr(original.config, NAME))
        same_options = before.options == recipe.options
        self.changed = [name for name in names if not self._is_same(name, same_options)]

    def _is_same(self, name: str, same_options: bool) -> bool:
        """Return True for the same mechanism with the same options and without parameters to learn."""
        assert self.teacher is not None
        theirs, ours = (getattr(model.get_submodule(name), NAME) for model in (self.teacher, self.student))
        return theirs.label == ours.label and (
            ours.label == KEPT or (same_options and not list(ours.parameters()))
        )

    def errors(self, ids: Tensor) -> Tensor:
        """Return |ours - original|^2 / |original|^2 of the output of each module that differs.

        One pass of the original; gradients reach the copy's attention only.
        """
        assert self.teacher is not None
        errors: list[Tensor] = []
        with_gradient = torch.is_grad_enabled()

        def compare(name: str) -> Callable[..., None]:
            student = self.student.get_submodule(name)

            def hook(module: nn.Module, args: Any, options: Any, output: Any) -> None:
                with torch.set_grad_enabled(with_gradient):
                    ours, theirs = (first_output(x) for x in (student(*args, **options), output))
                    errors.append((ours - theirs).square().sum() / theirs.square().sum())

            return hook

        with ExitStack() as hooks, torch.no_grad():
            for name in self.changed:
                module = self.teacher.get_submodule(name)
                hooks.callback(module.register_forward_hook(compare(name), with_kwargs=True).remove)
            self.teacher(input_ids=ids, use_cache=False)
        return torch.stack(errors)

    def train_only_attention(self) -> None:
        """Enable gradients for the modules that differ only."""
        self.student.requires_grad_(False)
        for name in self.changed:
            self.student.get_submodule(name).requires_grad_(True)

    def forget_original(self) -> None:
        """Free the original."""
        self.teacher = None


def first_output(output: Any) -> Tensor:
    """Return the output of an attention module without its weights."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
