"""Compiled for real, for six kinds of GPU: what the compilers say, and the table that is committed."""

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.engines.triton.compiled import table  # noqa: E402
from tests.engines.triton.compiled.ahead import (  # noqa: E402
    TARGETS,
    compile_launch,
    example,
    first_sizes,
    launches,
    pretending,
)
from tests.engines.triton.compiled.resources import resources  # noqa: E402
from unsoft import mechanisms  # noqa: E402
from unsoft.engines.triton.tile_sizes import KERNELS  # noqa: E402
from unsoft.formula import Formula  # noqa: E402
from unsoft.mechanisms import resolve  # noqa: E402

pytestmark = pytest.mark.gpu_check
ALL = [name for name in mechanisms() if isinstance(resolve(name), Formula)]


def compile_all(call, target, exact=False):
    for made in launches(call, target, exact=exact):
        with pretending(target, None):
            yield made, resources(compile_launch(made, first_sizes(made, target)))


def test_the_table_is_complete_and_has_no_fault():
    found = table.committed()
    assert len(found) == len(TARGETS) * len(table.WIDTHS) * len(table.FORMULAS) * len(KERNELS)
    for row in found:
        assert int(row["spills in loops"]) == 0, row
        assert int(row["shared bytes"]) <= int(row["shared limit"]), row
        assert int(row["matrix instructions"]) > 0, row


@pytest.mark.parametrize("width", table.WIDTHS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_table_is_what_the_compilers_say(target, width):
    expected = [r for r in table.committed() if (r["target"], r["width"]) == (target, str(width))]
    found = [row for name in table.FORMULAS for row in table.rows(name, target, width)]
    assert [{key: str(x) for key, x in row.items()} for row in found] == expected


@pytest.mark.parametrize("name", ALL)
def test_every_formula_compiles(name):
    for made, used in compile_all(example(resolve(name), causal=False), "sm_90"):
        assert used.matrix and used.shared <= used.shared_limit, made.name


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_the_kernels_for_nan_compile(target):
    found = [made.name for made, _ in compile_all(example(resolve("cog")), target, exact=True)]
    assert found == ["forward", "forward", "query_gradients", "key_gradients"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_for_few_queries_compile(target):
    call = example(resolve("cog"), queries=1, keys=4096, causal=False)
    found = {made.name: used for made, used in compile_all(call, target, exact=True)}
    assert found["decode"].matrix and not found["decode"].spills_in_loops
    assert found["combine"].shared <= found["combine"].shared_limit


@pytest.mark.parametrize("width", [16, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes_and_widths_compile(dtype, width):
    call = example(resolve("cog"), dtype=dtype, width=width, causal=False)
    for made, used in compile_all(call, "sm_80"):
        assert used.shared <= used.shared_limit, made.name
