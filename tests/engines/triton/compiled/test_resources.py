"""Compiled for real, for six kinds of GPU: what the compilers say."""

import pytest
import torch

triton = pytest.importorskip("triton")

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
from unsoft.formula import Formula  # noqa: E402
from unsoft.mechanisms import resolve  # noqa: E402

pytestmark = pytest.mark.gpu_check
ALL = [name for name in mechanisms() if isinstance(resolve(name), Formula)]


def compile_all(call, target, exact=False):
    for made in launches(call, target, exact=exact):
        with pretending(target, None):
            yield made, resources(compile_launch(made, first_sizes(made, target)))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles(target, width):
    for made, used in compile_all(example(resolve("cog"), width=width), target):
        assert used.matrix and used.shared <= used.shared_limit, made.name
        if target in ("sm_80", "sm_90", "gfx942"):  # whose tile sizes were found by compiling
            assert not used.spills_in_loops, made.name


@pytest.mark.parametrize("name", ALL)
def test_every_formula_compiles(name):
    for made, used in compile_all(example(resolve(name), causal=False), "sm_90"):
        assert used.matrix and used.shared <= used.shared_limit, made.name


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_the_kernels_for_nan_compile(target):
    found = [made.name for made, _ in compile_all(example(resolve("cog")), target, exact=True)]
    assert found == ["forward", "forward", "query_gradients", "key_gradients"]


@pytest.mark.parametrize("width", [16, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes_and_widths_compile(dtype, width):
    call = example(resolve("cog"), dtype=dtype, width=width, causal=False)
    for made, used in compile_all(call, "sm_80"):
        assert used.shared <= used.shared_limit, made.name
