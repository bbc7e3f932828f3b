"""The static estimate: machines as in data sheets, and a loop counted by hand."""

from collections import Counter

import pytest

from tests.engines.triton.throughput import (
    MACHINES,
    bytes_moved,
    cycles,
    multiplications,
    slowdown,
    teraflops,
)


@pytest.mark.parametrize(("target", "teraflops"), [("sm_80", 312), ("sm_90", 989)])
def test_matrix_products_of_the_data_sheet(target, teraflops):
    assert MACHINES[target].teraflops == pytest.approx(teraflops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HMMA.16816.F32.BF16", 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 16 * 8 * 8),
        ("HGMMA.64x128x16.F32.BF16", 64 * 128 * 16 / 4),
        ("FFMA", 0),
    ],
)
def test_multiplications(name, expected):
    assert multiplications(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("HGMMA.64x16x16.F32.BF16", 2.5), ("HGMMA.64x64x16.F32.BF16", 1), ("HMMA.16816.F32.BF16", 1)],
)
def test_narrow_products_wait_for_shared_memory(name, expected):
    assert slowdown(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("LDSM.16.M88.4", 512), ("LDS.128", 512), ("STS.64", 256), ("LDS", 128)]
)
def test_bytes(name, expected):
    assert bytes_moved(name) == expected


def test_a_loop_counted_by_hand():
    """One warp, a tile of 16 x 8 logits: one product of depth 16, one exp2 and two products a logit."""
    loop = Counter({"HMMA.16816.F32.BF16": 1, "MUFU.EX2": 4, "FFMA": 8, "IADD3": 2, "BRA": 1, "": 3})
    masked = loop + Counter({"ISETP.GE.AND": 20})
    busy = cycles((masked, loop), "sm_80", logits=128, warps=1)
    assert busy["flop"] == 2 * 16
    assert busy["matrix"] == pytest.approx(16 / 1024)
    assert busy["special"] == pytest.approx(1 / 16)
    assert busy["fma"] == pytest.approx(2 / 64)
    assert busy["alu"] == pytest.approx(0.5 / 64)
    assert busy["memory"] == 0
    assert busy["issue"] == pytest.approx(16 / 4 / 128)
    turns, overlap = teraflops(busy, "sm_80")
    assert overlap == pytest.approx(108 * 1.41e9 * 32 * 16 / 1e12)  # exp2 is the busiest, 1/16 cycle a logit
    assert turns == pytest.approx(overlap * (1 / 16) / (1 / 16 + 1 / 64))
