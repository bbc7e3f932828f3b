"""Expressions as one differentiable operation on tensors.

A program is one autograd function for several expressions. Its derivatives are the symbolic ones, again
evaluated by a program: they share their common parts, save only the inputs, and can be differentiated to any
order, forwards (jvp), backwards and under vmap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from unsoft.formula.derive import derivative
from unsoft.formula.expr import Expr
from unsoft.formula.lower import Instruction, Operand, lower
from unsoft.formula.parse import reread
from unsoft.formula.torch_ops import run


def values(
    exprs: Sequence[Expr], env: Mapping[str, Tensor], fixed: frozenset[str] = frozenset()
) -> list[Tensor | float]:
    """Value of each expression: a number if it has no symbols, else of the shape of the symbols it uses.

    No derivative is taken by the names in ``fixed``.
    """
    proper = tuple(dict.fromkeys(expr for expr in exprs if expr.symbols and expr.op != "sym"))
    found: dict[Expr, Tensor] = {}
    if proper:
        used = {name for expr in proper for name in expr.symbols}
        names = tuple(sorted(used))
        found = dict(
            zip(proper, _apply(proper, names, fixed & used, [env[name] for name in names]), strict=True)
        )
    for expr in exprs:
        if expr.op == "sym":  # an alias, which autograd handles best itself
            found[expr] = env[expr.name].detach() if expr.name in fixed else env[expr.name]
    return [found[expr] if expr.symbols else expr.constant for expr in exprs]


def _apply(
    exprs: tuple[Expr, ...], names: tuple[str, ...], fixed: frozenset[str], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        # Dynamo can carry text but not expressions into its graph.
        texts = [_text_in_graph(expr) for expr in exprs]
        return _values_of_text("\n".join(texts), " ".join(names), " ".join(sorted(fixed)), *tensors)
    return _applied(program(exprs, names, fixed), tensors)


def _values_of_text(texts: str, names: str, fixed: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    exprs = tuple(reread(text) for text in texts.split("\n"))
    return _applied(program(exprs, tuple(names.split()), frozenset(fixed.split())), tensors)


def _applied(program: Program, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], _Apply.apply(program, *tensors))  # type: ignore[no-untyped-call]


def _text_in_graph(expr: Expr) -> str:
    """Text of an expression; on the way tells dynamo to call :func:`_values_of_text`, not to look inside."""
    torch.compiler.allow_in_graph(_values_of_text)  # type: ignore[no-untyped-call]
    return str(expr)


# What torch.compiler.assume_constant_result does. Calling that, or allow_in_graph, at import would cost a
# second, because they import all of dynamo; like this, only those who compile pay, and they have it loaded.
_text_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Program:
    """Expressions with the order of their inputs. Use :func:`program`, which builds each one once."""

    def __init__(self, exprs: tuple[Expr, ...], names: tuple[str, ...], fixed: frozenset[str]) -> None:
        self.exprs, self.names, self.fixed = exprs, names, fixed

    @cached_property
    def lowered(self) -> tuple[list[Instruction], dict[str, Operand]]:
        return lower({str(place): expr for place, expr in enumerate(self.exprs)})

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(run(*self.lowered, dict(zip(self.names, tensors, strict=True))).values())

    def differentiable(self, asked: Sequence[bool]) -> list[bool]:
        """Which of the inputs asked for get a derivative: all but the fixed ones."""
        return [yes and name not in self.fixed for yes, name in zip(asked, self.names, strict=True)]

    def slopes(
        self, tensors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> dict[tuple[int, int], Tensor | float]:
        """Derivatives {(output, input): value} that are not zero everywhere, for the wanted inputs."""
        slopes = {
            (o, k): slope
            for k, name in enumerate(self.names)
            if wanted[k]
            for o, expr in enumerate(self.exprs)
            if (slope := derivative(expr, name)).constant != 0
        }
        env = dict(zip(self.names, tensors, strict=True))
        return dict(zip(slopes, values(list(slopes.values()), env, self.fixed), strict=True))


@lru_cache(maxsize=1024)
def program(exprs: tuple[Expr, ...], names: tuple[str, ...], fixed: frozenset[str]) -> Program:
    """The program of some expressions, made once."""
    return Program(exprs, names, fixed)


class _Apply(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(program: Program, *tensors: Tensor) -> tuple[Tensor, ...]:
        return program(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.program = inputs[0]
        ctx.shapes = [x.shape for x in output]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = ctx.program.differentiable(ctx.needs_input_grad[1:])
        grads: list[Tensor | None] = [None] * len(tensors)
        for (o, k), slope in ctx.program.slopes(tensors, wanted).items():
            part = (upstream[o] * slope).sum_to_size(tensors[k].shape)
            grads[k] = part if grads[k] is None else grads[k] + part
        for k, yes in enumerate(wanted):
            if (
                yes and grads[k] is None
            ):  # a slope that is zero everywhere, as that of sign(s), is still a slope
                grads[k] = torch.zeros_like(tensors[k])
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = ctx.program.differentiable([tangent is not None for tangent in tangents])
        out: list[Tensor | None] = [None] * len(ctx.program.exprs)
        for (o, k), slope in ctx.program.slopes(tensors, wanted).items():
            part = (tangents[k] * slope).expand(ctx.shapes[o])
            out[o] = part if out[o] is None else out[o] + part
        return tuple(out)
