"""Files of the experiment with scenes."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from experiments.scenes.audit import audit_maps, shown_maps
from experiments.scenes.experiment import SceneResults, captioned
from unsoft.lab.interpret.steering.controls import write

_AUDITED, _SHOWN = 40, 6
SCORE = "log odds that a habitual neighbour which is not in the picture is not named"


def write_report(folder: Path, model: PreTrainedModel, results: SceneResults, command: str) -> list[Path]:
    """Write steering.json, tables, the directions and the page; return the paths."""
    scenes = results.scenes[:_AUDITED]
    examples = captioned(model, scenes)
    maps = audit_maps(model, scenes, examples)
    count = min(_SHOWN, len(scenes))
    shown = shown_maps(model, scenes[:count], examples[:count], results.after.captions[:count])
    results.directions.save(folder / "directions.safetensors")
    files = write(
        folder,
        "scenes",
        results.judgement,
        command,
        claim="steering",
        score=SCORE,
        measures=results.measures,
        maps=maps,
        pictures=shown,
    )
    return [folder / "directions.safetensors", *files]
