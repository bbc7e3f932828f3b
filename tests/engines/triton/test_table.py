"""The committed table of compiled resources, and the page generated from it; without Triton."""

import csv
import json
from pathlib import Path

import pytest

from docs.generate import gpu
from tests.engines.triton.targets import SHARED_KIB
from tests.engines.triton.throughput import MACHINES
from unsoft.engines.triton.launch import KERNELS, TileSizes, candidates

ROOT = Path(__file__).parents[3]
RECORD = Path(__file__).parent / "compiled" / "resources.csv"
FORMULAS = ("cog", "softpick")
ROWS = list(csv.DictReader(RECORD.read_text().splitlines()))


@pytest.mark.parametrize("target", SHARED_KIB)
def test_every_target_has_every_kernel(target):
    recorded = {(row["formula"], row["width"], row["kernel"]) for row in ROWS if row["target"] == target}
    kernels = {(width, kernel) for width in ("64", "128") for kernel in (*KERNELS, "decode", "combine")}
    for formula in FORMULAS:
        assert {(width, kernel) for name, width, kernel in recorded if name == formula} == kernels
    own = json.loads((ROOT / "src/unsoft/engines/triton/tile_sizes.json").read_text())
    assert target in own


def test_hardly_any_spill_in_a_loop_and_all_fits():
    """Where no estimate weighs spills against larger tiles (throughput.py), there are none."""
    for row in ROWS:
        assert int(row["in_loops"]) <= (32 if row["target"] in MACHINES else 0), row
        assert int(row["shared"]) <= SHARED_KIB[row["target"]] << 10, row
        assert (int(row["products"]) > 0) == (row["kernel"] != "combine"), row


def test_the_table_is_of_the_tile_sizes_that_are_shipped():
    for row in ROWS:
        if row["kernel"] in KERNELS:
            sizes = TileSizes(*(int(row[name]) for name in TileSizes._fields))
            costly = row["formula"] == "softpick"
            assert sizes == candidates(row["kernel"], row["target"], int(row["width"]), 16, costly)[0]


def test_page_is_up_to_date():
    script = gpu
    text = script.PAGE.read_text()
    assert "<!-- resources -->" in text
    assert script.page(text) == text, "run: python docs/generate/gpu.py"
