"""torch.compile of functions that call ``unsoft.attention``: one graph, the results of eager mode."""

import pytest
import torch

import unsoft

OWN = unsoft.Formula("tanh(b*s)*exp(abs(s) - m)", "exp(abs(s) - m)", "abs(s)", params={"b": 0.5})
CASES = {
    "softmax": ("softmax", {}),
    "cog, native": ("cog", {"engine": "native"}),
    "cog, tiled": ("cog", {"engine": "tiled"}),
    "cog, dense": ("cog", {"engine": "dense"}),
    "own": (OWN, {}),
    "relu2, masked": ("relu2", {"attn_mask": torch.arange(9) < 7}),
}


def results(function, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in ("cog, native", "own", "relu2, masked") else pytest.mark.slow)
        for x in CASES
    ],
)
def test_one_graph_forward_and_backward(name):
    """fullgraph=True refuses graph breaks; operations around the call are compiled with it."""
    mechanism, options = CASES[name]

    def function(q, k, v):
        return unsoft.attention(2 * q, k.sin(), v, mechanism, is_causal=True, **options).relu()

    inputs = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mine, expected in zip(results(compiled, inputs), results(function, inputs), strict=True):
        assert torch.allclose(mine, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own
def test_inductor():
    """The default backend, which generates code for what surrounds the operator."""
    mask = torch.randn(2, 9, 9)
    b = torch.tensor([0.4, 0.6])

    def function(q, k, v, mask, b):
        return unsoft.attention(q * 2, k, v + 1, OWN, attn_mask=mask, params={"b": b})

    inputs = [*(torch.randn(1, 2, 9, 8) for _ in range(3)), mask, b]
    compiled = torch.compile(function, fullgraph=True)
    for mine, expected in zip(results(compiled, inputs), results(function, inputs), strict=True):
        assert torch.allclose(mine, expected, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_lengths_do_not_need_a_graph_each(dynamic):
    compilations = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=compilations, dynamic=dynamic)
    def function(q, k, v):
        return unsoft.attention(q, k, v, "cog", is_causal=True)

    for length in (9, 12, 17, 33):
        q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
        assert torch.allclose(function(q, k, v), unsoft.attention(q, k, v, "cog", is_causal=True), atol=1e-5)
    assert compilations.frame_count <= 2
