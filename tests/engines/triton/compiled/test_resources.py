"""Compiled for real, for six kinds of GPU: what the compilers say, and the table of it that is committed."""

import pytest
import torch

pytest.importorskip("triton")

from tests.engines.triton.compiled.ahead import (  # noqa: E402
    TARGETS,
    compile_launch,
    example,
    first_sizes,
    launches,
    pretending,
)
from tests.engines.triton.compiled.resources import resources  # noqa: E402
from tests.engines.triton.compiled.table import committed, rows  # noqa: E402
from unsoft import mechanisms  # noqa: E402
from unsoft.formula import Formula  # noqa: E402
from unsoft.mechanisms import resolve  # noqa: E402

pytestmark = pytest.mark.gpu_check
SMALL = ("sm_80", "gfx942")
ALL = [name for name in mechanisms() if isinstance(resolve(name), Formula)]


def compile_all(call, target, exact=False):
    for made in launches(call, target, exact=exact):
        with pretending(target, None):
            yield made, resources(compile_launch(made, first_sizes(made, target)))


@pytest.mark.parametrize(
    "target", [pytest.param(x, marks=pytest.mark.gpu_small) if x in SMALL else x for x in TARGETS]
)
def test_the_table_is_what_the_compilers_say(target):
    assert list(rows(target, 64, "cog")) == committed()[target, 64, "cog"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "width", "formula"), committed())
def test_every_line_of_the_table(target, width, formula):
    assert list(rows(target, width, formula)) == committed()[target, width, formula]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
@pytest.mark.parametrize("name", ALL)
def test_every_formula_compiles(name, target):
    for made, used in compile_all(example(resolve(name), causal=False), target):
        assert used.matrix or made.name == "prepare", made.name
        assert used.shared <= used.shared_limit, made.name


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_the_kernels_for_nan_compile(target):
    names = [made.name for made, _ in compile_all(example(resolve("cog")), target, exact=True)]
    assert names == ["forward", "forward", "query_gradients", "key_gradients"]


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float32, 80),
        *(
            pytest.param(dtype, width, marks=pytest.mark.slow)
            for dtype in (torch.float16, torch.float32, torch.float64)
            for width in (16, 256)
        ),
    ],
    ids=str,
)
def test_other_dtypes_and_widths_compile(dtype, width):
    call = example(resolve("cog"), dtype=dtype, width=width, causal=False)
    for made, used in compile_all(call, "sm_80"):
        assert used.shared <= used.shared_limit, made.name
