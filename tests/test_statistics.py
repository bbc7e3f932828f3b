"""Statistics of the weights against the measures of dense weights."""

import subprocess
import sys

import pytest
import torch

import unsoft
from tests.engines.pairwise import every_other
from unsoft import measure
from unsoft.statistics import RowStatistics

MEASURES = {name: getattr(measure, name, measure.sink_mass) for name in RowStatistics._fields}
FORMULAS = ["softmax", "cog", "relu2", "softpick", "sinh", "sigmoid"]
ENGINES = ["native", "tiled", "dense"]


def tensors(length, keys=None, *, dtype=torch.float32, batch=2, heads=4, kv_heads=2, width=16, seed=0):
    random = torch.Generator().manual_seed(seed)
    sizes = ((heads, length), (kv_heads, keys or length), (kv_heads, keys or length))
    return [torch.randn(batch, h, n, width, generator=random).to(dtype) for h, n in sizes]


def everything_visible(length, keys, **options):
    """The visibility of a call as a mask, from the weights of a formula that is 1 wherever a key is seen."""
    q, k = torch.zeros(2, 4, length, 1), torch.zeros(2, 4, keys, 1)
    return unsoft.attention(q, k, k, unsoft.Formula("1 + 0*s"), return_weights=True, **options)[1] != 0


def check(inputs, formula, *, engine="auto", tolerance=1e-5, **options):
    """Compare with the measures of dense weights in float64."""
    out, stats = unsoft.attention(
        *inputs, formula, enable_gqa=True, engine=engine, return_stats=True, **options
    )
    exact = [x.double() for x in inputs]
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        wide = options | {"attn_mask": options["attn_mask"].double()}
    else:
        wide = options
    expected, weights = unsoft.attention(*exact, formula, enable_gqa=True, return_weights=True, **wide)
    visible = everything_visible(inputs[0].shape[-2], inputs[1].shape[-2], **wide).expand(weights.shape)
    torch.testing.assert_close(
        out, unsoft.attention(*inputs, formula, enable_gqa=True, engine=engine, **options), rtol=0, atol=0
    )
    for name, function in MEASURES.items():
        actual, wanted = getattr(stats, name), function(weights, visible)
        assert actual.shape == wanted.shape, name
        if name == "top_key":
            assert actual.dtype == torch.int64
            # Where two keys are equally strong within rounding, either is the top key.
            assert torch.equal(actual < 0, wanted < 0)
            sizes = weights.abs().gather(-1, actual.clamp_min(0)[..., None])[..., 0]
            torch.testing.assert_close(sizes, weights.abs().amax(-1), rtol=1e-5, atol=tolerance)
        else:
            scale = max(1.0, float(wanted.abs().max()))
            torch.testing.assert_close(
                actual.double(),
                wanted,
                rtol=0,
                atol=tolerance * scale,
                msg=lambda m, name=name: f"{name}: {m}",
            )


@pytest.mark.parametrize(("formula", "engine"), every_other(FORMULAS, ENGINES))
def test_they_equal_the_measures_of_dense_weights(formula, engine):
    check(tensors(531), formula, engine=engine, is_causal=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("formula", ["softmax", "softpick", "relu2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": "lower_right"},
        {"attn_mask": torch.rand(130, 300, generator=torch.Generator().manual_seed(0)) < 0.3},
        {"attn_mask": torch.randn(2, 4, 130, 300, generator=torch.Generator().manual_seed(0))},
        {"window": (40, 3)},
        {"key_lengths": torch.tensor([0, 170])},
    ],
    ids=["full", "lower_right", "mask", "bias", "window", "lengths"],
)
def test_they_combine_with_every_visibility(options, formula, engine):
    check(tensors(130, 300), formula, engine=engine, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_packed_documents(engine):
    documents = torch.tensor([0] * 3 + [1] * 200 + [2] * 101)
    check(tensors(304), "cog", engine=engine, documents=documents, is_causal=True, window=(70, 0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_rounded_again(engine, dtype):
    check(tensors(300, dtype=dtype, width=64), "softmax", engine=engine, is_causal=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_float64(engine):
    check(tensors(300, dtype=torch.float64), "sinh", engine=engine, tolerance=1e-11)


@pytest.mark.parametrize("engine", ENGINES)
def test_few_queries(engine):
    check(tensors(2, 700), "cog", engine=engine, is_causal="lower_right")


@pytest.mark.parametrize("engine", ENGINES)
def test_fields_parameters_and_positions(engine):
    formula = unsoft.Formula(
        "exp(s - b*(i - j)/n + f_j - m)",
        "exp(s - b*(i - j)/n + f_j - m)",
        "s - b*(i - j)/n + f_j",
        params={"b": 0.7},
        fields={"f": "key"},
    )
    fields = {"f": torch.randn(2, 2, 260, generator=torch.Generator().manual_seed(2))}
    q, k, v = tensors(260)
    options = {"enable_gqa": True, "fields": fields, "window": (100, 20)}
    _, stats = unsoft.attention(q, k, v, formula, engine=engine, return_stats=True, **options)
    _, weights = unsoft.attention(q, k, v, formula, return_weights=True, **options)
    torch.testing.assert_close(stats.received, measure.received(weights), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy, measure.entropy(weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_see_nothing(engine):
    q, k, v = tensors(70)
    mask = torch.rand(70, 70, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[5] = False
    out, stats = unsoft.attention(q, k, v, "cog", mask, enable_gqa=True, engine=engine, return_stats=True)
    assert not out[..., 5, :].any()
    assert (stats.top_key[..., 5] == -1).all() and (stats.top_key[..., 6] >= 0).all()
    for name in ("entropy", "row_sum", "negative_share", "top_weight", "first_share"):
        assert not getattr(stats, name)[..., 5].any()


@pytest.mark.parametrize("engine", ENGINES)
def test_clones_share_alike_and_the_first_is_the_top_key(engine):
    """The last key is stronger, so that the peak rises after the clones have been summed."""
    q, k = torch.ones(1, 1, 5, 64), torch.ones(1, 1, 700, 64)
    k[..., -1, :] = 1.5
    _, stats = unsoft.attention(q, k, k, engine=engine, return_stats=True)
    share = 1 / (699 + torch.tensor(4.0).exp())  # logits are 8 and 12
    assert (stats.top_key == 699).all()
    torch.testing.assert_close(stats.received[0, 0, :-1], (5 * share).expand(699))
    _, equal = unsoft.attention(q, k[:, :, :-1], k[:, :, :-1], engine=engine, return_stats=True)
    assert not equal.top_key.any()
    torch.testing.assert_close(equal.entropy, torch.full((1, 1, 5), 699.0).log(), rtol=0, atol=1e-5)
    torch.testing.assert_close(equal.sparsity, torch.ones(1, 1, 5))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_without_mass_are_flat_and_give_nothing(engine):
    q, k = torch.ones(1, 2, 60, 32), -torch.ones(1, 2, 300, 32)
    q[:, :, ::2] *= -1  # every other row has positive logits
    _, stats = unsoft.attention(q, k, k, "relu2", engine=engine, return_stats=True)
    empty = stats._replace(**{name: getattr(stats, name)[..., 1::2] for name in stats._fields})
    assert (empty.top_key == -1).all() and (empty.sparsity == 1).all()
    torch.testing.assert_close(empty.entropy, torch.full((1, 2, 30), 300.0).log())
    for name in ("row_sum", "negative_share", "top_weight", "first_share"):
        assert not getattr(empty, name).any()
    torch.testing.assert_close(stats.received, torch.full((1, 2, 300), 0.1))  # 30 rows of 300 keys


@pytest.mark.parametrize("engine", ENGINES)
def test_a_negative_norm_turns_the_signs(engine):
    formula = unsoft.Formula("s", "s")  # the sum of logits normalises them, whatever its sign
    q, k, v = tensors(150, seed=1)
    _, stats = unsoft.attention(q, k, v, formula, enable_gqa=True, engine=engine, return_stats=True)
    _, weights = unsoft.attention(q, k, v, formula, enable_gqa=True, return_weights=True)
    torch.testing.assert_close(stats.negative_share, measure.negative_share(weights), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.row_sum, torch.ones_like(stats.row_sum), rtol=0, atol=1e-3)
    assert torch.equal(stats.top_weight.sign(), measure.top_weight(weights).sign())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_statistics_do_not_depend_on_the_scale_of_weights(size, engine):
    """Squares of such weights would underflow or overflow in float32."""
    _, stats = unsoft.attention(
        *tensors(200), unsoft.Formula(f"{size}*s"), enable_gqa=True, engine=engine, return_stats=True
    )
    _, weights = unsoft.attention(*tensors(200), unsoft.Formula("s"), enable_gqa=True, return_weights=True)
    torch.testing.assert_close(stats.sparsity, measure.sparsity(weights), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy, measure.entropy(weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_reaches_exactly_the_rows_that_see_it(engine):
    q, k, v = tensors(200)
    k[0, 0, 150] = torch.nan
    v[0, 1, 10] = torch.nan  # no weight depends on values
    _, stats = unsoft.attention(q, k, v, is_causal=True, enable_gqa=True, engine=engine, return_stats=True)
    bad = torch.zeros(2, 4, 200, dtype=torch.bool)
    bad[0, :2, 150:] = True
    assert torch.equal(stats.entropy.isnan(), bad)
    assert torch.equal(stats.top_key == -1, bad)
    assert torch.equal(stats.received[0, :2].isnan().any(-1), torch.tensor([True, True]))
    assert not stats.received[0, 2:].isnan().any() and not stats.received[1].isnan().any()


def test_dropout_does_not_change_them():
    options = {"enable_gqa": True, "return_stats": True}
    _, plain = unsoft.attention(*tensors(200), "cog", **options)
    _, dropped = unsoft.attention(*tensors(200), "cog", dropout_p=0.5, **options)
    for a, b in zip(plain, dropped, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_flow_through_the_output_only(engine):
    inputs = [x.requires_grad_() for x in tensors(150)]
    out, stats = unsoft.attention(*inputs, enable_gqa=True, engine=engine, return_stats=True)
    assert not any(x.requires_grad for x in stats)
    alone = unsoft.attention(*inputs, enable_gqa=True, engine=engine)
    for a, b in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (out, alone)), strict=True):
        assert torch.equal(a, b)


def test_leading_dimensions_are_those_of_the_query():
    q = torch.randn(5, 3, 2, 7, 4)
    _, stats = unsoft.attention(q, q, q, return_stats=True)
    assert stats.entropy.shape == stats.received.shape == (5, 3, 2, 7)
    _, stats = unsoft.attention(*(torch.randn(4, 8) for _ in range(3)), return_stats=True)
    assert stats.received.shape == (4,)


def test_the_operator_traces():
    q, k, v = tensors(150)

    @torch.compile(backend="eager", fullgraph=True)
    def run(q):
        return unsoft.attention(q, k, v, "cog", is_causal=True, enable_gqa=True, return_stats=True)

    _, eager = unsoft.attention(q, k, v, "cog", is_causal=True, enable_gqa=True, return_stats=True)
    for a, b in zip(run(q)[1], eager, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        ("linear-elu1", {}, "'return_stats' is for formulas.*'linear-elu1'.*return_weights"),
        ("entmax15", {}, "'return_stats' is for formulas"),
        ("softmax", {"engine": "sdpa"}, "'return_stats': engine 'sdpa'.*'tiled'"),
        ("softmax", {"return_weights": True}, "'return_stats' cannot be combined with 'return_weights'"),
    ],
)
def test_calls_without_statistics_raise(mechanism, options, message):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=message):
        unsoft.attention(q, q, q, mechanism, is_causal=True, return_stats=True, **options)


MEMORY = """
import torch, unsoft
from unsoft.lab.bench.fresh_process import peak, reset_peak
q, k, v = (torch.randn(1, 2, {length}, 16) for _ in range(3))
unsoft.attention(*(x[:, :, :300] for x in (q, k, v)), "cog", return_stats=True, engine="{engine}")
before = reset_peak()
unsoft.attention(q, k, v, "cog", window=(500, 0), is_causal=True, return_stats=True, engine="{engine}")
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_of_long_rows():
    """32,768 tokens that see all before them; the weights of one head would take 4.3 GB."""
    code = MEMORY.format(length=32_768, engine="native").replace("window=(500, 0), ", "")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1e9


@pytest.mark.parametrize("engine", ["native", pytest.param("tiled", marks=pytest.mark.slow)])
def test_memory_is_linear(engine):
    """The weights would take 2 * 20000**2 * 4 bytes, 3.2 GB."""
    code = MEMORY.format(length=20_000, engine=engine)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 150e6
