"""What a conversion found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Perplexities and layer errors of a finished conversion."""

    spec: Mapping[str, Any]
    perplexity: Mapping[str, float]
    """On text that was never trained on: of the original, and after the swap and each stage that took
    place."""
    margin: Mapping[str, float]
    """Half the width of a 95 % interval of the difference to the original's loss, paired by text; 0 for the
    original."""
    layer_errors: Mapping[str, list[float]]
    """For each layer that changed, of its attention's output given the original's input: |ours - original|^2
    / |original|^2 on the same text."""
    tokens: Mapping[str, int]
    """Seen in each stage."""
    seconds: Mapping[str, float]
    """Of each stage, without measuring; what an interruption lost is not counted."""
    cpu_seconds: Mapping[str, float]
    """Likewise, of all cores together: what others do on the machine does not count."""
    kept: str = ""
    """The stage whose weights were saved: that of the lowest loss on held-out text. "" in results of older
    versions, which saved the last stage."""
    parameters: int
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``Converted(**data)`` turns back into an equal one."""
        return asdict(self)
