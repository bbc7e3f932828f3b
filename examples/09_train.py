"""Train a small transformer on a task with a known answer, and compare with softmax and with chance.

python examples/09_train.py 400     (the steps; without a number 4, to show it; needs unsoft[hf])
"""

import sys

import unsoft

steps = int(sys.argv[1]) if sys.argv[1:] else 4

# One head must answer for, against, or neither: softmax can only support, cog can also oppose.
for mechanism in ("softmax", "cog"):
    spec = unsoft.lab.training.Spec(task="opposition", mechanism=mechanism, steps=steps, seed=1)
    result = unsoft.lab.training.train(
        spec
    )  # a second argument keeps the run in a folder, where it can be resumed
    print(
        f"{mechanism:8} score {result.score:.3f} after {steps} steps; chance {result.chance:.3f},"
        f" without signs at most {result.shortcut:.3f}, possible {result.known:.3f}"
    )
    assert 0 <= result.score <= 1
