from unsoft.lab.bench import machine


def test_ones_own_work_does_not_count_as_that_of_others():
    ours = machine.Watch()
    for _ in range(300):
        sum(range(10_000))
    others = ours.others()
    assert others is None or others >= 0
    if others is not None:
        seconds = machine._own_seconds() - ours._start[2]
        assert seconds > 0, "the work was seen as ours"
