"""``engine=`` of a magnitude mechanism chooses the code of its gates too, or refuses with a reason."""

import pytest
import torch

import unsoft
from unsoft.engines import registry
from unsoft.engines.native import availability, gaussian
from unsoft.engines.native.compiler import CompilationError
from unsoft.errors import CompilerWarning

FORMS = {
    "bidirectional cg": {},
    "bidirectional cholesky": {"solver": "cholesky"},
    "bidirectional pcg": {"solver": "pcg"},
    "bidirectional lowrank": {"solver": "lowrank"},
    "arrival": {"causal": "arrival"},
    "streaming": {"causal": "streaming", "centres": 20, "chunk": 50},
    "prefix": {"causal": "prefix"},
}


@pytest.fixture(autouse=True)
def small(one_thread):
    """Everything here is small."""


@pytest.fixture
def blocked(monkeypatch):
    """From now on every use of the compiled Gaussian code is an error."""

    def library(double):
        raise AssertionError("compiled code was used")

    monkeypatch.setattr(gaussian, "library", library)


@pytest.fixture
def no_compiler(monkeypatch):
    def library(name, double):
        raise CompilationError("no C++ compiler was found")

    monkeypatch.setattr(availability, "library", library)
    monkeypatch.setattr(availability, "_failed", {})
    monkeypatch.setattr(registry, "_warned", set())


def layer_of(form):
    return unsoft.mechanism("magnitude+cog", heads=2, head_dim=8, **FORMS[form])


def attended(form, engine, n):
    """Output, and the gradients of all inputs and of t, beta and gamma."""
    g = torch.Generator().manual_seed(n)
    layer = layer_of(form)
    inputs = [torch.randn(1, 2, n, 8, generator=g).requires_grad_() for _ in range(3)]
    out = layer(*inputs, is_causal=not form.startswith("bidirectional"), engine=engine)
    upstream = torch.randn(out.shape, generator=g)
    learned = [layer.log_t, layer.beta, layer.gamma]
    return out.detach(), *torch.autograd.grad((out * upstream).sum(), [*inputs, *learned])


def decoded(form, engine, n, step):
    """All but the last tokens at once, then piece by piece; ``engine(i)``: that of piece i."""
    g = torch.Generator().manual_seed(n)
    layer = layer_of(form)
    q, k, v = (torch.randn(1, 2, n, 8, generator=g) for _ in range(3))
    cache, parts = layer.new_cache(1), []
    cuts = [0, *range(n - 4 * step, n + 1, step)]
    with torch.no_grad():
        for i, (low, high) in enumerate(zip(cuts, cuts[1:], strict=False)):
            now = slice(low, high)
            parts.append(layer(q[:, :, now], k[:, :, now], v[:, :, now], cache=cache, engine=engine(i)))
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [129, 300])
def test_engines_agree(form, n):
    dense = attended(form, "dense", n)
    # pcg stops at a residual of 1e-4, in either code; with eps = 0.1 weights are off by ten times that
    tolerance = 2e-3 if form == "bidirectional pcg" else 2e-4
    for engine in ["auto"] if form == "prefix" else ["native", "tiled"]:
        actual = attended(form, engine, n)
        for a, b in zip(actual[:4], dense[:4], strict=True):  # the output, and gradients of q, k, v
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))
        # t, beta and gamma: sums over all keys, in which large terms cancel
        terms = float(dense[2].abs().sum() + dense[3].abs().sum())
        for a, b in zip(actual[4:], dense[4:], strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-6 * terms)


@pytest.mark.parametrize("form", ["arrival", "streaming"])
@pytest.mark.parametrize("n", [129, 300])
@pytest.mark.parametrize("step", [1, 3])
def test_engines_agree_in_decoding(form, n, step):
    """Also if the engine changes from step to step."""
    dense = decoded(form, lambda i: "dense", n, step)
    native = decoded(form, lambda i: "native", n, step)
    mixed = decoded(form, lambda i: ("auto", "native", "dense", "tiled", "native")[i], n, step)
    for actual in (native, mixed):
        torch.testing.assert_close(actual, dense, rtol=0, atol=1e-4 * float(dense.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_torch_engines_run_no_compiled_code(form, blocked):
    attended(form, "dense", 129)
    if form != "prefix":
        attended(form, "tiled", 129)
        with pytest.raises(AssertionError, match="compiled code was used"):
            attended(form, "native", 129)


@pytest.mark.parametrize("form", ["arrival", "streaming", "prefix"])
def test_torch_engines_decode_without_compiled_code(form, blocked):
    decoded(form, lambda i: "dense", 129, 1)
    with pytest.raises(AssertionError, match="compiled code was used"):
        decoded(form, lambda i: "auto", 129, 1)


@pytest.mark.parametrize("form", ["bidirectional cg", "arrival", "streaming"])
def test_native_is_refused_without_its_library(form, no_compiler):
    reason = "'native' is not available here: no C.. compiler was found"
    with pytest.raises(ValueError, match=reason):
        attended(form, "native", 129)
    with pytest.raises(ValueError, match=reason):
        decoded("arrival", lambda i: "native", 129, 1)
    with pytest.warns(CompilerWarning, match="no C"):
        actual = attended(form, "auto", 129)[0]
    torch.testing.assert_close(actual, attended(form, "tiled", 129)[0])
