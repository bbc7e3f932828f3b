"""The engines of row-coupled attention, and how one is chosen.

native  compiled code, CPU    logits of a few rows at a time; memory linear in the length
dense   torch operations      the specification; any device, derivatives up to the third; quadratic memory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.arguments import checked_call, with_leading
from unsoft.engines.call import Call
from unsoft.engines.native.availability import failure
from unsoft.engines.native.rows import backward, forward, row_kernel
from unsoft.engines.operator import fused_operator
from unsoft.engines.pointwise import native_unsupported
from unsoft.engines.registry import Engine, Registry, check_return_weights, no_reason, unsupported
from unsoft.engines.rows.rule import RowRule, dense_rows
from unsoft.tracing import constant_in_graph


@constant_in_graph
def kernel_failure(rule: str, double: bool) -> str | None:
    """Return why the rule cannot be compiled for float32, or float64 if ``double``; None if it can."""
    return failure((rule, double), lambda: row_kernel(rule, double))


def _dense(call: Call) -> Tensor:
    return dense_rows(call)[0]


ROWS: Registry[Call, Tensor] = Registry(
    [
        Engine(
            "native",
            lambda call: native_unsupported(call.q),
            fused_operator("rows", forward, backward, RowRule.from_key),
            unavailable_reason=lambda call: kernel_failure(call.rule.key, call.q.dtype == torch.float64),
        ),
        Engine(
            "triton",
            unsupported("it runs formulas only, and this mechanism needs whole rows; use 'dense'"),
            _dense,
        ),
        Engine("sdpa", unsupported("it computes softmax, and this is another mechanism"), _dense),
        Engine(
            "tiled",
            unsupported(
                "its weights need whole rows, and it sees one tile at a time; use 'native' or 'dense'"
            ),
            _dense,
        ),
        Engine("dense", no_reason, _dense),
    ],
)
"""All engines for row-coupled attention, the preferred ones first."""


def run_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: RowRule,
    *,
    engine: str = "auto",
    return_weights: bool = False,
    params: Mapping[str, float | Tensor] | None = None,
    before: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a rule as :func:`unsoft.engines.pointwise.run_formula` runs a formula.

    ``before``: a causal row does not see its own key, only those before it.
    """
    ROWS.check(engine)
    check_return_weights(return_weights, engine)
    call, leading = checked_call(query, key, value, rule, params=params, **options)
    if before and call.causal_offset is not None:
        call = replace(call, causal_offset=call.causal_offset - 1)
    with torch.autocast(call.q.device.type, enabled=False):
        if not return_weights:
            return with_leading(ROWS.choose(engine, call).run(call), leading)
        out, weights = dense_rows(call)
    return with_leading(out, leading), with_leading(weights, leading)
