"""A new measure is one file: dropped into the folder, it is exported,
summed up and documented with no other edit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import unsoft
from tests.conftest import HANG

PACKAGE = Path(unsoft.__file__).parent
DOCS = Path(__file__).parents[2] / "docs/generate"
FILE = '''"""Is it lopsided? The first half of the keys against the second."""

from torch import Tensor

from unsoft.measure.rows import Rows, measure_rows, row_measure

__all__ = ["lopsidedness"]


def lopsidedness(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the mass on the first half of the keys.

        sum of |a| over j < S/2 / sum |a|

    Answers: does the row look back?

    Range: 0 to 1. Rows without mass: 0.

    >>> import torch
    >>> lopsidedness(torch.tensor([0.75, -0.25]))
    tensor(0.7500)
    """
    return measure_rows(lopsidedness_of, weights, mask)


@row_measure
def lopsidedness_of(rows: Rows) -> Tensor:
    return rows.per_mass(rows.relative[..., : rows.relative.shape[-1] // 2].sum(-1))
'''
PROGRAM = f"""
import sys
import torch
from unsoft import measure
weights = torch.tensor([[3.0, 0.0, -1.0, 0.0]])
assert "lopsidedness" in measure.__all__
assert measure.lopsidedness(weights).tolist() == [0.75]
assert measure.summary(weights).lopsidedness.tolist() == [0.75]      # and so of unsoft inspect
assert measure.summary(weights).row_sum.tolist() == [2.0]
sys.path.insert(0, {str(DOCS)!r})
import measures
assert "### lopsidedness" in measures.page() and "## Is it lopsided?" in measures.page()
"""


def test_a_file_in_the_folder_is_enough(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "unsoft", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "unsoft" / "measure" / "lopsided.py").write_text(FILE)
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        timeout=HANG,
    )
