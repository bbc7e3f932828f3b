import platform

import pytest

from unsoft.lab.bench import machine
from unsoft.lab.bench.fresh_process import run_probe

FAULTS = """
import json, resource, torch
from unsoft.lab.bench.machine import keep_freed_memory
{first}
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(10_000_000)
print(json.dumps({{"faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}}))
"""


def test_ones_own_work_does_not_count_as_that_of_others():
    ours = machine.Watch()
    for _ in range(300):
        sum(range(10_000))
    others = ours.others()
    assert others is None or others >= 0
    if others is not None:
        seconds = machine._own_seconds() - ours._start[2]
        assert seconds > 0, "the work was seen as ours"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_not_cleared_anew():
    first, kept = (
        run_probe("-c", FAULTS.format(first=line))["faults"] for line in ("", "keep_freed_memory()")
    )
    assert kept < 0.5 * first
