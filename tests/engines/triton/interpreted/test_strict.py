"""Faults that the strict interpreter reports and Triton's own hides."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu_check


@triton.jit
def copy(x, y, STEP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def product(x, y, z):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def without_other(x, y):
    at = tl.arange(0, 16)
    tl.store(y + at, tl.load(x + at, mask=at < 8))


def test_a_proper_copy():
    x, y = torch.randn(64), torch.empty(64)
    copy[(4,)](x, y, 16, 16)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("size", "step", "message"), [(32, 16, "outside"), (64, 8, "two programs write")], ids=str
)
def test_wrong_stores(size, step, message):
    with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
        copy[(4,)](torch.randn(64), torch.empty(size), step, 16)


def test_a_race_of_reading_and_writing():
    x = torch.randn(64)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="reads"):
        copy[(2,)](x, x, 8, 16)


def test_what_a_masked_load_leaves_open_is_not_a_number():
    y = torch.empty(16)
    without_other[(1,)](torch.randn(64), y)
    assert y[8:].isnan().all() and not y[:8].isnan().any()


def test_bfloat16_is_multiplied_as_numbers():
    a, b, c = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.empty(16, 16)
    product[(1,)](a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float())
