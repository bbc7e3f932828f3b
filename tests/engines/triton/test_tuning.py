"""Tile sizes: measured ones are kept, preferred, and damaged files ignored. No GPU: times are made up."""

from types import SimpleNamespace

import pytest
import torch

from unsoft.engines.triton import launch, tile_sizes, tuning
from unsoft.engines.triton.tile_sizes import KERNELS, TileSizes, candidates, tuned, tuned_file, tuned_key
from unsoft.mechanisms import resolve

GPU = "Fictitious 9000"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path))
    tuned.cache_clear()
    yield
    tuned.cache_clear()


@pytest.fixture
def launches(monkeypatch):
    """One launch of each kernel, on a GPU that takes what ``sizes_for`` offers first."""
    fixed = SimpleNamespace(exact=False, padded=64, value_padded=64)
    formula = resolve("cog").key
    found = [launch.Launch(name, None, {"FIXED": fixed}, None, formula, torch.bfloat16) for name in KERNELS]
    monkeypatch.setattr(tuning, "_launches", lambda *arguments: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tuning, "sizes_for", lambda launched: launch._possible(launched)[0])
    return found


def test_the_fastest_is_kept_and_taken(launches):
    best = TileSizes(64, 32, 8, 2)
    times = {best: 0.5}
    options = {"width": 64, "dtype": torch.bfloat16, "length": 128}
    found = list(tuning.tune(resolve("cog"), timer=lambda which, sizes: times.get(sizes, 1.0), **options))
    assert [x.kernel for x in found] == list(KERNELS)
    assert all(x.sizes == best and x.seconds == 0.5 and x.seconds_before == 1.0 for x in found)
    assert [x.before for x in found] == [candidates(name, "sm_90", 64, 16)[0] for name in KERNELS]
    assert all(launch._possible(which)[0] == best for which in launches)


def test_sizes_without_room_are_passed_over(launches):
    usual = {candidates(name, "sm_90", 64, 16)[0] for name in KERNELS}
    timer = lambda which, sizes: 1.0 if sizes in usual else None  # noqa: E731
    found = list(tuning.tune(resolve("cog"), width=64, dtype=torch.bfloat16, length=128, timer=timer))
    assert {x.sizes for x in found} <= usual


def test_other_formulas_widths_and_gpus_are_left_alone(launches, monkeypatch):
    tile_sizes.keep_tuned(
        tuned_key("forward", GPU, resolve("relu2").key, 64, "torch.bfloat16"), TileSizes(16, 16, 4, 1)
    )
    tile_sizes.keep_tuned(
        tuned_key("forward", GPU, resolve("cog").key, 128, "torch.bfloat16"), TileSizes(16, 16, 4, 1)
    )
    tile_sizes.keep_tuned(
        tuned_key("forward", "other", resolve("cog").key, 64, "torch.bfloat16"), TileSizes(16, 16, 4, 1)
    )
    assert len(tuned()) == 3
    assert launch._possible(launches[0]) == candidates("forward", "sm_90", 64, 16)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"sizes": 3}', '{"sizes": {"a": ["b", 1, 2, 3]}}', '{"other": {}}']
)
def test_a_damaged_file_is_ignored(content):
    tuned_file().parent.mkdir(exist_ok=True)
    tuned_file().write_text(content)
    assert tuned() == {}


def test_every_size_of_the_grid_is_a_power_of_two():
    for name in KERNELS:
        assert all(size & (size - 1) == 0 for sizes in tuning.grid_of(name) for size in sizes[:3])
