"""The model ``unsoft`` of lm-evaluation-harness. Needs the extra ``eval``.

Releases of the harness that support plugins find it by this package's entry point in ``lm_eval.models``:
``lm_eval --model unsoft --model_args pretrained=FOLDER --tasks ...``. Release 0.4.13 does not support
plugins; there use ``python -m unsoft.hf.lm_eval``, which is the same command with this model registered.
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM

from unsoft.hf.attention import NAME


class UnsoftLM(HFLM):  # type: ignore[misc]  # the harness is not installed where types are checked
    """The harness's model ``hf``, with all of its arguments, for swapped models.

    ``pretrained`` is a folder that ``save_pretrained`` wrote after :func:`unsoft.hf.swap`, or such a model
    itself.
    """

    def __init__(self, pretrained: Any, **options: Any) -> None:
        super().__init__(pretrained, **options)
        if not hasattr(self.config, NAME):
            name = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
            raise ValueError(
                f"pretrained: {name!r} is not a swapped model; make one by"
                " `unsoft swap MODEL MECHANISM --out FOLDER`, or evaluate this one by `--model hf`"
            )


def main() -> None:
    """Run the command ``lm_eval`` with ``--model unsoft`` registered."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=UnsoftLM)
    cli_evaluate()


if __name__ == "__main__":
    main()
