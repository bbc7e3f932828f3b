"""The short way to the kernel: the same numbers as the definitions,
and never taken where something else has to happen."""

import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import unsoft
from tests.engines.definitions import DEFINED, attention_and_bound
from unsoft.engines.native import direct
from unsoft.mechanisms import resolve

LENGTHS = (1, 2, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 1000, 2049)
WIDTHS = (1, 3, 20, 64, 80, 96, 128, 160, 256)
SEED = 11
CASES = 80


def normal(*shape, dtype=torch.float32, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def directly(q, k, v, name="cog", is_causal=False, scale=None, enable_gqa=False):
    return direct.run_directly(q, k, v, resolve(name), is_causal, scale, enable_gqa)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def drawn(number):
    """A call that users might make: sizes, dtype, heads, alignment, mask and norms drawn at random."""
    draw = random.Random(f"{SEED} {number}")
    queries, keys = draw.choice([1, draw.choice(LENGTHS)]), draw.choice(LENGTHS)
    shared, group, batch = draw.choice([(2, 1), (1, 4), (3, 2)]) + (draw.choice([0, 1, 1, 2]),)
    while queries * keys * shared * group > 1 << 21:
        queries = queries // 2 + 1
    width = draw.choice(WIDTHS)
    value_width = draw.choice([width, draw.choice(WIDTHS)])
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    size = draw.choice([0.1, 1.0, 3.0])  # 3: logits of 9, as the sharper heads of real models have
    q = normal(batch, shared * group, queries, width, dtype=dtype, seed=number, size=size)
    k = normal(batch, shared, keys, width, dtype=dtype, seed=number + 1, size=size)
    v = normal(batch, shared, keys, value_width, dtype=dtype, seed=number + 2)
    if draw.random() < 0.5:  # as a projection leaves them: (batch, length, heads, width)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    is_causal, mask, seen = draw.choice([False, True, "lower_right"]), None, None
    if is_causal is not False:
        offset = 0 if is_causal is True else keys - queries
        seen = torch.arange(keys) <= torch.arange(queries)[:, None] + offset
    if draw.random() < 0.25:
        mask = normal(max(batch, 1), 1, draw.choice([1, queries]), keys, seed=number + 3) > -0.5
        mask = mask[:batch]
        seen = mask if seen is None else seen & mask
    name, engine = draw.choice(DEFINED), draw.choice(["auto", "auto", "native", "tiled", "dense"])
    options = {"is_causal": is_causal, "attn_mask": mask, "enable_gqa": group > 1, "engine": engine}
    return (q, k, v), name, options, seen


@pytest.mark.parametrize("number", range(CASES))
def test_definitions(number):
    (q, k, v), name, options, seen = drawn(number)
    expected, bound = attention_and_bound(name, q, k, v, seen)
    actual = unsoft.attention(q, k, v, name, **options)
    assert actual.shape == expected.shape and actual.dtype == q.dtype
    wrong = (actual.double() - expected).abs() > bound
    assert not wrong.any(), (
        f"case {number} of seed {SEED}: {name}, {tuple(q.shape)} {tuple(k.shape)} {options}"
    )


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("alignment", [False, True, "upper_left", "lower_right"])
def test_same_bits_as_the_general_way(name, alignment):
    for shape, keys in (((2, 4, 1, 64), 257), ((1, 4, 65, 20), 64), ((1, 4, 5, 8), 3)):
        q, k, v = (
            normal(*shape),
            normal(shape[0], 2, keys, shape[3], seed=1),
            normal(shape[0], 2, keys, 24, seed=2),
        )
        options = {"is_causal": alignment, "enable_gqa": True, "scale": 0.3}
        actual = directly(q, k, v, name, **options)
        with torch.enable_grad():
            general = unsoft.attention(q.requires_grad_(), k, v, name, engine="native", **options)
        assert torch.equal(actual, general) and actual.is_contiguous() and general.requires_grad


def test_plain_calls_take_it_and_shapes_may_change():
    for keys in (3, 4, 5, 700):
        q, k, v = normal(1, 2, 1, 16), normal(1, 2, keys, 16, seed=keys), normal(1, 2, keys, 16, seed=-keys)
        expected = scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(directly(q, k, v, "softmax"), expected, atol=1e-6, rtol=1e-5)
    q = normal(2, 2, 1, 16)
    assert directly(q, k, v) is None, "batches that broadcast are for the general way"
    assert unsoft.attention(q, k, v, "cog").shape == (2, 2, 1, 16)


def test_plans_are_of_one_formula_object_and_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(direct, "_plans", {})
    monkeypatch.setattr(direct, "_MOST_PLANS", 3)
    q = normal(1, 1, 2, 4)
    for _ in range(8):
        double = directly(q, q, q, unsoft.Formula("2*s/n"))
        once = directly(q, q, q, unsoft.Formula("s/n"))
        torch.testing.assert_close(double, 2 * once)
    assert len(direct._plans) <= 3


class Quiet(torch.Tensor):
    """A subclass without rules of its own."""


class Counting(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.requires_grad_(),
        lambda q: q.as_subclass(Quiet),
        lambda q: torch.nn.Parameter(q),
        lambda q: torch.complex(q, q).conj().imag,
        lambda q: q[0],
        lambda q: q.to("meta"),
        lambda q: q.to_sparse(),
        lambda q: q.index_fill(3, torch.tensor([1]), torch.nan),
        lambda q: q.int(),
        lambda q: q[:, :, :0],
        lambda q: q.tolist(),
        lambda q: torch.nested.nested_tensor([q[0], q[0]]),
    ],
    ids=[
        "gradient",
        "subclass",
        "parameter",
        "negative view",
        "3-D",
        "meta",
        "sparse",
        "nan",
        "int",
        "empty",
        "list",
        "nested",
    ],
)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_left_to_the_general_way(change, which):
    tensors = [normal(1, 2, 6, 8, seed=t) for t in range(3)]
    assert directly(*tensors) is not None
    with torch.enable_grad():
        tensors[which] = change(tensors[which])
        actual = directly(*tensors)
    if which == 2 and actual is not None and not bool(actual.isfinite().all()):
        pytest.fail("NaN in the values must be left to the exact rules")
    assert actual is None


@pytest.mark.parametrize(
    "arguments",
    [
        (1, None, False),
        (False, 1, False),
        (False, None, 1),
        ("sideways", None, False),
        (False, float("nan"), False),
    ],
)
def test_wrong_arguments_are_left_to_the_general_way(arguments):
    q = normal(1, 1, 2, 4)
    directly(q, q, q, "cog", True, 1.0, True)
    assert directly(q, q, q, "cog", *arguments) is None


def test_negative_views_are_what_they_stand_for():
    q, k, v = (normal(1, 2, 6, 8, seed=t) for t in range(3))
    negative = torch.complex(q, q).conj().imag
    assert negative.is_neg()
    for tensors, plain in (
        ((negative, k, v), (-q, k, v)),
        ((k, negative, v), (k, -q, v)),
        ((k, v, negative), (k, v, -q)),
    ):
        torch.testing.assert_close(
            unsoft.attention(*tensors, "cog"), unsoft.attention(*plain, "cog", engine="dense")
        )


def test_modes_and_transforms():
    q, k, v = (normal(2, 2, 6, 8, seed=t) for t in range(3))
    expected = unsoft.attention(q, k, v, "cog")
    with Counting():
        assert directly(q, k, v) is None
        torch.testing.assert_close(unsoft.attention(q, k, v, "cog"), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert directly(q, k, v) is None
        assert unsoft.attention(q, k, v, "cog").dtype == torch.bfloat16
    for name in ("cog", "softmax"):
        mapped = torch.vmap(lambda q, name=name: unsoft.attention(q, k[0], v[0], name))(q)
        torch.testing.assert_close(mapped, unsoft.attention(q, k[:1], v[:1], name))
        _, tangent = torch.func.jvp(lambda q, name=name: unsoft.attention(q, k, v, name), (q,), (q,))
        assert tangent.abs().sum() > 0
    with torch.device("meta"):
        assert directly(q, k, v) is None


def test_dropout_takes_the_general_way():
    q = normal(1, 2, 64, 8)
    torch.manual_seed(0)
    first = unsoft.attention(q, q, q, "cog", dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, unsoft.attention(q, q, q, "cog", dropout_p=0.5))
    assert not torch.equal(first, unsoft.attention(q, q, q, "cog", dropout_p=0.0))


FORGETTING = unsoft.Formula(
    "exp(s + (c_i - c_j) - m)", "exp(s + (c_i - c_j) - m)", "s + (c_i - c_j)", fields={"c": "query+key"}
)


def with_fields(fields, length=257):
    q, k, v = (normal(2, 2, length, 64, seed=seed) for seed in range(3))
    return direct.run_directly(q, k, v, FORGETTING, True, None, False, fields), (q, k, v)


@pytest.mark.parametrize("length", [1, 129, 257, 1000])
def test_fields_take_it(length):
    c = normal(2, 2, length, seed=9).abs().neg().cumsum(-1)
    actual, (q, k, v) = with_fields({"c": c}, length)
    bias = (c[..., None] - c[..., None, :]).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=bias.double())
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: {"c": c.requires_grad_()},
        lambda c: {"c": c.as_subclass(Quiet)},
        lambda c: {"c": c.index_fill(2, torch.tensor([3]), torch.inf)},
        lambda c: {"c": c[:, :, 1:]},
        lambda c: {"c": c.int()},
        lambda c: {"d": c},
        lambda c: [c],
        lambda c: None,
    ],
    ids=["gradient", "subclass", "infinite", "shape", "int", "name", "list", "missing"],
)
def test_unusual_fields_are_left_to_the_general_way(change):
    with torch.enable_grad():
        assert with_fields(change(normal(2, 2, 257, seed=9)))[0] is None
