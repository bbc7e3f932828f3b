"""Points that come one after the other: compiled code, torch and the whole sequence give the same weights."""

import pytest
import torch

from unsoft.errors import SolverError
from unsoft.magnitude import window as module
from unsoft.magnitude.gaussian import System
from unsoft.magnitude.prefix import arrival_weights
from unsoft.magnitude.streaming import Arrival, streamed_weights
from unsoft.magnitude.window import Window


@pytest.fixture(params=["compiled", "torch"])
def code(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(module, "kernels_for", lambda x, engine: None)
    return request.param


def points(n=300, width=20, systems=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(systems, n, width, generator=g, dtype=torch.float64) / width**0.5
    x[:, 40:80] = x[:, :1] + 0.05 * x[:, 40:80]  # a crowd
    return x.to(dtype), torch.rand(systems, n, generator=g) > 0.1


PIECES = [[1] * 300, [255, 1, 1, 43], [100, 17, 16, 3, 164]]


@pytest.mark.parametrize("pieces", PIECES, ids=["ones", "around the switch", "uneven"])
@pytest.mark.parametrize("masked", [False, True])
def test_arrival_in_pieces(code, pieces, masked):
    x, present = points()
    present = present if masked else None
    whole = {
        "exact": arrival_weights(System(x, present, 0.1)),
        "streamed": streamed_weights(System(x, present, 0.1), centres=30, chunk=64, first=100),
    }
    for name, arriving in (("exact", Arrival()), ("streamed", Arrival(30, 64, 100))):
        start, actual = 0, []
        for n in pieces:
            seen = None if present is None else present[:, start : start + n]
            actual.append(arriving.add(System(x[:, start : start + n], seen, 0.1)))
            start += n
        torch.testing.assert_close(torch.cat(actual, dim=1), whole[name], rtol=1e-9, atol=1e-9)


def test_a_point_that_is_not_finite_is_not_there(code):
    x, _ = points(40)
    whole = Window()
    expected = torch.cat([whole.add(System(x[:, [t]], None, 0.1)) for t in range(40) if t != 7], dim=1)
    x[1, 7, 3], x[0, 7], x[2, 7] = torch.nan, torch.inf, torch.nan
    holed = Window()
    actual = torch.cat([holed.add(System(x[:, [t]], None, 0.1)) for t in range(40)], dim=1)
    assert actual[:, 7].eq(0).all()
    torch.testing.assert_close(actual[:, torch.arange(40) != 7], expected, rtol=1e-12, atol=1e-12)


def test_float32_is_close(code):
    x, _ = points()
    wide, narrow = Arrival(30, 64), Arrival(30, 64)
    a, b = (
        torch.cat([s.add(System(y[:, [t]], None, 0.1)) for t in range(200)], 1)
        for s, y in ((wide, x), (narrow, x.float()))
    )
    torch.testing.assert_close(b.double(), a, rtol=0, atol=1e-4)


def test_what_cannot_be_done_is_said(code):
    window = Window()
    with pytest.raises(SolverError, match="not positive definite.*from point 1 on"):
        window.add(System(torch.zeros(1, 3, 2), None, 0.0))
    window = Window()
    window.add(System(torch.zeros(2, 3, 2), None, 0.1))
    with pytest.raises(
        ValueError, match="'key' brings points 5 wide in 2 systems; the cache holds points 2 wide in 2"
    ):
        window.add(System(torch.zeros(2, 3, 5), None, 0.1))


def test_gates_in_one_call_are_the_gates():
    """What a decoding step does at once, and what it does in parts."""
    x, _ = points(50, systems=4)
    together, apart = Window(), Window()
    root, beta, gamma = (
        torch.tensor([0.7, 1.2], dtype=x.dtype),
        torch.tensor([1.5, -0.5]),
        torch.tensor([0.1, 0.3]),
    )
    constants = (root[:, None, None], beta.to(x.dtype)[:, None], gamma.to(x.dtype)[:, None])
    keys = x.unflatten(0, (2, 2))
    values = torch.randn(2, 2, 50, 7, dtype=x.dtype)
    nothing_yet = together.gate(keys[:, :, :1], values[:, :, :1], 0.1, constants, "auto")
    assert nothing_yet is None
    for t in range(50):
        key, value = keys[:, :, [t]], values[:, :, [t]]
        scaled = (key * constants[0]).flatten(0, 1)
        weights = apart.add(System(scaled, None, 0.1)).view(2, 2, 1)
        expected = torch.sigmoid(constants[1] * weights + constants[2])
        if t == 0:
            together.add(System(scaled, None, 0.1))
            continue
        gates, gated = together.gate(key, value, 0.1, constants, "auto")
        torch.testing.assert_close(gates, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gated, value * expected[..., None], rtol=1e-12, atol=1e-12)
