"""Windows, packed documents and lengths of keys: who sees whom by two numbers per row."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import unsoft

FORMULAS = ["softmax", "cog", "relu2", "sinh"]
ENGINES = ["dense", "tiled", "native"]


def tensors(length, *, batch=2, heads=4, kv_heads=2, width=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = [(batch, h, length, width) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]


def mask_of(length, *, causal, window, documents, lengths):
    """The same visibility as a mask, (batch or 1, 1, L, L), from its definition."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    if causal:
        mask = mask & (j <= i)
    left, right = window or (None, None)
    if left is not None:
        mask = mask & (j >= i - left)
    if right is not None:
        mask = mask & (j <= i + right)
    if documents is not None:
        ids = documents if documents.dim() == 2 else documents[None]
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    if lengths is not None:
        mask = mask & (j < lengths[:, None, None, None])
    return mask


def results(inputs, *args, **options):
    """Output and gradients of the inputs, for a gradient that differs from place to place."""
    out = unsoft.attention(*inputs, *args, enable_gqa=True, **options)
    return [
        out,
        *torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)),
    ]


@settings(deadline=None, max_examples=40)
@given(
    formula=st.sampled_from(FORMULAS),
    engine=st.sampled_from(ENGINES),
    length=st.sampled_from([5, 60, 230]),
    causal=st.booleans(),
    window=st.sampled_from([None, (3, 2), (100, 0), (None, 1), (0, 0)]),
    packing=st.sampled_from(["none", "shared", "each"]),
    padded=st.booleans(),
    masked=st.booleans(),
)
def test_it_equals_the_mask_that_says_the_same(
    formula, engine, length, causal, window, packing, padded, masked
):
    inputs = tensors(length)
    ids = torch.randint(0, 2, (2, length), generator=torch.Generator().manual_seed(length)).cumsum(-1) // 5
    documents = {"none": None, "shared": ids[0], "each": ids}[packing]
    lengths = torch.tensor([length // 2, length]) if padded else None
    mask = mask_of(length, causal=causal, window=window, documents=documents, lengths=lengths)
    own = torch.rand(length, length, generator=torch.Generator().manual_seed(1)) < 0.8 if masked else None
    expected = results(inputs, formula, attn_mask=mask if own is None else mask & own, engine="dense")
    structure = {"window": window, "documents": documents, "key_lengths": lengths}
    actual = results(inputs, formula, attn_mask=own, is_causal=causal, engine=engine, **structure)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    "name", ["softmax", "relu2", "retention", "deltanet", "magnitude", "entmax15", "stick-breaking", "gpam"]
)
def test_documents_equal_separate_calls(name):
    """Positions and counts restart, states and geometry too."""
    inputs = tensors(70, kv_heads=4)
    ends = [0, 1, 30, 70]
    packed = results(inputs, name, is_causal=True, cu_seqlens=torch.tensor(ends))
    parts = [[x[:, :, a:b] for x in inputs] for a, b in zip(ends, ends[1:], strict=False)]
    separate = torch.cat([unsoft.attention(*part, name, is_causal=True) for part in parts], dim=-2)
    torch.testing.assert_close(packed[0], separate, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", list(unsoft.mechanisms()))
def test_nothing_leaks_between_documents(name):
    """Another first document changes no bit of the outputs and gradients of the others."""
    torch.manual_seed(0)
    layer = unsoft.mechanism(name, heads=2, head_dim=8)
    documents = torch.tensor([0] * 20 + [1] * 33 + [2] * 7)

    def run(inputs, first_value):
        extra = {"first_value": first_value} if layer.needs_first_value else {}
        out = layer(*inputs, is_causal=True, documents=documents, **extra)
        gradients = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)  # decay reads no query
        return [out, *(x for x in gradients if x is not None)]

    heads = layer.query_heads
    given = [torch.randn(1, h, 60, 8) for h in (heads, 2, 2)]
    changed = [torch.cat([torch.randn_like(x[:, :, :20]), x[:, :, 20:]], dim=2) for x in given]
    first = torch.randn(1, 2, 60, 8)
    before, after = (run([x.clone().requires_grad_() for x in inputs], first) for inputs in (given, changed))
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, 20:], b[:, :, 20:])
    assert not torch.equal(before[0][:, :, :20], after[0][:, :, :20])


def test_a_window_counts_positions_besides_the_own():
    _, weights = unsoft.attention(
        *tensors(9), enable_gqa=True, is_causal=True, window=(3, 0), return_weights=True
    )
    assert (weights != 0).sum(-1)[0, 0].tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("window", [(2, 0), (2, 1)])
def test_decoding_sees_the_window_of_the_whole_sequence(window):
    q, k, v = (x.detach() for x in tensors(40, kv_heads=4))
    whole = unsoft.attention(q, k, v, "cog", is_causal=True, window=window)
    last = unsoft.attention(q[:, :, 37:], k, v, "cog", is_causal="lower_right", window=window)
    torch.testing.assert_close(last, whole[:, :, 37:], atol=1e-12, rtol=1e-12)
    layer = unsoft.mechanism("cog", heads=4, head_dim=8).double()
    cache, steps = layer.new_cache(2), []
    for t in range(40):
        token = [x[:, :, t : t + 1] for x in (q, k, v)]
        steps.append(layer(*token, cache=cache, window=window))
    torch.testing.assert_close(torch.cat(steps, dim=2), whole, atol=1e-12, rtol=1e-12)


def test_block_masks_of_flex_attention():
    inputs = tensors(50)
    block_mask = create_block_mask(
        lambda b, h, i, j: (j <= i) & (i - j < 7), None, None, 50, 50, device="cpu"
    )
    expected = unsoft.attention(*inputs, enable_gqa=True, is_causal=True, window=(6, 0))
    torch.testing.assert_close(unsoft.attention(*inputs, attn_mask=block_mask, enable_gqa=True), expected)
    with pytest.raises(ValueError, match=r"'attn_mask' is a BlockMask for 50 queries and 50 keys.* 49"):
        unsoft.attention(*(x[:, :, 1:] for x in inputs), attn_mask=block_mask, enable_gqa=True)


def test_memory_is_linear_in_the_length():
    """A mask of 65,536 tokens would take 4 GiB."""
    script = """
import resource, torch, unsoft
q, k, v = (torch.randn(1, 1, 65536, 8) for _ in range(3))
unsoft.attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], is_causal=True, window=(32, 0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
documents = torch.arange(65536) // 1000
unsoft.attention(q, k, v, "relu2", is_causal=True, window=(32, 0), documents=documents)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64, "MiB"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"window": (-1, 0)}, r"'window' must be a pair .* not \(-1, 0\)"),
        ({"window": 256}, r"'window' must be a pair .* not 256"),
        ({"documents": torch.zeros(8, dtype=torch.long)}, r"'documents' has shape \(8,\).* \(2, 9\)"),
        ({"documents": torch.zeros(9)}, r"'documents' must hold whole numbers, not torch.float32"),
        ({"documents": torch.tensor([0, 0, 1, 1, 0, 0, 2, 2, 2])}, "must not interrupt a document"),
        (
            {"cu_seqlens": torch.tensor([0, 5, 4, 9])},
            r"'cu_seqlens' must rise from 0 to .* 9, not \[0, 5, 4, 9\]",
        ),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"'cu_seqlens' must rise from 0 to .* 9, not \[0, 5\]"),
        ({"key_lengths": torch.tensor([3, 10])}, r"'key_lengths' must lie between 0 and .* 9, not \[3, 10\]"),
        ({"key_lengths": torch.tensor([3])}, r"'key_lengths' has shape \(1,\).* 2 batch rows"),
    ],
)
def test_wrong_arguments(argument, message):
    with pytest.raises((ValueError, TypeError), match=message):
        unsoft.attention(*tensors(9), enable_gqa=True, **argument)


def test_mechanisms_without_weights_for_single_keys_take_no_window():
    with pytest.raises(ValueError, match="'window': .* looks at all keys before a row at once"):
        unsoft.attention(*tensors(9, kv_heads=4), "retention", is_causal=True, window=(3, 0))


@pytest.mark.parametrize("engine", ["dense", "native"])
def test_a_row_that_does_not_see_itself_does_not_in_a_window_either(engine):
    inputs = tensors(9, kv_heads=4)
    mask = mask_of(9, causal=True, window=(3, 0), documents=None, lengths=None)
    expected = unsoft.attention(*inputs, "stick-breaking", attn_mask=mask, is_causal=True)
    actual = unsoft.attention(*inputs, "stick-breaking", is_causal=True, window=(3, 0), engine=engine)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
