"""Groups by a union of sets in plain Python, magnitude by a dense solve."""

import itertools
import math

import pytest
import torch

from unsoft import measure

NAN = math.nan


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def crowd(seed=0):
    """Keys of three clusters and two loners, shuffled."""
    centres = normal(5, 4, seed=seed) * 6
    keys = centres[[0, 0, 0, 1, 1, 2, 2, 3, 4]] + 0.05 * normal(9, 4, seed=seed + 1)
    return keys[torch.randperm(9, generator=torch.Generator().manual_seed(seed))]


def groups_by_hand(keys, t, threshold, exists=None):
    count, dim = keys.shape
    sets = [{j} for j in range(count)]
    for j, other in itertools.combinations(range(count), 2):
        distance = math.dist(keys[j].tolist(), keys[other].tolist()) ** 2
        together = exists is None or (exists[j] and exists[other])
        if together and math.exp(-t * distance / dim) > threshold:
            merged = sets[j] | sets[other]
            for member in merged:
                sets[member] = merged
    return torch.tensor([min(group) for group in sets])


def worth_by_hand(keys, t=1.0, eps=1e-2):
    distances = torch.tensor([[math.dist(x, y) ** 2 for y in keys.tolist()] for x in keys.tolist()]).double()
    similarity = torch.exp(-t * distances / keys.shape[-1])
    ones = torch.ones(len(keys), dtype=torch.float64)
    return torch.linalg.solve(similarity + eps * torch.eye(len(keys), dtype=torch.float64), ones)


def shares_by_hand(row, worth, groups, visible):
    seen = [j for j in range(len(row)) if visible[j]]
    crowded = [j for j in seen if sum(groups[j] == groups[other] for other in seen) > 1]
    mass, total = sum(abs(row[j]) for j in seen), sum(worth[j] for j in seen)
    attention = sum(abs(row[j]) for j in crowded) / mass if mass else 0.0
    return attention, sum(worth[j] for j in crowded) / total if total else 0.0


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("t", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("seed", range(4))
def test_groups(t, threshold, seed):
    keys = torch.stack([crowd(seed), normal(9, 4, seed=seed + 50)])
    result = measure.key_groups(keys, t=t, threshold=threshold)
    for labels, points in zip(result, keys, strict=True):
        assert torch.equal(labels, groups_by_hand(points, t, threshold))


def test_groups_of_a_long_chain_in_any_order():
    """Ends that are far apart belong together if a chain of near keys joins them."""
    chain = torch.arange(300.0)[:, None]
    shuffled = chain[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    assert measure.key_groups(shuffled, threshold=0.3).eq(0).all()  # neighbours: exp(-1) = 0.37
    assert torch.equal(measure.key_groups(shuffled, threshold=0.4), torch.arange(300))


def test_groups_do_not_depend_on_the_order():
    keys, order = crowd(3), torch.randperm(9, generator=torch.Generator().manual_seed(9))
    together = measure.key_groups(keys)
    shuffled = measure.key_groups(keys[order])
    assert torch.equal(
        together[:, None] == together, (shuffled[:, None] == shuffled)[order.argsort()][:, order.argsort()]
    )


def test_clones_far_from_the_origin_are_found_at_fine_resolution():
    far = torch.tensor([[3000.0, 0.0], [3000.0, 0.0], [3000.01, 0.0], [-3000.0, 0.0]])
    assert measure.key_groups(far, t=1e6).tolist() == [0, 0, 2, 3]


def test_hidden_keys_are_alone_and_may_hold_anything():
    keys = crowd(1)
    exists = torch.tensor([True, False] * 4 + [True])
    with_nan = torch.where(exists[:, None], keys, NAN)
    assert torch.equal(measure.key_groups(with_nan, exists), groups_by_hand(keys, 1.0, 0.5, exists.tolist()))
    with pytest.raises(ValueError, match="'keys' holds NaN"):
        measure.key_groups(with_nan)


def test_a_hidden_clone_is_alone():
    assert measure.key_groups(torch.zeros(4, 2), torch.tensor([True, False, True, False])).tolist() == [
        0,
        1,
        0,
        3,
    ]


def test_no_keys():
    assert measure.key_groups(torch.zeros(2, 0, 3)).shape == (2, 0)
    assert measure.key_groups(torch.zeros(0, 4, 3)).shape == (0, 4)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.tensor([True] * 7 + [False] * 2),
        torch.ones(9, 9, dtype=torch.bool).tril(),
        torch.zeros(1, dtype=torch.bool),
    ],
    ids=["none", "padding", "causal", "nothing"],
)
def test_definition_with_explicit_magnitude(mask):
    weights = normal(2, 3, 9, 9)
    weights[0, 0, 4] = 0
    keys = torch.stack([crowd(head) for head in range(3)])
    worth = torch.stack([worth_by_hand(points) for points in keys])
    result = measure.hijack(weights, keys, mask, magnitude_weights=worth)
    visible = torch.ones(9, 9, dtype=torch.bool) if mask is None else mask.expand(9, 9)
    for b, h, i in itertools.product(range(2), range(3), range(9)):
        groups = groups_by_hand(keys[h], 1.0, 0.5, visible.any(0).tolist())
        attention, magnitude = shares_by_hand(
            weights[b, h, i].tolist(), worth[h].tolist(), groups.tolist(), visible[i].tolist()
        )
        assert result.attention_share[b, h, i].item() == pytest.approx(attention, rel=1e-12)
        assert result.magnitude_share[b, h, i].item() == pytest.approx(magnitude, rel=1e-12)
        assert result.excess[b, h, i].item() == pytest.approx(attention - magnitude, abs=1e-12)


def test_magnitude_per_row():
    weights, keys, causal = normal(9, 9).softmax(-1), crowd(), torch.ones(9, 9, dtype=torch.bool).tril()
    prefixes = torch.zeros(9, 9, dtype=torch.float64)
    for i in range(9):
        prefixes[i, : i + 1] = worth_by_hand(keys[: i + 1])
    result = measure.hijack(weights, keys, causal, magnitude_weights=prefixes)
    groups = groups_by_hand(keys, 1.0, 0.5).tolist()
    for i in range(9):
        _, magnitude = shares_by_hand(weights[i].tolist(), prefixes[i].tolist(), groups, causal[i].tolist())
        assert result.magnitude_share[i].item() == pytest.approx(magnitude, rel=1e-12)


def test_no_crowd_no_hijack():
    keys = torch.eye(4) * 50
    result = measure.hijack(torch.rand(3, 4), keys, magnitude_weights=torch.ones(4))
    assert all(share.eq(0).all() for share in result)


def test_rows_without_mass_and_hidden_nan():
    keys = torch.zeros(3, 2)
    weights = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, NAN]])
    result = measure.hijack(weights, keys, torch.tensor([True, True, False]), magnitude_weights=torch.ones(3))
    assert result.attention_share.tolist() == [0, 1]
    assert measure.hijack(
        weights, keys, magnitude_weights=torch.ones(3)
    ).attention_share.isnan().tolist() == [
        False,
        True,
    ]


def test_attention_share_is_differentiable():
    keys = crowd()
    worth = worth_by_hand(keys)
    weights = normal(2, 9).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w: measure.hijack(w, keys, magnitude_weights=worth).attention_share, weights
    )


def test_rows_that_see_different_keys_need_their_own_magnitude():
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="differs from row to row.*prefix_weighting"):
        measure.hijack(torch.ones(4, 4), torch.ones(4, 2), causal)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((torch.ones(2, 3), torch.ones(4, 2)), {}, ValueError, r"'keys' has shape \(4, 2\), .* 3 keys"),
        (
            (torch.ones(8, 2, 3), torch.ones(4, 3, 2)),
            {},
            ValueError,
            r"'keys' has shape \(4, 3, 2\); .*keys.repeat_interleave",
        ),
        ((torch.ones(2, 3), torch.ones(3, 2).int()), {}, TypeError, "'keys' has dtype torch.int32"),
        ((torch.ones(2, 3), torch.ones(3, 2)), {"t": 0.0}, ValueError, "'t' is 0.0; it must be positive"),
        ((torch.ones(2, 3), torch.ones(3, 2)), {"threshold": 1.0}, ValueError, "'threshold' is 1.0"),
        (
            (torch.ones(2, 3), torch.ones(3, 2)),
            {"magnitude_weights": torch.ones(2)},
            ValueError,
            "'magnitude_weights' has shape",
        ),
    ],
)
def test_invalid_arguments_raise(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        measure.hijack(*arguments, **({"magnitude_weights": torch.ones(3)} | keywords))


@pytest.mark.parametrize("seed", range(3))
def test_magnitude_of_the_library(seed):
    """Needs unsoft.magnitude."""
    weights, keys = normal(2, 5, 9).softmax(-1), torch.stack([crowd(seed), crowd(seed + 7)])
    worth = torch.stack([worth_by_hand(points, t=2.0, eps=0.1) for points in keys])
    explicit = measure.hijack(weights, keys, t=2.0, eps=0.1, magnitude_weights=worth)
    result = measure.hijack(weights, keys, t=2.0, eps=0.1)
    torch.testing.assert_close(result.magnitude_share, explicit.magnitude_share, rtol=1e-4, atol=1e-5)


def test_magnitude_of_the_library_with_padding():
    """Needs unsoft.magnitude. Hidden keys have no part in the magnitude."""
    weights, keys = normal(2, 5, 9).softmax(-1), torch.stack([crowd(1), crowd(8)])
    exists = torch.tensor([[True] * 6 + [False] * 3, [True] * 9])[:, None]
    result = measure.hijack(weights, keys, exists)
    for b, count in enumerate((6, 9)):
        alone = measure.hijack(
            weights[b, :, :count], keys[b, :count], magnitude_weights=worth_by_hand(keys[b, :count])
        )
        torch.testing.assert_close(result.magnitude_share[b], alone.magnitude_share, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.attention_share[b], alone.attention_share)


def test_a_crowd_takes_more_than_it_is_worth():
    """Needs unsoft.magnitude.

    The example of the literature: 50 clones and one unique key, 20 times as relevant.
    """
    keys = torch.zeros(51, 8, dtype=torch.float64)
    keys[0] = 10
    row = torch.tensor([[20.0] + [1.0] * 50], dtype=torch.float64) / 70
    result = measure.hijack(row, keys, eps=1e-6)
    assert result.attention_share.item() == pytest.approx(50 / 70)
    assert result.magnitude_share.item() == pytest.approx(0.5, abs=1e-4)
