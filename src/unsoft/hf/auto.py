"""transformers' Auto classes and pipelines read swapped models as they read others, once this is imported."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from unsoft.hf.marked import MODEL_TYPE, mark, marked_class, unmarked
from unsoft.hf.swap import swapped_class


class SwappedConfig(PreTrainedConfig):
    """Stands for the config of any swapped model in a folder; reading it gives that of the model's own class.

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
        """The config, or that and the options that were not used, as ``PreTrainedConfig.from_dict`` gives
        them."""
        content = unmarked(config_dict)
        kind = CONFIG_MAPPING[content["model_type"]]
        _register_models(kind)  # type: ignore[arg-type]
        made = kind.from_dict(content, **options)
        mark(made[0] if isinstance(made, tuple) else made)
        return made


@cache
def _register_models(kind: type[PreTrainedConfig]) -> None:
    """Every Auto class that makes a model from this kind of config makes a swapped one of a marked config."""
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is not None and kind in mapping:
            found = mapping[kind]
            several = isinstance(found, (list, tuple))
            swapped = tuple(swapped_class(one) for one in (found if several else (found,)))
            marked = marked_class(kind)
            mapping.register(marked, swapped if several else swapped[0], exist_ok=True)


AutoConfig.register(MODEL_TYPE, SwappedConfig, exist_ok=True)
