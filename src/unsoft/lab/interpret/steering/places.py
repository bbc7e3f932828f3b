"""Where a model can be steered: what leaves the blocks of its language part, and what leaves their MLPs."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

BLOCK, MLP = "block", "mlp"
SITES = (BLOCK, MLP)
_MLPS = ("mlp", "feed_forward", "ffn", "fc2")
"""What transformers calls the MLP of a block; the last is the end of OPT's, which is no module of its own."""


def language_part(model: PreTrainedModel) -> nn.Module:
    """The part of a model that holds the stack of language blocks: all but the head, and no vision tower."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"steer: argument 'model' must be a transformers model, not {type(model).__name__}")
    found = model.get_decoder()
    return model if found is None else found


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of language blocks.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> len(blocks(GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=9))))
    3
    """
    part = language_part(model)
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    stacks = [
        module for module in part.modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not stacks:
        raise ValueError(
            f"steer: {type(model).__name__} has no stack of {count} language blocks, so no layer to steer"
        )
    return stacks[0]


def modules_at(model: PreTrainedModel, site: str) -> list[nn.Module]:
    """For each layer the module whose output is steered."""
    check_site(site)
    stack = list(blocks(model))
    if site == BLOCK:
        return stack
    return [_mlp(block, number) for number, block in enumerate(stack)]


def _mlp(block: nn.Module, number: int) -> nn.Module:
    for name in _MLPS:
        if (found := getattr(block, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    held = ", ".join(name for name, _ in block.named_children())
    raise ValueError(
        f"steer: layer {number} ({type(block).__name__}) has no MLP called {', '.join(_MLPS)}; it has {held}."
        f" Steer what leaves its blocks instead: site={BLOCK!r}"
    )


def width(model: PreTrainedModel) -> int:
    """Numbers in a state of the language part."""
    return int(model.config.get_text_config(decoder=True).hidden_size)


def states_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The states (batch, tokens, width) in what a block or an MLP returned."""
    return output[0] if isinstance(output, tuple) else output


def check_site(site: str) -> None:
    if site not in SITES:
        raise ValueError(f"steer: argument 'site' must be one of {', '.join(SITES)}, not {site!r}")
