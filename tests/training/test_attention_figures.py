"""What is said about the attention of a trained model, against weights that are known."""

import pytest
import torch

from unsoft.training.attention_figures import attention_figures


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
    found = attention_figures(Stub(one_hot(0, 0, 0), one_hot(0, 1, 2), one_hot(0, 0, 2)), {})
    assert found == {"first_token": [1.0, 0.0, 0.5]}
    signed = torch.tensor([[1.0, 0.0], [-3.0, 1.0]])[None, None]
    assert attention_figures(Stub(signed), {})["first_token"] == [0.75]
    assert attention_figures(Stub(torch.zeros(1, 1, 2, 2)), {})["first_token"] == [0.0]


def test_diversity_is_0_for_equal_heads_and_1_for_heads_that_share_no_key():
    one, other = one_hot(0, 1, 2), one_hot(1, 2, 0)
    layers = [torch.cat(heads, 1) for heads in ((one, one), (one, other), (one, one * 5), (one, -one))]
    found = attention_figures(Stub(*layers), {})["head_diversity"]
    assert found == pytest.approx([0, 1, 0, 2], abs=1e-6)
    three = torch.cat((one, one, other), 1)  # one pair of three is alike
    assert attention_figures(Stub(three), {})["head_diversity"] == pytest.approx([2 / 3])
