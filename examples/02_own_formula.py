"""A mechanism of your own is one formula: what it promises, what it can do and its kernel follow from it.

python examples/02_own_formula.py
"""

import torch

import unsoft

# s is the logit, m the largest peak of the row: it keeps exp in range, and cancels.
sharp = unsoft.Formula(
    weight="s*exp(tau*s - m)",
    mass="abs(s)*exp(tau*s - m)",
    peak="tau*s",
    params={"tau": 1.0},
    name="sharp",
)
print("as LaTeX:", sharp.latex())
print("found by analysis:", sharp.properties)

# Every engine runs it, with gradients, also for tau: here one number for each head.
query, key, value = (torch.randn(1, 4, 64, 32) for _ in range(3))
tau = torch.ones(4, requires_grad=True)
unsoft.attention(query, key, value, sharp, params={"tau": tau}, is_causal=True).sum().backward()
print("gradient of tau:", [round(x, 2) for x in tau.grad.tolist()])

# Can it focus on one key, and what do 50 copies of a key do to it?
print("S of a long row:", unsoft.theory.sparsity(sharp, beta=0.0, gamma=[0.5, 1.0, 2.0]).tolist())
print("share of one key with logit 4 against 50 with logit 1:", float(unsoft.theory.hijack_share(sharp, 50)))

# The battery that our own mechanisms pass; without `only` and `engines` it takes half a minute.
report = unsoft.testing.check_mechanism(sharp, only=["edges", "decoding"], engines=["dense"], quick=True)
print(str(report).splitlines()[0])
assert report.ok
