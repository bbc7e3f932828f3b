"""Copy: what the model reads after the mark is what it was asked to say before."""

import torch

from unsoft.lab.tasks import IGNORE
from unsoft.lab.tasks.sequences import Copy


def test_labels_follow_the_tokens_before_the_mark():
    task = Copy(length=6)
    batch = task.sample(4, seed=0)
    tokens, mark, again = batch.inputs[:, :6], batch.inputs[:, 6], batch.inputs[:, 7:]
    assert bool((mark == task.vocabulary).all())
    assert torch.equal(batch.labels[:, 6:], tokens)
    assert torch.equal(again, tokens[:, :-1]), "each step reads the token of the step before"
    assert bool((batch.labels[:, :6] == IGNORE).all())
