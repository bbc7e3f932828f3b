"""Use, fork, use in the child: OpenMP threads do not survive a fork,
and a child that hands them work waits for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import unsoft

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

START = """
import os, signal, sys
import torch, unsoft
torch.set_num_threads(2)
x = torch.randn(2, 4, 300, 64)

def use():
    return torch.stack([one(what) for what in sys.argv[1:]])

def one(what):
    if what == "magnitude":
        return unsoft.magnitude.weighting(x[0, :, :, :8] / 4).weights.sum()
    if what in ("linear-relu", "gpam"):
        return unsoft.mechanism(what, heads=4, head_dim=64)(x, x, x, is_causal=True).sum()
    q = x.clone().requires_grad_()
    return torch.autograd.grad(unsoft.attention(q, x, x, "cog", engine=what).square().sum(), q)[0].sum()
"""
FORK = """
expected = use()
child = os.fork()
if child == 0:
    signal.alarm(120)       # kills a child that hangs
    assert torch.allclose(use(), expected, rtol=1e-3)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child hangs or is wrong"
assert torch.get_num_threads() == 2, "the parent keeps its threads"
"""
WORKERS = """
class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        signal.alarm(120)
        return use()

expected = use()
results = list(torch.utils.data.DataLoader(Dataset(), num_workers=1, multiprocessing_context="fork"))
assert all(torch.allclose(x, expected, rtol=1e-3) for x in results)
"""


@pytest.mark.parametrize(
    ("code", "used"),
    [
        pytest.param(FORK, ["tiled"], marks=pytest.mark.slow),
        (FORK, ["magnitude", "native", "dense", "linear-relu", "gpam"]),
        (WORKERS, ["native", "auto", "tiled"]),
    ],
    ids=["tiled", "compiled", "workers of a DataLoader"],
)
def test_use_fork_use(code, used):
    env = os.environ | {"PYTHONPATH": str(Path(unsoft.__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", START + code, *used]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
