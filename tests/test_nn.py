"""``unsoft.nn.MultiheadAttention`` against ``torch.nn.MultiheadAttention``."""

import pytest
import torch

import unsoft
from unsoft.engines.native.step import Step

WIDTH, HEADS, BATCH, LENGTH = 12, 3, 2, 7


def pair(**options):
    """torch's layer and ours with the same weights."""
    torch.manual_seed(0)
    stock = torch.nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    for p in stock.parameters():
        torch.nn.init.normal_(p)
    ours = unsoft.nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    ours.load_state_dict(stock.state_dict())
    return stock.eval(), ours.eval()


def inputs(batch_first=False, keys=LENGTH, kdim=WIDTH, vdim=WIDTH):
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, LENGTH, WIDTH), (BATCH, keys, kdim), (BATCH, keys, vdim)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return made if batch_first else [x.transpose(0, 1) for x in made]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bias": False},
        {"kdim": 5, "vdim": 8, "batch_first": True},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    ],
)
@pytest.mark.parametrize("average", [True, False])
def test_softmax_gives_torchs_outputs_and_weights(options, average):
    stock, ours = pair(**options)
    shape = {k: v for k, v in options.items() if k in ("batch_first", "kdim", "vdim")}
    q, k, v = inputs(keys=9, **shape)
    padding = torch.zeros(BATCH, 9, dtype=torch.bool)
    padding[1, 5:] = True
    hidden = torch.rand(LENGTH, 9, generator=torch.Generator().manual_seed(2)) < 0.3
    hidden[:, 0] = False
    added = torch.randn(
        BATCH * HEADS, LENGTH, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": hidden},
        {"attn_mask": added},
        {"attn_mask": hidden, "key_padding_mask": padding},
        {"attn_mask": added, "key_padding_mask": torch.where(padding, -torch.inf, 0.0).double()},
    ):
        theirs = stock(q, k, v, average_attn_weights=average, **masks)
        mine = ours(q, k, v, average_attn_weights=average, **masks)
        torch.testing.assert_close(mine[0], theirs[0])
        torch.testing.assert_close(mine[1], theirs[1])
        fast, none = ours(q, k, v, need_weights=False, **masks)
        assert none is None
        torch.testing.assert_close(fast, theirs[0])


def test_gradients_and_unbatched_inputs():
    stock, ours = pair()
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for layer in (stock, ours):
        layer(x, x, x, attn_mask=mask)[0].square().sum().backward()
    for theirs, mine in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], stock(x, x, x, attn_mask=mask)[0])


@pytest.mark.parametrize(
    "name", ["cog", "gpam", "differential2", "gated+logn+softmax", "linear-elu1", "cosformer(32)"]
)
def test_any_mechanism_trains_and_decodes(name):
    torch.manual_seed(0)
    layer = unsoft.nn.MultiheadAttention(WIDTH, HEADS, mechanism=name, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    whole, weights = layer(x, x, x, is_causal=True)
    assert weights.shape == (BATCH, LENGTH, LENGTH)
    whole.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    cache = layer.new_cache(BATCH)
    with torch.no_grad():
        steps = [layer(t, t, t, need_weights=False, cache=cache)[0] for t in x.split([4, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_dropout_acts_while_training_only():
    layer = unsoft.nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, mechanism="cog", batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    layer.train()
    torch.manual_seed(0)
    first = layer(x, x, x, need_weights=False)[0]
    torch.manual_seed(0)
    again = layer(x, x, x, need_weights=False)[0]
    other = layer(x, x, x, need_weights=False)[0]
    assert torch.equal(first, again) and not torch.equal(first, other)
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


def test_rows_that_see_nothing_are_not_nan():
    _, ours = pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    out, weights = ours(x, x, x, key_padding_mask=torch.ones(BATCH, LENGTH, dtype=torch.bool))
    assert (weights == 0).all()
    torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"attn_mask": torch.ones(4, LENGTH, LENGTH, dtype=torch.bool)}, ValueError, "batch \\* heads = 6"),
        ({"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.int64)}, TypeError, "attn_mask.*int64"),
        ({"key_padding_mask": torch.zeros(3, LENGTH, dtype=torch.bool)}, ValueError, "key_padding_mask"),
        ({"value": torch.randn(BATCH, LENGTH, 5)}, ValueError, "'value' has shape \\(2, 7, 5\\)"),
    ],
)
def test_wrong_arguments_are_explained(arguments, error, message):
    layer = unsoft.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(error, match=message):
        layer(**{"query": x, "key": x, "value": x, **arguments})


def test_unknown_mechanism_and_option():
    with pytest.raises(ValueError, match="did you mean 'cog'"):
        unsoft.nn.MultiheadAttention(WIDTH, HEADS, mechanism="cogg")
    with pytest.raises(TypeError, match="max_len"):
        unsoft.nn.MultiheadAttention(WIDTH, HEADS, mechanism="cosformer", max_len=3)


@pytest.mark.parametrize("name", ["cog", "gpam", "magnitude+cog", "differential", "differential2"])
def test_decoding_runs_prepared_steps(monkeypatch, name):
    """One for each token after the prompt, with the outputs of the general path."""
    count, run = [0], Step.run

    def counted(self, *args):
        out = run(self, *args)
        count[0] += out is not None
        return out

    monkeypatch.setattr(Step, "run", counted)
    layer = unsoft.nn.MultiheadAttention(16, 4, mechanism=name, batch_first=True).eval()
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        whole, _ = layer(x, x, x, need_weights=False, is_causal=True)
        cache = layer.new_cache(2)
        parts = [
            layer(y, y, y, need_weights=False, cache=cache)[0] for y in x.split([4, 1, 1, 1, 1, 1], dim=1)
        ]
    assert count[0] == 5
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-6, rtol=1e-5)
