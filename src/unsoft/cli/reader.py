"""Models that read text, for commands that look into them."""

from __future__ import annotations

from typing import Any

import typer


def load_reader(model: str, length: int, instead: str) -> tuple[Any, Any, int]:
    """The model, its tokenizer, and how many tokens, at most ``length``, it can read at a time.

    ``instead`` says what serves for a model without a tokenizer.
    """
    from unsoft.hf.models import load_model

    network, tokenizer = load_model(model)
    if tokenizer is None:
        raise typer.BadParameter(
            f"{model} has no tokenizer, so it cannot read text; use {instead} from Python",
            param_hint="'MODEL'",
        )
    return network, tokenizer, min(length, getattr(network.config, "max_position_embeddings", None) or length)
