"""Selection of the GPU engine for linear attention and magnitude, and its reasons when it is unsupported;
without Triton or a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import unsoft
from unsoft.engines import gaussian as choice
from unsoft.engines.gaussian import GAUSSIAN, kernels_for
from unsoft.engines.linear import call as linear_call
from unsoft.engines.linear import choice as linear_choice
from unsoft.engines.linear.attention import linear_attention
from unsoft.engines.triton import availability, gaussian, recurrence
from unsoft.engines.triton.launch import KernelError
from unsoft.testing.device import KINDS, LINEAR_AND_MAGNITUDE, check_device

X = torch.linspace(-1, 1, 48).view(1, 2, 6, 4)


@pytest.fixture
def on_gpu(monkeypatch):
    """Treat tensors of the CPU as if on a GPU, with torch operations instead of kernels; return the list of
    calls."""
    calls = []

    def sums(*tensors, rough, **options):
        calls.append(rough)
        return linear_attention(*tensors, **options)

    monkeypatch.setattr(availability, "missing", lambda device, index: None)
    monkeypatch.setattr(availability, "failure", lambda device, index: None)
    for room in (linear_choice, choice):
        monkeypatch.setattr(room, "kernels_failure", lambda *device: None)
    monkeypatch.setattr(linear_choice, "recurrence", sums)
    return calls


def layer(name):
    return unsoft.mechanism(name, heads=2, head_dim=4)


@pytest.mark.parametrize(
    "name", ["linear-relu", "linear-taylor2", "linear-exp", "performer(6)", "cosformer", "retention"]
)
def test_linear_attention_by_name(on_gpu, name):
    actual = layer(name)(X, X, X, is_causal=True, engine="triton")
    assert on_gpu == [False]
    assert torch.equal(actual, layer(name)(X, X, X, is_causal=True, engine="tiled"))


def test_other_lengths_masks_of_keys_and_caches_are_taken(on_gpu):
    cosformer, mask = layer("cosformer"), torch.tensor([True, True, False, True, True, True])
    cosformer(X[:, :, :3], X, X, is_causal="lower_right", engine="triton")
    cosformer(X[:, :, :3], X, X, mask.view(1, 1, 1, 6), engine="triton")
    cache = cosformer.new_cache(1)
    for part in X.split(2, dim=2):
        cosformer(part, part, part, cache=cache, engine="triton")
    assert len(on_gpu) == 5


def test_products_are_rough_where_inputs_have_few_digits(on_gpu):
    layer("linear-relu")(*[X.bfloat16()] * 3, engine="triton")
    assert on_gpu == [True]


@pytest.mark.parametrize("name", ["linear-relu", "retention", "cosformer", "linear-exp", "performer(6)"])
def test_nothing_waits_for_the_gpu(on_gpu, name, monkeypatch):
    """On tensors without numbers, where asking for one is an error: calls can be captured in CUDA graphs."""
    monkeypatch.setattr(linear_choice, "recurrence", recurrence.recurrence)
    monkeypatch.setattr(linear_call, "_is_cheap_to_read", lambda *x: False)  # as on a GPU
    with FakeTensorMode():
        module = layer(name)
        x = torch.empty(1, 2, 40, 4, requires_grad=True)
        keys = torch.ones(1, 1, 1, 40, dtype=torch.bool)
        for options in ({"is_causal": True}, {"is_causal": "lower_right", "attn_mask": keys}):
            queries = x[:, :, -9:] if "attn_mask" in options else x
            module(queries, x, x, **options, engine="triton").sum().backward()
        cache = module.new_cache(1)
        with torch.no_grad():
            for tokens in (5, 1):
                step = x[:, :, :tokens]
                out = module(step, step, step, cache=cache, engine="triton")
                assert out.shape == (1, 2, tokens, 4)
        with pytest.raises(DataDependentOutputException):  # what a call that waits would meet
            bool(x.sum().isfinite())


@pytest.mark.parametrize("name", ["linear-elu1", "linear-exp"])
def test_nan_and_inf_without_asking(name, monkeypatch):
    """Compare the path of a GPU, which does not read whether all numbers are finite, with that of the CPU."""
    q, k, v = torch.randn(3, 2, 2, 20, 4, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.arange(20).view(1, 1, 1, 20) != 7
    k[0, 0, 7, 0] = torch.nan  # masked: nobody sees it
    for bad in (False, True):
        if bad:
            q[0, 0, 3, 1], k[0, 1, 9, 0], v[1, 0, 12, 2] = torch.nan, torch.inf, -torch.inf
        results = []
        for asks in (True, False):
            if not asks:
                monkeypatch.setattr(linear_call, "_is_cheap_to_read", lambda *x: False)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = layer(name).double()(*leaves, mask, is_causal=True, engine="tiled")
            results.append([out, *torch.autograd.grad(out.nansum(), leaves)])
        monkeypatch.undo()
        assert bool(results[0][0].isnan().any()) == bad
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)


REFUSED = {
    "dropout": ("linear-relu", {"dropout_p": 0.5}, "need the weights"),
    "float mask": (
        "linear-relu",
        {"attn_mask": torch.ones(6, 6)},
        "need the weights",
    ),
    "mask of rows": (
        "linear-relu",
        {"attn_mask": torch.eye(6, dtype=torch.bool)},
        "masks of whole keys, and this one depends on the query; use 'tiled'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_do_not_take_is_declined_with_a_reason(on_gpu, case):
    name, options, reason = REFUSED[case]
    with pytest.raises(ValueError, match=f"'triton' does not support this call: .*{reason}"):
        layer(name)(X, X, X, **options, engine="triton")
    layer(name)(X, X, X, **options)  # auto takes another engine
    assert not on_gpu


def test_weights_and_too_many_heads_are_declined(on_gpu):
    with pytest.raises(ValueError, match="needs engine 'dense' or 'auto', not 'triton'"):
        layer("linear-relu")(X, X, X, return_weights=True, engine="triton")
    many = torch.zeros(1, 1, 1, 4).expand(32768, 2, 1, 4)
    with pytest.raises(ValueError, match="batch times heads is more than 65535; use 'tiled'"):
        layer("linear-relu")(many, many, many, engine="triton")


def test_tensors_of_the_cpu_are_refused_with_the_engine_that_works(monkeypatch):
    monkeypatch.setattr(availability, "installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("linear-relu", "magnitude"):
        with pytest.raises(ValueError, match="the tensors are on the CPU; use 'native'"):
            layer(name)(X, X, X, engine="triton")


@pytest.mark.parametrize("kind", LINEAR_AND_MAGNITUDE, ids=lambda kind: kind.name)
def test_doctor_checks_them(kind):
    (finding,) = check_device("cpu", "tiled", (kind,))
    assert finding.passed and kind in KINDS, finding


def test_auto_wants_them_on_a_gpu_and_nowhere_else(on_gpu):
    layer("linear-relu")(X, X, X, is_causal=True)
    assert not on_gpu
    there = torch.zeros(1, 3, 2, device="meta")
    assert GAUSSIAN.choose("auto", there).name == "triton"
    assert GAUSSIAN.choose("auto", torch.zeros(1, 3, 2)).name in ("native", "torch")
    assert GAUSSIAN.named("triton").unsupported_reason(there.expand(70000, 3, 2)) == (
        "more than 65535 systems; use 'tiled'"
    )


@pytest.mark.parametrize("which", ["linear", "gaussian"])
def test_kernels_that_cannot_be_compiled_are_an_error_by_name(monkeypatch, which):
    monkeypatch.setattr(availability, "missing", lambda device, index: None)
    monkeypatch.setattr(availability, "failure", lambda device, index: None)

    def broken(*device):
        raise KernelError("no room for tiles")

    monkeypatch.setattr(recurrence, "_run_all_kernels", broken)
    monkeypatch.setattr(gaussian, "_run_all_kernels", broken)
    with pytest.raises(ValueError, match="'triton' is not available here: no room for tiles"):
        if which == "gaussian":
            kernels_for(X[0], "triton")
        else:
            layer("linear-relu")(X, X, X, engine="triton")


def test_an_engine_without_a_kernel_leaves_the_work_to_torch(monkeypatch):
    """Everything of magnitude works with the two kernels that a GPU engine has to bring."""
    from unsoft.magnitude.gaussian import DenseGaussian

    def between(x, y):
        return (-torch.cdist(x, y).square()).exp()

    class Matrix(DenseGaussian):
        def __init__(self, x, present=None, first=None, reuse=None):
            super().__init__(x, present, first)

    few = choice.GaussianKernels(between=between, matrix=Matrix)
    engine = choice.Engine("few", lambda x: None, lambda x: few)
    monkeypatch.setattr(GAUSSIAN, "engines", [engine, *GAUSSIAN.engines])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 4).double() for _ in range(3))
    for causal in (True, False):
        magnitude = layer("magnitude+cog").double()
        results = [magnitude(q, k, v, is_causal=causal, engine=engine) for engine in ("auto", "dense")]
        torch.testing.assert_close(*results)
    magnitude = layer("magnitude+cog").double()
    cache, outs = magnitude.new_cache(1), []
    with torch.no_grad():
        for t in range(20):
            step = (x[:, :, t : t + 1] for x in (q, k, v))
            outs.append(magnitude(*step, cache=cache, is_causal="lower_right"))
        torch.testing.assert_close(torch.cat(outs, dim=2), magnitude(q, k, v, is_causal=True, engine="dense"))
