"""``unsoft.hf.load``: a swapped model from the folder that ``save_pretrained`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from unsoft.hf.attention import NAME
from unsoft.hf.quiet import quiet
from unsoft.hf.swap import swapped_class


def load(path: str | Path, **options: Any) -> PreTrainedModel:
    """The model with its mechanisms, every tensor bit for bit as it was saved; ``options`` are those of
    ``from_pretrained``.

    Where unsoft is not installed, transformers refuses the same folder with the sentence that says what to
    install. After ``import unsoft.hf``, ``AutoModelForCausalLM.from_pretrained`` and pipelines read it, too.

    >>> import tempfile, unsoft
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    >>> tiny = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     unsoft.hf.swap(LlamaForCausalLM(tiny), "gated+cog").save_pretrained(folder)
    ...     unsoft.hf.load(folder).model.layers[0].self_attn.unsoft.label
    'gated+cog'
    """
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"load: {str(path)!r} is not a folder with a model (no config.json)")
    with quiet():
        config = transformers.AutoConfig.from_pretrained(path)
        if not hasattr(config, NAME):
            raise ValueError(
                f"load: {str(path)!r} was not saved after unsoft.hf.swap; use transformers, or"
                " unsoft.hf.load_model"
            )
        kind = getattr(transformers, config.architectures[0], None)
        if kind is None:
            raise ValueError(f"load: this version of transformers does not know {config.architectures[0]!r}")
        loaded: Any = swapped_class(kind).from_pretrained(
            path, config=config, output_loading_info=True, **options
        )
    model: PreTrainedModel
    model, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise ValueError(
                f"load: {str(path)!r} is damaged: {problem.replace('_', ' ')} {sorted(report[problem])[:3]}"
            )
    return model
