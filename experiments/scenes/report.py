"""The files of the experiment with scenes."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from experiments.scenes.audit import audit_maps, shown_maps
from experiments.scenes.experiment import Found, captioned
from unsoft.lab.interpret.steering.report import write

_AUDITED, _SHOWN = 40, 6
SCORE = "log odds that a habitual neighbour which is not in the picture is not named"


def write_report(folder: Path, model: PreTrainedModel, found: Found, command: str) -> list[Path]:
    """steering.json, tables, the directions and the page; returns what was written."""
    scenes = found.scenes[:_AUDITED]
    examples = captioned(model, scenes)
    maps = audit_maps(model, scenes, examples)
    count = min(_SHOWN, len(scenes))
    shown = shown_maps(model, scenes[:count], examples[:count], found.after.captions[:count])
    found.directions.save(folder / "directions.safetensors")
    files = write(
        folder,
        "scenes",
        found.judgement,
        command,
        claim="steering",
        score=SCORE,
        measures=found.measures,
        maps=maps,
        pictures=shown,
    )
    return [folder / "directions.safetensors", *files]
