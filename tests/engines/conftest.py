"""Calls to run engines on, and the definition of attention written out row by row as their oracle."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.engines.tiled import tiles
from unsoft.engines.visibility import count_visible
from unsoft.formula import Formula, evaluate
from unsoft.mechanisms import resolve


def _make_call(
    mechanism: str | Formula,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 7,
    keys: int = 9,
    dim: int = 6,
    value_dim: int = 5,
    sigma: float = 1.5,
    dtype: torch.dtype = torch.float64,
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    causal: int | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Call:
    """A random call whose tensors want gradients; ``mask`` and ``bias`` are 4-D shapes."""
    random = torch.Generator().manual_seed(seed)
    formula = resolve(mechanism)
    compute = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(to).requires_grad_()

    defaults = torch.tensor([formula.params[name] for name in sorted(formula.params)], dtype=compute)
    params = defaults[:, None].expand(-1, heads) * (
        1 + 0.1 * torch.rand(heads, generator=random, dtype=compute)
    )
    visible = None if mask is None else torch.rand(mask, generator=random) > 0.4
    counts = count_visible(visible, causal, length, keys, torch.device("cpu"), compute)
    return Call(
        q=normal(batch, heads, length, dim),
        k=normal(batch, kv_heads, keys, dim),
        v=normal(batch, kv_heads, keys, value_dim),
        rule=formula,
        params=params.requires_grad_(),
        visible=visible,
        bias=None if bias is None else normal(*bias, to=compute),
        causal_offset=causal,
        counts=counts if "n" in formula.uses else None,
        scale=sigma / dim**0.5,
        dropout_p=dropout,
        seed=torch.randint(0, 2**32, (2,), generator=random) if dropout else None,
    )


def _by_rows(call: Call) -> Tensor:
    """Weights (B, H, L, S) by the definition: each row alone, made of the keys it sees and nothing else."""
    (batch, heads, length, _), keys = call.q.shape, call.k.shape[2]
    group = heads // call.k.shape[1]
    formula, p = call.formula, call.formula.mass_degree
    rows = []
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(length)):
        seen = torch.ones(keys, dtype=torch.bool)
        if call.visible is not None:
            seen &= call.visible.expand(batch, heads, length, keys)[b, h, i]
        if call.causal_offset is not None:
            seen &= torch.arange(keys) <= i + call.causal_offset
        row = torch.zeros(keys, dtype=call.q.dtype)
        if seen.any():
            s = call.scale * (call.k[b, h // group] @ call.q[b, h, i])[seen]
            strength = torch.zeros_like(s)
            if call.bias is not None:
                added = call.bias.expand(batch, heads, length, keys)[b, h, i][seen]
                s, strength = (s + added, strength) if formula.bias == "logit" else (s, added)
            values = {
                "s": s,
                "n": seen.sum(),
                "i": i + (call.causal_offset or 0),
                "j": torch.arange(keys)[seen],
                **dict(zip(sorted(formula.params), call.params[:, h], strict=True)),
            }
            values = {name: x if torch.is_tensor(x) else torch.tensor(x) for name, x in values.items()}
            values = {name: x.to(call.q.dtype) for name, x in values.items()}
            if formula.peak is not None:
                values["m"] = evaluate(formula.peak, values).max().detach()
            a = evaluate(formula.weight, values) * strength.exp()
            if formula.mass is not None:
                z = (evaluate(formula.mass, values) * (p * strength).exp()).sum()
                per_row = {name: x for name, x in values.items() if name not in ("s", "j")}
                if formula.offset_mass is not None:
                    z = z + evaluate(formula.offset_mass, per_row)
                norm = z if formula.norm is None else evaluate(formula.norm, per_row | {"z": z})
                a = a / norm if norm != 0 else a * 0
            row = row.masked_scatter(seen, a)
        rows.append(row)
    return torch.stack(rows).view(batch, heads, length, keys)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """For tensors so small that a second thread is only waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_call() -> Callable[..., Call]:
    """Makes a random :class:`Call`."""
    return _make_call


@pytest.fixture
def by_rows() -> Callable[[Call], Tensor]:
    """Weights by the definition."""
    return _by_rows


@pytest.fixture
def leaves() -> Callable[[Call], list[Tensor]]:
    """Everything in a call that gets a gradient."""
    return lambda call: [
        x for x in (call.q, call.k, call.v, call.bias, call.params) if x is not None and x.numel()
    ]


@pytest.fixture
def in_double() -> Callable[[Call], Call]:
    """The same call, of the same numbers, in float64."""

    def convert(call: Call) -> Call:
        names = [n for n in ("q", "k", "v", "bias", "params", "counts") if getattr(call, n) is not None]
        copies = {n: getattr(call, n).detach().double() for n in names}
        return replace(call, **{n: x.requires_grad_(n != "counts") for n, x in copies.items()})

    return convert


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> tiles.BlockSizes:
    """Tiles so small that a few rows and keys make many of them, with ragged ends."""
    sizes = tiles.BlockSizes(rows=3, keys=4, elements=40)
    monkeypatch.setattr(tiles, "CPU_TILES", sizes)
    return sizes
