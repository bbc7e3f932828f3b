"""A new engine is one entry in the list of its kind: it is then accepted by name, preferred by auto,
or refused with its reason."""

import warnings

import pytest
import torch

import unsoft
from unsoft.engines import POINTWISE, Engine, registry
from unsoft.engines.linear.call import LinearResult
from unsoft.engines.linear.choice import LINEAR
from unsoft.engines.registry import no_reason
from unsoft.errors import CompilerWarning

X = torch.linspace(-1, 1, 48).view(1, 2, 6, 4)


def add(monkeypatch, registry, *engines):
    monkeypatch.setattr(registry, "engines", [*engines, *registry.engines])


def only_short(work):
    call = getattr(work, "call", work)
    return "it is for six tokens" if call.q.shape[2] > 6 else None


def test_a_formula_on_a_new_engine(monkeypatch):
    add(monkeypatch, POINTWISE, Engine("mine", only_short, lambda call: torch.zeros_like(call.q)))
    assert not unsoft.attention(X, X, X, "cog", engine="mine").any()
    with pytest.raises(ValueError, match="'mine' does not support this call: it is for six tokens"):
        unsoft.attention(*[X.repeat(1, 1, 2, 1)] * 3, "cog", engine="mine")
    masked = unsoft.attention(X, X, X, "cog", attn_mask=torch.ones(6, 6, dtype=torch.bool))
    assert not masked.any(), "auto takes the first that supports the call"


@pytest.mark.parametrize("name", ["linear-relu", "cosformer", "retention", "performer"])
def test_linear_attention_on_a_new_engine(monkeypatch, name):
    add(
        monkeypatch,
        LINEAR,
        Engine("mine", only_short, lambda work: LinearResult(torch.zeros_like(work.call.q))),
    )
    layer = unsoft.mechanism(name, heads=2, head_dim=4)
    layer(X, X, X, is_causal=True, engine="mine")
    unsoft.attention(X, X, X, name, is_causal=True, engine="mine")
    with pytest.raises(ValueError, match="six tokens"):
        layer(*[X.repeat(1, 1, 2, 1)] * 3, is_causal=True, engine="mine")


@pytest.mark.parametrize(
    "name", ["cog", "gpam", "differential", "linear-relu", "retention", "magnitude", "gated+cog"]
)
def test_an_engine_is_honoured_or_refused_for_every_kind_of_mechanism(name):
    layer = unsoft.mechanism(name, heads=2, head_dim=4)
    q = torch.randn(1, layer.query_heads, 6, 4)
    with pytest.raises(ValueError, match="unknown name 'tilde'; did you mean 'tiled'"):
        layer(q, X, X, is_causal=True, engine="tilde")
    results = [layer(q, X, X, is_causal=True, engine=engine) for engine in ("auto", "tiled", "dense")]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-4)


def test_one_that_is_not_available_is_an_error_by_name_and_a_warning_of_auto(monkeypatch):
    cold = Engine("cold", no_reason, lambda call: 1 / 0, unavailable_reason=lambda call: "no compiler")
    add(monkeypatch, POINTWISE, cold)
    monkeypatch.setattr(registry, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="'cold' is not available here: no compiler.*'auto'"):
            unsoft.attention(X, X, X, "cog", engine="cold")
    mask = torch.ones(6, 6, dtype=torch.bool)
    with pytest.warns(CompilerWarning, match="'cold' is not available .no compiler"):
        result = unsoft.attention(X, X, X, "cog", attn_mask=mask)
    torch.testing.assert_close(result, unsoft.attention(X, X, X, "cog", engine="dense"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unsoft.attention(X, X, X, "cog", attn_mask=mask)
