"""Points and the definition that everything is compared with: the dense system in float64."""

import pytest
import torch


@pytest.fixture(autouse=True)
def small(one_thread):
    """Everything here is small."""


@pytest.fixture
def keys():
    """(2, 3, 90, 5) float64, two of them coinciding."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 3, 90, 5, generator=generator, dtype=torch.float64)
    k[..., 5, :] = k[..., 6, :]
    return k


@pytest.fixture(params=[False, True], ids=["all", "masked"])
def mask(request):
    if not request.param:
        return None
    return torch.rand(2, 3, 90, generator=torch.Generator().manual_seed(1)) > 0.2


def _system(keys, t, eps, mask=None):
    """Z + eps and the right-hand side, by the definition."""
    squares = (keys[..., :, None, :] - keys[..., None, :, :]).square().sum(-1)
    z = torch.exp(-torch.as_tensor(t, dtype=keys.dtype)[..., None, None] * squares / keys.shape[-1])
    n = keys.shape[-2]
    there = torch.ones(keys.shape[:-1], dtype=torch.bool) if mask is None else mask
    unit = torch.eye(n, dtype=keys.dtype)
    z = torch.where(there[..., :, None] & there[..., None, :], z, 0.0)
    return z * (1 - unit) + (1 + eps) * unit, there.to(keys.dtype)


@pytest.fixture
def system():
    """(keys, t, eps, mask) -> matrix and right-hand side."""
    return _system


@pytest.fixture
def exact():
    """(keys, t, eps, mask) -> weights."""

    def weights(keys, t, eps, mask=None):
        a, b = _system(keys, t, eps, mask)
        return torch.linalg.solve(a, b[..., None])[..., 0]

    return weights
