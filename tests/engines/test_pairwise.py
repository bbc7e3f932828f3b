"""The helper that chooses cases for other tests."""

from itertools import combinations

from tests.engines.pairwise import pairwise


def test_every_pair_is_covered() -> None:
    mark = pairwise(a=[1, 2, 3], b=[1, 2], c=[1, 2])
    cases = mark.args[1]
    assert len(cases) < 12
    for first, second in combinations(range(3), 2):
        sizes = {0: 3, 1: 2, 2: 2}
        assert len({(case[first], case[second]) for case in cases}) == sizes[first] * sizes[second]
