"""Which engine runs a call of row-coupled attention; a name that cannot is refused with the reason.

native  compiled code, CPU    logits of a few rows at a time; memory linear in the length
dense   torch operations      the specification; any device, derivatives up to the third; quadratic memory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Call
from unsoft.engines.native.availability import failure
from unsoft.engines.native.rows import backward, forward, row_kernel, rule_of
from unsoft.engines.operator import fused_operator
from unsoft.engines.pointwise import native_unsupported
from unsoft.engines.registry import Engine, Registry, check_return_weights
from unsoft.engines.rows.dense import dense_rows
from unsoft.engines.rows.rule import RowRule
from unsoft.formula import Formula
from unsoft.tracing import constant_in_graph


def _unavailable(call: Call) -> str | None:
    return kernel_failure(rule_of(call).key, call.q.dtype == torch.float64)


@constant_in_graph
def kernel_failure(rule: str, double: bool) -> str | None:
    """Why the rule cannot be compiled for float32, or float64 if ``double``; None if it is."""
    return failure((rule, double), lambda: row_kernel(rule, double))


def _no_softmax(call: Call) -> str:
    return "it computes softmax, and this is another mechanism"


def _no_kernel(call: Call) -> str:
    return "it runs formulas only, and this mechanism needs whole rows; use 'dense'"


def _no_tiles(call: Call) -> str:
    return "its weights need whole rows, and it sees one tile at a time; use 'native' or 'dense'"


def _anything(call: Call) -> None:
    return None


ROWS: Registry[Call, Tensor] = Registry(
    [
        Engine(
            "native",
            native_unsupported,
            fused_operator("rows", forward, backward, RowRule.from_key),
            unavailable=_unavailable,
        ),
        Engine("triton", _no_kernel, lambda call: dense_rows(call, rule_of(call))[0]),
        Engine("sdpa", _no_softmax, lambda call: dense_rows(call, rule_of(call))[0]),
        Engine("tiled", _no_tiles, lambda call: dense_rows(call, rule_of(call))[0]),
        Engine("dense", _anything, lambda call: dense_rows(call, rule_of(call))[0]),
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
    """What :func:`unsoft.engines.run.run_formula` does, for a rule.

    ``before``: a causal row does not see its own key, only those before it.
    """
    ROWS.check(engine)
    check_return_weights(return_weights, engine)
    call, leading = checked_call(query, key, value, stand_in(rule), params=params, **options)
    call = replace(call, formula=cast(Formula, rule))
    if before and call.causal_offset is not None:
        call = replace(call, causal_offset=call.causal_offset - 1)
    with torch.autocast(call.q.device.type, enabled=False):
        if not return_weights:
            out = ROWS.choose(engine, call).run(call)
            return out.reshape(*leading, *out.shape[2:])
        out, weights = dense_rows(call, rule)
    return out.reshape(*leading, *out.shape[2:]), weights.reshape(*leading, *weights.shape[2:])


def stand_in(rule: RowRule) -> Formula:
    """A formula that tells the check of arguments what to prepare; it computes nothing.

    It is made once for a rule, and must be before a program is traced: a new formula is tried out on numbers.
    """
    names = sorted({"s", *rule.params, *(rule.uses & {"n"})})
    return _formula(" + ".join(names), tuple(rule.params.items()))


@lru_cache(maxsize=64)
def _formula(text: str, params: tuple[tuple[str, float], ...]) -> Formula:
    return Formula(text, params=dict(params))
