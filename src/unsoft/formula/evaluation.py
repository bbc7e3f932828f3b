"""Evaluates expressions on tensors, differentiably.

The gradient does not come from autograd's rules for each small operation: it is the symbolic derivative,
evaluated in turn. It follows the conventions of :mod:`unsoft.formula.derive`, saves only the inputs, and can
be differentiated again to any order, forwards (jvp), backwards and under vmap: several expressions are one
autograd function, whose derivatives are evaluated by the same function.

>>> import torch
>>> from unsoft.formula.parser import parse
>>> s = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
>>> y = evaluate(parse("max(s, 0)**2 / n"), {"s": s, "n": 2})
>>> y.tolist()
[0.0, 0.0, 2.0]
>>> torch.autograd.grad(y.sum(), s)[0].tolist()
[0.0, 0.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from unsoft.formula.derive import derivative
from unsoft.formula.expr import Expr
from unsoft.formula.instructions import Instruction, Operand, lower, run
from unsoft.formula.parser import reread
from unsoft.tracing import constant_in_graph

Value = Tensor | float | int


def evaluate(expr: Expr, env: Mapping[str, Value], *, constants: Collection[str] = ()) -> Tensor:
    """Return an expression's value, of the broadcast shape of all tensors in ``env`` and in their dtype.

    ``env`` maps each symbol to a tensor or a number. Gradients flow to every tensor in it, except those named
    in ``constants``. The result may be a view of a tensor in ``env`` (of s for the expression "s").
    """
    return evaluate_all({"value": expr}, env, constants=constants)["value"]


def evaluate_all(
    outputs: Mapping[str, Expr], env: Mapping[str, Value], *, constants: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the values of several expressions, their shared parts computed once; see :func:`evaluate`.

    >>> from unsoft.formula.parser import parse
    >>> evaluate_all({"double": parse("2*s"), "half": parse("s/2")}, {"s": 3})
    {'double': tensor(6.), 'half': tensor(1.5000)}
    """
    used = sorted({name for expr in outputs.values() for name in expr.symbols})
    if missing := [name for name in used if name not in env]:
        raise ValueError(f"env: no value for {', '.join(missing)}; given are {', '.join(sorted(env))}")
    tensors = _as_tensors(env)
    # torch.broadcast_shapes would import sympy: 0.5 s
    like: Tensor = torch.broadcast_tensors(*tensors.values())[0]
    results = values(list(outputs.values()), tensors, frozenset(constants))
    return {
        name: (x if isinstance(x, Tensor) else like.new_full((), x)).expand(like.shape)
        for name, x in zip(outputs, results, strict=True)
    }


def _as_tensors(env: Mapping[str, Value]) -> dict[str, Tensor]:
    """Return all values as tensors of one floating dtype on one device; at least one tensor."""
    tensors = [value for value in env.values() if isinstance(value, Tensor)]
    floating = [value.dtype for value in tensors if value.is_floating_point()]
    dtype = floating[0] if floating else torch.get_default_dtype()
    for other in floating[1:]:
        dtype = torch.promote_types(dtype, other)
    device = tensors[0].device if tensors else None
    return {
        name: value.to(dtype)
        if isinstance(value, Tensor)
        else torch.tensor(float(value), dtype=dtype, device=device)
        for name, value in (env or {"": 0}).items()
    }


def values(
    exprs: Sequence[Expr], env: Mapping[str, Tensor], fixed: frozenset[str] = frozenset()
) -> list[Tensor | float]:
    """Return each expression's value: a number if it has no symbols, else of the shape of those it uses.

    No derivative is taken by the names in ``fixed``.
    """
    computed = tuple(dict.fromkeys(expr for expr in exprs if expr.symbols and expr.op != "sym"))
    results: dict[Expr, Tensor] = {}
    if computed:
        used = {name for expr in computed for name in expr.symbols}
        names = tuple(sorted(used))
        tensors = _apply(computed, names, fixed & used, [env[name] for name in names])
        results = dict(zip(computed, tensors, strict=True))
    for expr in exprs:
        if expr.op == "sym":  # an alias, which autograd handles best itself
            results[expr] = env[expr.name].detach() if expr.name in fixed else env[expr.name]
    return [results[expr] if expr.symbols else expr.constant for expr in exprs]


def _apply(
    exprs: tuple[Expr, ...], names: tuple[str, ...], fixed: frozenset[str], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        # Dynamo's graph can contain text but no expressions.
        texts = [_text_in_graph(expr) for expr in exprs]
        return _values_of_text("\n".join(texts), " ".join(names), " ".join(sorted(fixed)), *tensors)
    return _applied(program(exprs, names, fixed), tensors)


def _values_of_text(texts: str, names: str, fixed: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    exprs = tuple(reread(text) for text in texts.split("\n"))
    return _applied(program(exprs, tuple(names.split()), frozenset(fixed.split())), tensors)


def _applied(program: Program, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels) > 1:
        # torch.autograd.Function silently drops the outer tangents: the second derivative would be 0.
        raise NotImplementedError(
            "formula: torch.func.jvp inside torch.func.jvp (jacfwd of jacfwd) is not supported; use"
            " torch.func.hessian, which is jacfwd of jacrev, or jacrev of jacrev"
        )
    return cast(tuple[Tensor, ...], _Apply.apply(program, *tensors))  # type: ignore[no-untyped-call]


@constant_in_graph
def _text_in_graph(expr: Expr) -> str:
    """Return the text of an expression, after telling dynamo not to trace :func:`_values_of_text`."""
    torch.compiler.allow_in_graph(_values_of_text)
    return str(expr)


class Program:
    """Expressions with the order of their inputs. Use :func:`program`, which builds each one once."""

    def __init__(self, exprs: tuple[Expr, ...], names: tuple[str, ...], fixed: frozenset[str]) -> None:
        self.exprs, self.names, self.fixed = exprs, names, fixed

    @cached_property
    def lowered(self) -> tuple[list[Instruction], dict[str, Operand]]:
        return lower({str(k): expr for k, expr in enumerate(self.exprs)})

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(run(*self.lowered, dict(zip(self.names, tensors, strict=True))).values())

    def differentiable(self, requested: Sequence[bool]) -> list[bool]:
        """Return which of the requested inputs get a derivative: all but the fixed ones."""
        return [yes and name not in self.fixed for yes, name in zip(requested, self.names, strict=True)]

    def slopes(
        self, tensors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> dict[tuple[int, int], Tensor | float]:
        """Return the derivatives {(output, input): value} that are not zero everywhere, for wanted inputs."""
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
    """Return the program of some expressions, built once."""
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
        # The tangent of a constant is None and not 0: at a pole of its slope, 0 * inf would be NaN.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = ctx.program.differentiable(ctx.needs_input_grad[1:])
        grads: list[Tensor | None] = [None] * len(tensors)
        for (o, k), slope in ctx.program.slopes(tensors, wanted).items():
            gradient = upstream[o]
            if gradient is None:
                continue
            part = (gradient * slope).sum_to_size(tensors[k].shape)
            grads[k] = part if grads[k] is None else grads[k] + part
        for k, yes in enumerate(wanted):
            if yes and grads[k] is None:  # zero everywhere, as for sign(s), is still a gradient
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
        # torch.func takes no None from a function with several outputs.
        return tuple(
            tensors[0].new_zeros(shape) if x is None else x for x, shape in zip(out, ctx.shapes, strict=True)
        )


def vanishes(norm: Tensor) -> Tensor:
    """Return where a normaliser counts as 0: below the smallest normal number, whose inverse may overflow.

    >>> vanishes(torch.tensor([0.0, 1e-40, 1e-30, -1.0]))
    tensor([ True,  True, False, False])
    """
    return norm.abs() < torch.finfo(norm.dtype).smallest_normal
