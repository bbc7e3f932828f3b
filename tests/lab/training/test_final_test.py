"""Statistics of attention, for weights whose values are known."""

import pytest
import torch

from unsoft.lab.training.run import attention_figures


class Stub:
    """A model whose attention is given."""

    def __init__(self, *layers):
        self.layers = layers

    def eval(self):
        return self

    def __call__(self, output_attentions):
        assert output_attentions
        return {"attentions": self.layers}


def one_hot(*columns, keys=3):
    """(1, 1, rows, keys): row i looks at columns[i] only."""
    return torch.nn.functional.one_hot(torch.tensor(columns), keys).float()[None, None]


def test_the_share_of_the_first_token_leaves_out_the_row_that_sees_nothing_else():
    figures = attention_figures(Stub(one_hot(0, 0, 0), one_hot(0, 1, 2), one_hot(0, 0, 2)), {})
    assert figures == {"first_token": [1.0, 0.0, 0.5]}
    signed = torch.tensor([[1.0, 0.0], [-3.0, 1.0]])[None, None]
    assert attention_figures(Stub(signed), {})["first_token"] == [0.75]
    assert attention_figures(Stub(torch.zeros(1, 1, 2, 2)), {})["first_token"] == [0.0]


REST = torch.tensor([[False, True, True, False]])  # start, two rows that should do nothing, one that works


def at_rest(*rows, rest=REST):
    """The figure of one head with these rows of weights, the first of which sees nothing but itself."""
    weights = torch.tensor([[1.0, 0.0, 0.0, 0.0], *rows])[None, None]
    (share,) = attention_figures(Stub(weights), {}, at_rest=rest)["first_token_at_rest"]
    return share


def test_a_sink_is_weight_on_the_first_token_in_rows_that_should_do_nothing():
    works = [0.0, 0.5, 0.5, 0.0]
    assert at_rest([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], works) == 1
    assert at_rest([0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], works) == 0
    assert at_rest([0.8, 0.2, 0.0, 0.0], [0.4, 0.3, 0.3, 0.0], works) == pytest.approx(
        0.6
    )  # softmax: the mean
    looks_at_first = [1.0, 0.0, 0.0, 0.0]
    assert (
        at_rest([0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], looks_at_first) == 0
    )  # and where it works: no sink


def test_rows_that_are_nearly_empty_have_no_sink_whatever_their_little_weight_does():
    """Rows at rest may put a tiny remaining weight on the first token, as relu does: that is no sink."""
    tiny, works = [0.004, 0.0, 0.0, 0.0], [0.0, 2.0, 2.0, 0.0]
    assert at_rest(tiny, tiny, works) == pytest.approx(0.001)
    weights = torch.tensor([[1.0, 0.0, 0.0, 0.0], tiny, tiny, works])[None, None]
    scaled = [attention_figures(Stub(size * weights), {}, at_rest=REST) for size in (1e-3, 1e3)]
    assert [one["first_token_at_rest"] for one in scaled] == [
        pytest.approx([0.001])
    ] * 2  # scale does not count
    large = [-8.0, 0.0, 0.0, 0.0]  # more than where it works, of either sign: a sink that takes all
    assert at_rest(large, large, works) == 1
    assert at_rest([0.0] * 4, [0.0] * 4, [0.0] * 4) == 0
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    assert at_rest([0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], works, rest=everywhere) == pytest.approx(1 / 6)


def test_every_head_has_a_unit_of_its_own():
    sink = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 3 + [[0.0, 0.5, 0.5, 0.0]])
    none = 100 * torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 4)
    figures = attention_figures(Stub(torch.stack([sink, none])[None]), {}, at_rest=REST)
    assert figures["first_token_at_rest"] == [0.5]
    assert "first_token_at_rest" not in attention_figures(Stub(sink[None, None]), {})


def test_diversity_is_0_for_equal_heads_and_1_for_heads_that_share_no_key():
    one, other = one_hot(0, 1, 2), one_hot(1, 2, 0)
    layers = [torch.cat(heads, 1) for heads in ((one, one), (one, other), (one, one * 5), (one, -one))]
    diversity = attention_figures(Stub(*layers), {})["head_diversity"]
    assert diversity == pytest.approx([0, 1, 0, 2], abs=1e-6)
    three = torch.cat((one, one, other), 1)  # one pair of three is alike
    assert attention_figures(Stub(three), {})["head_diversity"] == pytest.approx([2 / 3])
