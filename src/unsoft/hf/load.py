"""Reading swapped models: ``unsoft.hf.load``, and transformers' Auto classes and pipelines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from unsoft.hf.attention import NAME
from unsoft.hf.marked import MODEL_TYPE, mark, marked_class, unmarked
from unsoft.hf.quiet import quiet
from unsoft.hf.swap import swapped_class


def load(path: str | Path, **options: Any) -> PreTrainedModel:
    """Load a swapped model from the folder that ``save_pretrained`` wrote, bit for bit as it was saved.

    ``options`` are those of ``from_pretrained``. Where unsoft is not installed, transformers raises for the
    same folder an error that says what to install. After ``import unsoft.hf``,
    ``AutoModelForCausalLM.from_pretrained`` and pipelines read it, too.

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
        config = AutoConfig.from_pretrained(path)
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


class SwappedConfig(PreTrainedConfig):
    """Placeholder for the config of any swapped model; reading it returns a config of the model's own class.

    >>> import tempfile, transformers, unsoft
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    >>> tiny = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     unsoft.hf.swap(transformers.LlamaForCausalLM(tiny), "cog").save_pretrained(folder)
    ...     model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    >>> model.config.model_type, model.model.layers[0].self_attn.unsoft.label
    ('llama', 'cog')
    """

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the config, with the unused options if asked for, as ``PreTrainedConfig.from_dict`` does."""
        content = unmarked(config_dict)
        kind = CONFIG_MAPPING[content["model_type"]]
        _register_models(kind)  # type: ignore[arg-type]
        made = kind.from_dict(content, **options)
        mark(made[0] if isinstance(made, tuple) else made)
        return made


@cache
def _register_models(kind: type[PreTrainedConfig]) -> None:
    """Make every Auto class that knows this kind of config build a swapped model from a marked one."""
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is not None and kind in mapping:
            models = mapping[kind]
            several = isinstance(models, (list, tuple))
            swapped = tuple(swapped_class(model) for model in (models if several else (models,)))
            mapping.register(marked_class(kind), swapped if several else swapped[0], exist_ok=True)


AutoConfig.register(MODEL_TYPE, SwappedConfig, exist_ok=True)
