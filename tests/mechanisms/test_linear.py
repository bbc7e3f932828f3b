"""Linear attention and pairs at real sizes and at their edges,
against their definitions in plain torch (unsoft.testing.definitions)."""

import copy
import math
from itertools import product

import pytest
import torch

import unsoft
from tests.engines.pairwise import pairwise
from unsoft.engines import registry
from unsoft.engines.linear import choice
from unsoft.engines.linear.logarithms import log_products
from unsoft.errors import CompilerWarning
from unsoft.modules.cache import StateCache
from unsoft.modules.definition import WrittenCall
from unsoft.modules.delta import Delta
from unsoft.modules.rows import RowCoupled
from unsoft.modules.spec import MechanismSpec
from unsoft.testing.definitions import definition_of

NAMES = [
    name
    for name, actual in unsoft.mechanisms().items()
    if isinstance(actual, MechanismSpec)
    and name != "magnitude"
    # The delta rule takes no float masks, and has tests of its own.
    and not isinstance(unsoft.mechanism(name, heads=2, head_dim=4), Delta)
]

LINEAR = [
    name for name in NAMES if isinstance(unsoft.mechanism(name, heads=2, head_dim=4).new_cache(1), StateCache)
]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def make(name, heads=2, width=8, dtype=torch.float32, **options):
    torch.manual_seed(0)
    module = unsoft.mechanism(name, heads=heads, head_dim=width, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return module.double() if dtype == torch.float64 else module


def draw(
    module, length, keys=None, *, kv_heads=None, width=8, size=1.0, dtype=torch.float32, batch=2, values=None
):
    generator = torch.Generator().manual_seed(length)
    kv_heads = module.layer_spec.heads if kv_heads is None else kv_heads
    keys = length if keys is None else keys
    shapes = [(module.query_heads, length, width), (kv_heads, keys, width), (kv_heads, keys, values or width)]
    q, k, v = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype) for x in (size * q, size * k, v)]


def attend(name, module, q, k, v, *, visible=None, bias=None, offset=None):
    """The definition's output in float64; ``offset``: row i stands at the position of key i + offset, None:
    sees all keys."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    shape = (len(q), q.shape[1], q.shape[2], k.shape[2])
    rows = torch.arange(q.shape[2]) + (offset or 0)
    seen = torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)
    if offset is not None:
        seen = seen & (torch.arange(k.shape[2]) <= rows[:, None])
    bias = torch.zeros(shape, dtype=torch.float64) if bias is None else torch.where(seen, bias.double(), 0.0)
    there = seen.any(2)
    call = WrittenCall(q, k, v, seen, bias, there, rows.double(), offset is not None, q.shape[-1] ** -0.5)
    with torch.no_grad():
        return definition_of(name)(call, copy.deepcopy(module).double())[1]


def near(result, expected, tolerance, v):
    size = float(expected.abs().max() + 0.01 * v.detach().double().abs().max())
    assert float((result.detach().double() - expected).abs().max()) <= tolerance * size


SHAPES = [
    (129, 129, 20, torch.float64, True),
    (257, 257, 64, torch.float32, True),
    (65, 130, 3, torch.float64, "lower_right"),
    (130, 65, 3, torch.float64, "lower_right"),
    (130, 65, 3, torch.float64, True),
    (128, 128, 80, torch.bfloat16, True),
    (17, 150, 8, torch.float64, False),
]
MASKS = [None, "float", "padding"]


def sampled():
    """Every name with half of the shapes and all masks, every shape with every mask; the other shapes are
    slow."""
    for i, name in enumerate(NAMES):
        for j, shape in enumerate(SHAPES):
            mask = MASKS[(i + j) % len(MASKS)]
            yield pytest.param(name, *shape, mask, marks=[pytest.mark.slow] if (i + j) % 2 else [])


@pytest.mark.parametrize(("name", "length", "keys", "width", "dtype", "alignment", "mask"), list(sampled()))
def test_definitions(name, length, keys, width, dtype, alignment, mask):
    if alignment is False and unsoft.mechanism(name, heads=2, head_dim=4).causal_only:
        return
    if name == "linear-taylor2":
        width = min(width, 20)
    module = make(name, width=width, dtype=dtype, value_dim=5)
    q, k, v = draw(module, length, keys, width=width, dtype=dtype, values=5)
    generator = torch.Generator().manual_seed(3)
    visible = bias = None
    if mask == "padding":
        visible = torch.rand(2, 1, 1, keys, generator=generator) < 0.7
    if mask == "float":
        bias = torch.randn(1, module.query_heads, length, keys, generator=generator, dtype=torch.float64).to(
            dtype
        )
    given = visible if bias is None else bias
    offset = {True: 0, False: None, "lower_right": keys - length}[alignment]
    expected = attend(name, module, q, k, v, visible=visible, bias=bias, offset=offset)
    result = module(q, k, v, given, is_causal=alignment, enable_gqa=True)
    assert result.dtype == dtype
    near(result, expected, TOLERANCE[dtype] * (1 + math.sqrt(width)), v)


@pairwise(width=[64, 80, 96, 128, 256], size=[1.0, 3.0], dtype=[torch.float32, torch.bfloat16])
def test_rows_of_performer_sum_to_1(width, size, dtype):
    module = make("performer", width=width)
    q, k, v = draw(module, 70, width=width, size=size, dtype=dtype)
    ones = torch.ones_like(v)
    eps = torch.finfo(dtype).eps
    assert (module(q, k, ones, is_causal=True) - 1).abs().max() <= 8 * eps
    _, weights = module(q, k, v, is_causal=True, return_weights=True)
    assert (weights.double().sum(-1) - 1).abs().max() <= 70 * eps
    cache = module.new_cache(2)
    with torch.no_grad():
        steps = [module(*(x[:, :, [t]] for x in (q, k, ones)), cache=cache) for t in range(5)]
    assert (torch.cat(steps, 2) - 1).abs().max() <= 8 * eps
    expected = attend("performer", module, q, k, v, offset=0)
    near(module(q, k, v, is_causal=True), expected, TOLERANCE[dtype] * (1 + size**2 * math.sqrt(width)), v)


@pytest.mark.parametrize(
    ("width", "size", "dtype"), [(80, 1, "float32"), (96, 3, "float32"), (8, 5.5, "float64")]
)
def test_gradients_of_performer(width, size, dtype):
    """Against differences of the definition; logits reach 30 and more in the last case."""
    dtype = getattr(torch, dtype)
    module = make("performer", width=width, dtype=dtype)
    q, k, v = (x.requires_grad_() for x in draw(module, 70, width=width, size=size, dtype=dtype))
    y = module(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(y.square().sum(), (q, k, v))
    assert all(g.isfinite().all() and (g != 0).any() for g in gradients)
    if dtype == torch.float64:
        for which, x in enumerate((q, k, v)):
            step = torch.randn(x.shape, dtype=dtype, generator=torch.Generator().manual_seed(which))
            ends = []
            for sign in (1e-5, -1e-5):
                moved = [t.detach() + sign * step if t is x else t.detach() for t in (q, k, v)]
                ends.append(attend("performer", module, *moved, offset=0).square().sum())
            slope = float((ends[0] - ends[1]) / 2e-5)
            assert float((gradients[which] * step).sum()) == pytest.approx(slope, rel=1e-4)


def test_no_logits_are_too_large_for_linear_exp():
    for dtype in (torch.float32, torch.float64):
        module = make("linear-exp", dtype=dtype)
        q, k, v = draw(module, 70, size=60, dtype=dtype)
        assert (q @ k.mT / math.sqrt(8)).abs().max() > 1e4
        q.requires_grad_()
        y = module(q, k, v, is_causal=True)
        near(y, attend("linear-exp", module, q, k, v, offset=0), TOLERANCE[dtype] * 100, v)
        assert torch.autograd.grad(y.sum(), q)[0].isfinite().all()


def test_sums_of_exponentials_that_no_float_holds():
    """A query and a key that each have their best feature where the other has its worst, 1e4 apart."""
    q, k = (
        torch.tensor([[0.0, 1e4, -1e4]], dtype=torch.float64),
        torch.tensor([[0.0, -1e4, 1e4 - 700]]).double(),
    )
    q.requires_grad_()
    logs = log_products(q, k)
    assert float(logs.detach()) == pytest.approx(math.log(2))
    assert torch.autograd.grad(logs.sum(), q)[0][0].tolist() == pytest.approx([0.5, 0.5, 0])


@pytest.mark.parametrize("name", LINEAR)
def test_tiny_and_large_inputs(name):
    """Denormal queries and keys count as 0 or as what they are, but never give NaN;
    large ones do not overflow."""
    module = make(name)
    normalised = module.normaliser == "sum"
    for size in (1e-40, 1e-25, 1e-16, 1e9) if normalised and name != "linear-taylor2" else (1e-40, 1e-16):
        q, k, v = (x.requires_grad_() for x in draw(module, 70, size=size))
        y = module(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(y.sum(), (q, k, v), allow_unused=True)
        assert y.isfinite().all() and all(g is None or g.isfinite().all() for g in gradients)
        # At 1e9 |x|^2 of performer leaves float32, and so does exp(x) of linear-elu1 for negative x.
        if size > 1e-30 and not (size == 1e9 and name in ("performer", "linear-elu1")):
            near(y, attend(name, module, q, k, v, offset=0), 1e-4, v)


@pytest.mark.parametrize("name", ["performer", "linear-elu1"])
def test_a_factor_of_a_whole_row_cancels(name):
    """exp(-|q|^2 / 2) of performer, and exp(x) of elu1 for a query far below 0,
    do not cost digits or the whole row."""
    module = make(name, width=3)
    q, k, v = draw(module, 20, width=3)
    q = -100 * q.abs() if name == "linear-elu1" else 1000 * q
    k = k if name == "linear-elu1" else 0.01 * k
    expected = attend(name, module, q, k, v, offset=0)
    near(module(q, k, v, is_causal=True), expected, 1e-4, v)
    cache = module.new_cache(2)
    with torch.no_grad():
        steps = [module(*(x[:, :, [t]] for x in (q, k, v)), cache=cache) for t in range(20)]
    near(torch.cat(steps, 2), expected, 1e-4, v)


@pytest.mark.parametrize("offset", [None, 0])
@pytest.mark.parametrize("engine", ["auto", "dense"])
def test_a_huge_query_costs_no_digits(offset, engine):
    """Its largest feature cancels in a row, so it must go before keys are added:
    float32 has steps of 0.001 at 10,000."""
    module = make("performer", width=20)
    q, k, v = draw(module, 130, width=20)
    q = 8192 * q
    expected = attend("performer", module, q, k, v, offset=offset)
    near(module(q, k, v, is_causal=offset is not None, engine=engine), expected, 1e-5, v)


@pytest.mark.parametrize("name", ["performer(32)", "linear-exp"])
def test_a_huge_key_in_the_future_changes_nothing(name):
    module = make(name)
    q, k, v = draw(module, 130)
    before = module(q, k, v, is_causal=True)
    k[:, :, 100:] *= 1000
    assert torch.equal(module(q, k, v, is_causal=True)[:, :, :100], before[:, :, :100])


def test_cosformer_is_not_linear_relu():
    module, plain = make("cosformer"), make("linear-relu")
    q, k, v = draw(module, 128)
    assert (module(q, k, v, is_causal=True) - plain(q, k, v, is_causal=True)).abs().max() > 0.02


@pytest.mark.parametrize("length", [256, 257, 700])
def test_cosformer_beyond_its_length(length):
    """Up to M the paper's formula; beyond it decoding goes on, weights stay non-negative and sum to 1,
    prefixes stay the same."""
    module = make("cosformer", dtype=torch.float64)
    q, k, v = draw(module, length, dtype=torch.float64)
    q, k = q.abs(), k.abs()  # no row vanishes
    whole, weights = module(q, k, v, is_causal=True, return_weights=True)
    assert (weights >= 0).all() and (weights.sum(-1) - 1).abs().max() < 1e-12
    distance = torch.arange(256)[:, None] - torch.arange(256)
    products = (q.relu() @ k.relu().mT)[:, :, :256, :256] * (math.pi / 2 * distance.double() / 256).cos()
    products = products.tril()
    torch.testing.assert_close(weights[:, :, :256, :256], products / products.sum(-1, keepdim=True))
    cache = module.new_cache(2)
    with torch.no_grad():
        pieces = [
            module(*(x[:, :, a:b] for x in (q, k, v)), cache=cache) for a, b in ((0, 200), (200, length - 1))
        ]
        pieces.append(module(*(x[:, :, -1:] for x in (q, k, v)), cache=cache))
    torch.testing.assert_close(torch.cat(pieces, 2), whole)


@pairwise(name=LINEAR, dtype=[torch.float32, torch.float64, torch.bfloat16], kv_heads=[1, 2, 4])
def test_compiled_steps_equal_chunks(name, dtype, kv_heads):
    module = make(name, heads=4, dtype=dtype, value_dim=5)
    q, k, v = draw(module, 37, kv_heads=kv_heads, dtype=dtype, values=5)
    states = []
    for engine in ("native", "tiled"):
        cache, outs = module.new_cache(2), []
        with torch.no_grad():
            for a, b in ((0, 20), (20, 21), (21, 22), (22, 37)):
                part = (x[:, :, a:b] for x in (q, k, v))
                outs.append(module(*part, cache=cache, enable_gqa=True, engine=engine))
        states.append((torch.cat(outs, 2), cache.state, cache.length))
    (ours, state, length), (theirs, expected, _) = states
    assert length == 37
    size = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=size, atol=size)
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        whole = module(q, k, v, is_causal=True, enable_gqa=True, engine="native")
    torch.testing.assert_close(whole, ours, rtol=size, atol=size)


def test_without_a_compiler_steps_are_chunks(monkeypatch):
    monkeypatch.setattr(choice, "library_failure", lambda name, double: "no compiler")
    monkeypatch.setattr(registry, "_warned", set())
    module = make("linear-relu", dtype=torch.float64)
    q, k, v = draw(module, 9, dtype=torch.float64)
    cache = module.new_cache(2)
    with torch.no_grad(), pytest.warns(CompilerWarning, match="no compiler"):
        steps = [module(*(x[:, :, [t]] for x in (q, k, v)), cache=cache) for t in range(9)]
    near(torch.cat(steps, 2), attend("linear-relu", module, q, k, v, offset=0), 1e-12, v)


@pytest.mark.parametrize("name", [*NAMES, "gated+linear-relu", "gated+gpam"])
def test_every_engine_is_honoured_or_refused(name):
    module = make(name)
    q, k, v = draw(module, 20)
    expected = module(q, k, v, is_causal=True)
    for cached, engine in product((False, True), ("auto", "native", "tiled", "dense", "sdpa")):
        cache = module.new_cache(2) if cached else None
        try:
            with torch.no_grad():
                result = module(q, k, v, is_causal=True, engine=engine, cache=cache)
        except ValueError as error:
            # Mechanisms that couple whole rows have no tiles.
            refused = ("sdpa", "tiled") if isinstance(module, RowCoupled) else ("sdpa", "dense")
            refused = ("sdpa", "tiled", "native") if isinstance(module, unsoft.nn.WrittenOut) else refused
            assert engine in refused and f"'engine': '{engine}' does not support" in str(error)
            continue
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    for cache in (None, module.new_cache(2)):
        with pytest.raises(ValueError, match="did you mean 'tiled'"):
            module(q, k, v, is_causal=True, engine="tile", cache=cache)


def test_reasons_for_refusing_an_engine():
    module = make("linear-relu")
    q, k, v = draw(module, 5)
    for arguments, reason in (
        ({"engine": "sdpa"}, "it computes softmax"),
        ({"engine": "native"}, "is_causal=True"),
        ({"engine": "native", "attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "no masks"),
        ({"engine": "tiled", "return_weights": True}, "needs engine 'dense' or 'auto'"),
        ({"engine": "dense", "cache": module.new_cache(2)}, "does not keep the keys"),
    ):
        with pytest.raises(ValueError, match=reason):
            module(q, k, v, **arguments)
    with pytest.raises(ValueError, match="no gradient"):
        module(q.requires_grad_(), k, v, is_causal=True, engine="native")


@pytest.mark.parametrize("name", [*NAMES, "gated+linear-relu"])
def test_empty_sizes(name):
    module = make(name)
    for batch, length, keys in ((0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0)):
        check_empty(module, batch, length, keys)


def check_empty(module, batch, length, keys):
    q, k, v = (x.requires_grad_() for x in draw(module, length, keys, batch=batch))
    for alignment in (True, "lower_right"):
        y = module(q, k, v, is_causal=alignment)
        assert y.shape == (batch, 2, length, 8) and (y == 0).all()
        assert all(
            (g == 0).all()
            for g in torch.autograd.grad(y.sum(), (q, k, v), allow_unused=True)
            if g is not None
        )
    _, weights = module(q, k, v, is_causal=True, return_weights=True)
    assert weights.shape == (batch, 2, length, keys)
    if length == keys:
        cache = module.new_cache(batch)
        assert module(q, k, v, cache=cache).shape == (batch, 2, length, 8)
        assert module(*(x[:, :, :0] for x in (q, k, v)), cache=cache).shape == (batch, 2, 0, 8)


@pytest.mark.parametrize("name", [*NAMES, "gated+linear-relu", "gated+differential2"])
def test_decoding_a_padded_batch_with_grouped_queries(name):
    """The mask of one row, given for every query head."""
    module = make(name, heads=4, dtype=torch.float64)
    kv_heads = 4 if name == "differential" else 2
    q, k, v = draw(module, 6, kv_heads=kv_heads, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., :2] = False
    whole = module(q, k, v, mask, is_causal=True, enable_gqa=True)
    last = whole[:, :, -1:]
    for heads in {4, module.query_heads}:
        given = mask.expand(2, heads, 1, 6)
        one = module(q[:, :, -1:], k, v, given, is_causal="lower_right", enable_gqa=True)
        torch.testing.assert_close(one, last)
        cache = module.new_cache(2)
        module(*(x[:, :, :5] for x in (q, k, v)), mask[..., :5], cache=cache, enable_gqa=True)
        step = module(*(x[:, :, 5:] for x in (q, k, v)), given, cache=cache, enable_gqa=True)
        torch.testing.assert_close(step, last)
    floats = torch.where(mask, 0.0, -math.inf).double()
    cache = module.new_cache(2)
    module(*(x[:, :, :5] for x in (q, k, v)), floats[..., :5], cache=cache, enable_gqa=True)
    step = module(*(x[:, :, 5:] for x in (q, k, v)), floats, cache=cache, enable_gqa=True)
    torch.testing.assert_close(step, last)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("engine", ["auto", "tiled"])
def test_a_bad_number_is_nan_from_its_token_on(name, engine):
    module = make(name)
    clean = draw(module, 100)
    for which, token in ((0, 30), (1, 70), (2, 70)):
        inputs = [x.clone() for x in clean]
        inputs[which][1, 0, token, 2] = -math.inf
        bad = torch.zeros(2, 2, 100, 8, dtype=torch.bool)
        rows = slice(token, token + 1) if which == 0 else slice(token, None)
        bad[1, 0, rows, 2 if which == 2 else slice(None)] = True
        if name == "decay" and which != 2:
            continue  # it looks at no query and no key
        whole = module(*inputs, is_causal=True, engine=engine)
        cache = module.new_cache(2)
        with torch.no_grad():
            cuts = [0, 60, 70, 71, 72, 100]
            pieces = [
                module(*(x[:, :, a:b] for x in inputs), cache=cache, engine=engine)
                for a, b in zip(cuts, cuts[1:], strict=False)
            ]
        for result in (whole, torch.cat(pieces, 2)):
            assert torch.equal(result.isnan(), bad)


@pytest.mark.parametrize("norm", ["group", "rms"])
def test_retention_with_norm_and_gate(norm):
    """GroupNorm_h(retention) * swish(x W + c), from the paper; in steps too."""
    module = make("retention", dtype=torch.float64, norm=norm, gate=True, hidden_dim=7)
    q, k, v = draw(module, 40, dtype=torch.float64)
    hidden = torch.randn(2, 40, 7, dtype=torch.float64)
    y = attend("retention", module, q, k, v, offset=0)
    if norm == "group":
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = (hidden @ module.gate.weight).unflatten(-1, (2, 8)).transpose(1, 2) + module.gate.constant[:, None]
    expected = y * gate * gate.sigmoid()
    torch.testing.assert_close(module(q, k, v, is_causal=True, hidden=hidden), expected)
    cache = module.new_cache(2)
    pieces = [
        module(*(x[:, :, a:b] for x in (q, k, v)), cache=cache, hidden=hidden[:, a:b])
        for a, b in ((0, 39), (39, 40))
    ]
    torch.testing.assert_close(torch.cat(pieces, 2), expected)


def test_norm_and_gate_keep_a_deep_stack_of_retention_in_range():
    x = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    bare, whole = (
        unsoft.mechanism("retention", heads=2, head_dim=8),
        make("retention", norm="group", gate=True),
    )
    plain, normed = x, x
    for _ in range(6):
        plain, normed = (
            bare(plain, plain, plain, is_causal=True),
            whole(normed, normed, normed, is_causal=True),
        )
    assert plain.abs().max() > 1e6 or not plain.isfinite().all()
    assert normed.isfinite().all() and normed.square().mean() < 10


def test_the_literal_form_of_gpam():
    """P = (1 + l+) P+ + l- P-, with q- = ReLU(q W-)."""
    module = make("gpam", dtype=torch.float64, literal=True)
    q, k, v = draw(module, 9, dtype=torch.float64)
    second = (q @ module.negative_map).relu()
    maps = [(x @ k.mT / math.sqrt(8)).softmax(-1) for x in (q, second)]
    plus, minus = module.plus[:, None, None], module.minus[:, None, None]
    expected = (1 + plus) * maps[0] + minus * maps[1]
    _, weights = module(q, k, v, return_weights=True)
    torch.testing.assert_close(weights, expected)
    start = unsoft.mechanism("gpam", heads=2, head_dim=4, literal=True)
    assert start.plus.tolist() == [0.5, 0.5] and start.minus.tolist() == [-0.5, -0.5]


def test_gpam_notices_changed_parameters():
    module = make("gpam")
    q, k, v = draw(module, 9)
    with torch.no_grad():
        first = module(q, k, v)
        module.plus += 1
        second = module(q, k, v)
    torch.testing.assert_close(second, module(q, k, v).detach())
    assert not torch.equal(first, second)


def test_a_float_mask_is_not_scaled_by_logn():
    module = make("logn+gpam", dtype=torch.float64)
    q, k, v = draw(module, 20, dtype=torch.float64)
    distance = (torch.arange(20)[:, None] - torch.arange(20)).clamp(min=0).double()
    alibi = -0.5 * distance[None, None]
    expected = attend("logn+gpam", module, q, k, v, bias=alibi, offset=0)
    for engine in ("auto", "tiled", "dense"):
        torch.testing.assert_close(module(q, k, v, alibi, is_causal=True, engine=engine), expected)
