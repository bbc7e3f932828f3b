"""Calls of other lengths run the same kernels: nothing is compiled again for every token of a text."""

from unittest import mock

import pytest

pytest.importorskip("triton")

from tests.engines.triton.compiled.ahead import example, pretending  # noqa: E402
from unsoft.engines.call import Upstream  # noqa: E402
from unsoft.engines.triton import binding  # noqa: E402
from unsoft.mechanisms import resolve  # noqa: E402

pytestmark = pytest.mark.gpu_check


def compiled_for(queries, keys):
    """Return the compile-time constants of a call's kernels, by name; Triton adds which numbers are 1, and
    which are multiples of 16."""
    call, started = example(resolve("cog"), queries=queries, keys=keys, causal="lower_right"), []
    with (
        pretending("sm_80", started.append),
        mock.patch.object(binding, "_splits", lambda programs, keys: keys // 256),
    ):
        rows = binding.forward(call)
        binding.backward(call, Upstream(rows.out, rows, False, False))
    return [
        (made.name, {x.name: made.arguments.get(x.name) for x in made.kernel.params if x.is_constexpr})
        for made in started
    ]


@pytest.mark.parametrize("queries", [1, 100])
def test_no_kernel_is_compiled_for_a_length(queries):
    first, *others = (compiled_for(queries, keys) for keys in (512, 1000, 5000))
    assert {name for name, _ in first} >= {"decode" if queries == 1 else "forward", "key_gradients"}
    assert all(other == first for other in others)
