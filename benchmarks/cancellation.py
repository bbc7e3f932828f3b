"""The error of weights other than softmax by FlexAttention's log-space route, against direct computation.

    python benchmarks/cancellation.py [--out benchmarks/cancellation.json]

attention-gym (attn_gym/mods/activation.py) gets sum_j f(s_j) v_j from a softmax kernel: with the score
log(f(s) + N) it returns (sum (f + N) v) / l, and f v = output * l - N sum v. The terms with N grow with the
number of keys, and cancel. Inputs are bfloat16; FlexAttention runs as torch has it on CPUs (float32 scores,
bfloat16 weights and output). The error is |result - exact| / |exact| over all rows, exact in float64 on the
same inputs. No times: a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.functional import silu

import unsoft

WIDTH, HEADS = 64, 2
LENGTHS = (128, 1024, 8192)
# 1 is the default of attention-gym; 0.3 is close to the least that silu allows (its minimum is -0.278).
ROUTES: tuple[tuple[str, float], ...] = (("sigmoid", 1.0), ("sigmoid", 0.0), ("hstu", 1.0), ("hstu", 0.3))


def activation(name: str, length: int) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return f of the logits, and the factor after the sum."""
    if name == "sigmoid":
        return lambda s: torch.sigmoid(s - torch.tensor(float(length)).log()), 1.0
    return silu, 1 / length


def errors(name: str, offset: float, length: int) -> dict[str, float | str]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, dtype=torch.bfloat16) for _ in range(3))
    f, factor = activation(name, length)
    exact = factor * f(q.double() @ k.double().mT / WIDTH**0.5) @ v.double()
    out, aux = flex_attention(
        q, k, v, score_mod=lambda s, *_: torch.log(f(s) + offset), return_aux=AuxRequest(lse=True)
    )
    through_log = factor * (out * aux.lse.exp()[..., None] - offset * v.float().sum(-2, keepdim=True))
    direct = unsoft.attention(q, k, v, name)

    def error(x: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    return {
        "mechanism": name,
        "offset": offset,
        "keys": length,
        "log_route": error(through_log),
        "direct": error(direct),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = [errors(name, offset, length) for name, offset in ROUTES for length in LENGTHS]
    for row in rows:
        print(row)
    if out is not None:
        record = {"versions": {"torch": torch.__version__}, "dtype": "bfloat16", "errors": rows}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
