"""Engines read no memory that they have not written: every uninitialised tensor is handed out full of NaN."""

import pytest
import torch

import unsoft

OWN = unsoft.Formula(
    "tanh(b*s)*exp(abs(s) - m)", "exp(abs(s) - m)", "abs(s)", offset_mass="b*exp(-m)", params={"b": 0.5}
)


def poisoned(make):
    """An allocating function whose floating tensors start as NaN."""

    def allocate(*args, **kwargs):
        x = make(*args, **kwargs)
        allocated.append(x.is_floating_point())
        return x.fill_(torch.nan) if x.is_floating_point() else x

    return allocate


allocated = []


@pytest.fixture
def poisoned_memory(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    allocated.clear()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("theme", ["parity", "edges", "dropout", "decoding"])
@pytest.mark.parametrize("mechanism", ["softmax", "relu2", pytest.param(OWN, id="own")])
@pytest.mark.usefixtures("poisoned_memory")
def test_uninitialised_memory_is_never_read(mechanism, theme):
    unsoft.testing.check_mechanism(mechanism, engines=["native", "tiled"], only=theme, quick=True)
    assert any(allocated), "the engines allocate with the functions that this test replaces"
