"""The model of a run: a small transformers model with the mechanism in its attention.

Sequences: SmolLM3, which is Llama with rotary positions that can be left out. Images: ViT.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification
from transformers.models.smollm3 import SmolLM3Config, SmolLM3ForCausalLM

from unsoft.hf import load_model, swap
from unsoft.lab.tasks import Batch, Task
from unsoft.lab.training.spec import Spec

_START = 0.8
"""Initial weights have this standard deviation over the root of the width: 0.1 at 64. With transformers' 0.02
small models do not start to learn."""


def build(spec: Spec, task: Task) -> PreTrainedModel:
    """Return the model of a filled spec, with its mechanism. The same seed gives the same weights."""
    torch.manual_seed(spec.seed)
    if spec.init_from:
        model, _ = load_model(spec.init_from)
        _check(model, task, spec.init_from)
    else:
        model = _image_model(spec, task) if task.kind == "image" else _sequence_model(spec, task)
    return swap(model, spec.mechanism, init=spec.start, **spec.options)


def _sizes(spec: Spec) -> dict[str, Any]:
    """Return the part of a configuration that all architectures share."""
    assert spec.width is not None
    return {
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "initializer_range": _START / math.sqrt(spec.width) if spec.init_std is None else spec.init_std,
    }


def _sequence_model(spec: Spec, task: Task) -> PreTrainedModel:
    assert spec.layers is not None
    config = SmolLM3Config(
        **_sizes(spec),
        # Features are passed as embeddings, so the vocabulary is that of the answers.
        vocab_size=task.outputs if task.kind == "features" else max(task.size, task.outputs),
        num_key_value_heads=spec.heads,
        attention_bias=spec.attention_bias,
        max_position_embeddings=256,  # no limit for rotary positions; cosformer's cosine is made for it
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        no_rope_layers=[int(task.setup.positions if spec.rotary is None else spec.rotary)] * spec.layers,
        tie_word_embeddings=task.answers_in_tokens,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return SmolLM3ForCausalLM(config)


def _image_model(spec: Spec, task: Task) -> PreTrainedModel:
    config = ViTConfig(
        **_sizes(spec),
        image_size=task.size,
        patch_size=getattr(task, "patch", 1),
        num_channels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = task.outputs
    return ViTForImageClassification(config)


def _check(model: PreTrainedModel, task: Task, name: str) -> None:
    """Raise ValueError if a pretrained model does not fit the inputs or outputs of the task."""
    config: Any = model.config
    takes, needed = model.main_input_name, "pixel_values" if task.kind == "image" else "input_ids"
    if takes != needed:
        raise ValueError(
            f"train: {task.name} gives {needed}, and {name} is a {type(model).__name__}, which takes {takes}"
        )
    head = model.get_output_embeddings()
    outputs = config.num_labels if task.kind == "image" else getattr(head, "out_features", 0)
    width = getattr(config, "hidden_size", 0)
    if outputs < task.outputs:
        raise ValueError(f"train: {task.name} needs {task.outputs} outputs, and {name} has {outputs}")
    if task.kind == "tokens" and getattr(config, "vocab_size", 0) < task.size:
        raise ValueError(f"train: {task.name} has {task.size} tokens, and {name} knows {config.vocab_size}")
    if task.kind == "features" and width < task.size:
        raise ValueError(f"train: {task.name} has {task.size} features, and {name} is {width} wide")
    if task.kind == "image" and getattr(config, "image_size", task.size) != task.size:
        raise ValueError(
            f"train: {task.name} has pictures of {task.size} pixels, and {name} takes {config.image_size}"
        )


def to_model(batch: Batch, task: Task, width: int) -> dict[str, Tensor]:
    """Return a batch as keywords of a model. Features are embeddings that fill the first dimensions."""
    if task.kind == "features":
        inputs = torch.nn.functional.pad(batch.inputs, (0, width - task.size))
        return {"inputs_embeds": inputs, "labels": batch.labels}
    name = "pixel_values" if task.kind == "image" else "input_ids"
    positions = task.positions(batch.inputs)
    packed = {} if positions is None else {"position_ids": positions}
    return {name: batch.inputs, "labels": batch.labels} | packed
