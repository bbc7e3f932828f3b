"""Print one formula as Triton functions, and render them with the kernels of kernel/forward.py and
kernel/backward.py as one Python module. The module is written to the cache folder, because Triton reads the
source of functions from files. Derivatives are symbolic.

The text does not distinguish values of a row from values of an entry: broadcasting keeps the former small. A
factor of the weight that belongs to the row (1/n in relu2) is moved out of the tile and applied to the sum,
so that small weights do not underflow in float16. Large weights are scaled by the kernels (``GROWS``).

>>> from unsoft.formula import Formula
>>> print(formula_source(Formula("max(s, 0)**2/n"), biased=False).split("def value")[1].split("@")[0].strip())
(s, m, row, key, b, p):
    _0 = tl.maximum(s, 0.0)
    _1 = _0 * _0
    return _1, 0.0 + tl.zeros_like(s)
"""

import hashlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from unsoft.cache_dir import cache_directory, trusted_folder
from unsoft.engines.terms import BIAS, Terms, attention_terms, inverse_norm, row_value
from unsoft.engines.tiled.program import tidy, used_instructions
from unsoft.files import write_whole
from unsoft.formula import Expr, Formula, Instruction, derivative, lower
from unsoft.formula.expr import make, number, postorder, symbol
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import OPERATIONS
from unsoft.tracing import constant_in_graph

_KERNELS = Path(__file__).parent / "kernel"
LOG2E = 1 / math.log(2)
_HEAD = """import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import (
    expdiff, expm1, log1p, power, root, sigmoid, sign, sinh, cosh, softplus, tanh, with_sign_of,
)
from unsoft.engines.triton.kernel.tiles import cleaned
"""
# A quarter of the largest float16 (65504), so that rounding and a gradient of the same size stay in range.
_SAFE = 2.0**14
_AT_MOST_ONE = ("sign", "tanh", "sigmoid", "sin", "cos", "erf")
_ROW, _ENTRY = ("m", "row"), ("s", "m", "row", "key", "b")
_ZERO, _ONE = number(0), number(1)
_OWN = {"exp2": "tl.exp2({0})", "with_sign_of": "with_sign_of({0}, {1})"}
_SYMBOLS = frozenset({"s", "m", "n", "i", "j", "z"})


@constant_in_graph
def unprintable(key: str) -> str | None:
    """Return why the formula of a key has no Triton code: a user's operation without it, or a symbol that the
    kernels do not have. None if it has."""
    formula = Formula.from_key(key)
    if unknown := formula.uses - _SYMBOLS - {*formula.params, *formula.symbols.all}:
        return f"its kernels do not have the symbol {', '.join(sorted(unknown))}"
    parts = (formula.weight, formula.mass, formula.peak, formula.norm, formula.offset_mass)
    used = {node.op for node in postorder(*(part for part in parts if part is not None))} - {"num", "sym"}
    missing = sorted(op for op in used if OPERATIONS[op].triton is None)
    return f"it has no code for the operation {missing[0]}" if missing else None


def formula_source(formula: Formula, biased: bool) -> str:
    """Return the source of a formula's functions and constants; ``biased``: for calls with an additive
    mask."""
    terms, factor = row_factor(attention_terms(formula, biased))
    mass = terms.mass or _ZERO
    in_formula = biased and formula.bias != "logit"

    def slopes(name: str) -> list[Expr]:
        return [derivative(terms.weight, name), derivative(mass, name)]

    by_bias = slopes(BIAS) if in_formula else [_ZERO, _ZERO]
    kinds = {"parameter": terms.names, "query_field": terms.fields.query, "key_field": terms.fields.key}
    functions = [
        _function("peak", _ENTRY, [terms.peak or _ZERO], terms),
        _function("value", _ENTRY, [terms.weight, mass], terms),
        _function("slope", _ENTRY, [terms.weight, *slopes("s"), *by_bias], terms),
    ]
    for kind, names in kinds.items():
        several = [_function(f"{kind}_slope_{k}", _ENTRY, slopes(x), terms) for k, x in enumerate(names)]
        functions += [*several, _choice(kind, len(names))]
    functions += [
        _function("offset_mass", _ROW, [terms.offset or _ZERO], terms),
        _function("norm", (*_ROW, "z"), [terms.norm or symbol("z")], terms),
        _function("norm_slope", (*_ROW, "z"), [derivative(terms.norm or symbol("z"), "z")], terms),
        _function("factor", _ROW, [factor], terms),
        _loads(len(terms.names)),
        *(_field_loads(kind, len(kinds[kind])) for kind in ("query_field", "key_field")),
    ]
    constants = {
        "HAS_PEAK": terms.peak is not None,
        "HAS_MASS": terms.mass is not None,
        "UNDEFINED_ALONE": undefined_alone(terms, factor),
        "BIAS_IN_FORMULA": in_formula,
        "DEGREE": float(terms.degree),
        "GROWS": grows(terms),
    }
    for kind, names in kinds.items():
        constants |= {f"{kind.upper()}S": len(names), f"{kind.upper()}_SLOTS": slots(len(names))}
    head = "".join(f"{name} = tl.constexpr({content!r})\n" for name, content in constants.items())
    return "\n\n".join([f"{_HEAD}\n{head}", *functions])


def slots(count: int) -> int:
    """Return the next power of two, the only sizes of Triton's tensors.

    >>> [slots(count) for count in (0, 1, 3)]
    [1, 1, 4]
    """
    return 1 << max(count - 1, 0).bit_length()


def row_factor(terms: Terms) -> tuple[Terms, Expr]:
    """Return the terms without the factor of the weight that belongs to the row, and that factor (1 if none).

    Formulas with a mass keep their factor, because it would have to be taken out of the mass as well. Guards
    for NaN logits are removed: kernels replace NaN before they compute.
    """
    weight, mass, factor = _unguarded(terms.weight), terms.mass, _ONE
    while mass is None and weight.op in ("mul", "div"):
        a, b = weight.args
        if b.symbols <= {"n", "i"}:
            weight, factor = a, factor * b if weight.op == "mul" else factor / b
        elif weight.op == "mul" and a.symbols <= {"n", "i"}:
            weight, factor = b, factor * a
        else:
            break
    return replace(terms, weight=weight, mass=None if mass is None else _unguarded(mass)), factor


def grows(terms: Terms) -> bool:
    """Return False if the expressions of the weight and its slopes show that they stay in the range of
    float16.

    >>> from unsoft.formula import Formula
    >>> [grows(attention_terms(Formula(*f), False)) for f in (("exp(s - m)", "exp(s - m)", "s"), ("s*s/n",))]
    [False, True]
    """
    weight, mass = _unguarded(terms.weight), _unguarded(terms.mass or _ZERO)
    parts = (weight, derivative(weight, "s"), derivative(mass, "s"))
    return any(_bound(part, terms.peak) > _SAFE for part in parts)


def _bound(part: Expr, peak: Expr | None) -> float:
    """Return an upper bound of the absolute value, infinite if the expression does not show one."""
    if part.constant is not None:
        return float(abs(part.constant))
    if part.op in _AT_MOST_ONE:
        return 1.0
    if part.op == "exp" and part.args[0].op == "sub":
        power, m = part.args[0].args
        return 1.0 if m is symbol("m") and _is_below(power, peak) else math.inf
    if part.op == "expdiff" and part.args[2] is symbol("m"):
        return 1.0 if all(_is_below(power, peak) for power in part.args[:2]) else math.inf
    bounds = [_bound(argument, peak) for argument in part.args]
    if part.op in ("neg", "abs", "max", "min"):
        return max(bounds)
    if part.op == "where":
        return max(bounds[1:])
    if part.op in ("add", "sub"):
        return sum(bounds)
    if part.op == "mul" and math.inf not in bounds:
        return math.prod(bounds)
    if part.op == "div" and part.args[1].constant:
        return bounds[0] / bounds[1]
    if part.op == "pow" and (part.args[1].constant or -1) > 0 and bounds[0] <= 1:
        return 1.0
    return math.inf


def _is_below(power: Expr, peak: Expr | None) -> bool:
    """Return True if the expression never exceeds the peak, so that exp(power - m) is at most 1."""
    if peak is None or power is peak:
        return power is peak
    if peak.op == "abs":
        return power is peak.args[0] or power is -peak.args[0]
    return peak.op == "max" and any(_is_below(power, part) for part in peak.args)


def undefined_alone(terms: Terms, factor: Expr) -> bool:
    """Return True if factor / norm may not be finite in a row that sees no key, so that kernels track such
    rows.

    >>> from unsoft.formula import Formula
    >>> [undefined_alone(*row_factor(attention_terms(Formula("s", "s*s", norm=norm), False)))
    ...  for norm in ("sqrt(z)", "sqrt(z - 1)", "sqrt(i + z)")]
    [False, True, True]
    """
    parts = [part for part in (factor, terms.offset, terms.norm) if part is not None]
    if not frozenset().union(*(part.symbols for part in parts)) <= {"m", "n", "z"}:
        return True  # depends on the position of the row, its parameters or fields
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    symbols = {"m": zero, "n": one}
    scale = one * row_value(factor, symbols)
    if terms.mass is not None:
        z = zero if terms.offset is None else zero + row_value(terms.offset, symbols)
        scale = scale * inverse_norm(terms, symbols, z, torch.tensor(True))
    return not bool(scale.isfinite())


def _unguarded(part: Expr) -> Expr:
    s = symbol("s")
    if part.op == "where" and part.args[0] is make("eq", s, s) and part.args[2] is s:
        return part.args[1]
    return part


def _function(name: str, arguments: Sequence[str], outputs: Sequence[Expr], terms: Terms) -> str:
    body, results = gpu_instructions(outputs, terms.fields.key)
    renamed = {BIAS: "b", "n": "row.n", "i": "row.i", "j": "key.j"}
    renamed |= {parameter: f"p[{k}]" for k, parameter in enumerate(terms.names)}
    renamed |= {field: f"row.fields[{k}]" for k, field in enumerate(terms.fields.query)}
    renamed |= {field: f"key.fields[{k}]" for k, field in enumerate(terms.fields.key)}
    spanning: set[Operand] = {"s", BIAS}
    """Operands of the size of the tile: all that depends on the logit or the bias."""

    def text(x: Operand) -> str:
        return renamed.get(x, x) if isinstance(x, str) else repr(float(x))

    lines = []
    for target, op, args in body:
        template = _OWN.get(op) or OPERATIONS[op].triton or ""
        lines.append(f"{target} = {template.format(*map(text, args))}")
        if spanning & set(args):
            spanning.add(target)
    whole = [
        text(x) if "s" not in arguments or x in spanning else f"{text(x)} + tl.zeros_like(s)" for x in results
    ]
    return _jitted(f"{name}({', '.join([*arguments, 'p'])})", [*lines, f"return {', '.join(whole)}"])


def _choice(kind: str, count: int) -> str:
    """Print the function that selects the slopes of weight and mass by the parameter or field K."""
    lines, entry = [], ", ".join(_ENTRY)
    for k in range(count):
        lines += [f"{'elif' if k else 'if'} K == {k}:", f"    return {kind}_slope_{k}({entry}, p)"]
    lines += ["else:", "    return 0.0, 0.0"] if count else ["return 0.0, 0.0"]
    return _jitted(f"{kind}_slope(K: tl.constexpr, {entry}, p)", lines)


def _loads(count: int) -> str:
    """Print the function that loads the parameters of one head."""
    loads = [f"tl.load(table + {k} * heads + h)" for k in range(count)]
    return _jitted("parameters(table, heads, h)", [f"return ({', '.join(loads or ['0.0'])},)"])


def _field_loads(kind: str, count: int) -> str:
    """Print the function that loads the fields of rows or keys, followed by a number that is NaN where one of
    them is NaN or Inf. ``at``: pointers to the first field, ``step``: distance to the next."""
    loads = [f"_{k} = tl.load(at + {k} * step, mask=mask, other=0.0)" for k in range(count)]
    clean = "".join(f"cleaned(_{k}, EXACT), " for k in range(count))
    bad = " + ".join(f"_{k} * 0.0" for k in range(count)) or "0.0"
    return _jitted(f"{kind}s(at, step, mask, EXACT: tl.constexpr)", [*loads, f"return ({clean}{bad},)"])


def _jitted(signature: str, lines: Sequence[str]) -> str:
    return f"@triton.jit\ndef {signature}:\n" + "".join(f"    {line}\n" for line in lines)


def gpu_instructions(
    outputs: Sequence[Expr], key_fields: Sequence[str] = ()
) -> tuple[list[Instruction], list[Operand]]:
    """Return instructions that compute all outputs on a GPU, and the operand that holds each. Besides the
    operations of formulas they use ``exp2`` and ``with_sign_of``.

    An operand is a number, belongs to the row (m, n, i, parameters, query fields) or to the entry (s, j, the
    bias, key fields). Operations on rows are cheap, so work is moved there: exp(x) becomes exp2(x log2(e))
    with the factor folded into operands of the row, so that exp(s - m) takes one fused multiply-add and one
    special function. A division by an operand of the row becomes a product. sign(x) y becomes y with the sign
    bit flipped, unless y is a number.

    >>> from unsoft.formula import parse
    >>> body, results = gpu_instructions([parse("exp(s - m)/n")])
    >>> for instruction in body: print(*instruction)
    _x1 mul ('s', 1.4426950408889634)
    _x2 mul ('m', 1.4426950408889634)
    _x3 sub ('_x1', '_x2')
    _1 exp2 ('_x3',)
    _x5 div (1.0, 'n')
    _2 mul ('_1', '_x5')
    >>> results
    ['_2']
    """
    instructions, results = tidy(*lower({str(k): expr for k, expr in enumerate(outputs)}))
    rewriting = _Rewriting(instructions, key_fields)
    for instruction in instructions:
        rewriting.add(instruction)
    final = [results[str(k)] for k in range(len(outputs))]
    return used_instructions(rewriting.body, set(final)), final


class _Rewriting:
    def __init__(self, instructions: Sequence[Instruction], key_fields: Sequence[str]) -> None:
        self.made = {x.target: x for x in instructions}
        self.body: list[Instruction] = []
        self.entry: set[Operand] = {"s", "j", BIAS, *key_fields}
        self.scaled: dict[str, Operand] = {}

    def add(self, x: Instruction) -> None:
        match x:
            case (_, "exp", (a,)):
                self.emit(x.target, "exp2", self.times_log2e(a))
            case (_, "sigmoid", (a,)):
                power = self.new("exp2", self.new("neg", self.times_log2e(a)))
                self.emit(x.target, "div", 1.0, self.new("add", 1.0, power))
            case (_, "div", (a, b)) if a in self.entry and b not in self.entry:
                inverse = self.new("div", 1.0, b) if isinstance(b, str) else 1.0 / b
                self.emit(x.target, "mul", a, inverse)
            case (_, "pow", (float(a), b)) if a > 0:
                self.emit(x.target, "exp2", self.new("mul", b, math.log2(a)))
            case (_, "mul", (a, str(b))) if self.is_sign(a):
                self.emit(x.target, "with_sign_of", b, self.made[str(a)].args[0])
            case (_, "mul", (str(a), b)) if self.is_sign(b):
                self.emit(x.target, "with_sign_of", a, self.made[str(b)].args[0])
            case _:
                self.emit(x.target, x.op, *x.args)

    def is_sign(self, x: Operand) -> bool:
        return isinstance(x, str) and x in self.made and self.made[x].op == "sign"

    def times_log2e(self, x: Operand) -> Operand:
        if not isinstance(x, str):
            return x * LOG2E
        if x not in self.scaled:
            self.scaled[x] = self._times_log2e(x)
        return self.scaled[x]

    def _times_log2e(self, x: str) -> Operand:
        _, op, args = self.made.get(x, Instruction(x, "", ()))
        row = [a for a in args if a not in self.entry]
        match op:
            case "neg":
                return self.new("neg", self.times_log2e(args[0]))
            case "add" | "sub" if row and x in self.entry:
                return self.new(op, *(self.times_log2e(a) for a in args))
            case "mul" if row and x in self.entry:
                a, b = args if args[1] in row else args[::-1]
                return self.new("mul", a, self.times_log2e(b))
        return self.new("mul", x, LOG2E)

    def new(self, op: str, *args: Operand) -> str:
        target = f"_x{len(self.body)}"
        self.emit(target, op, *args)
        return target

    def emit(self, target: str, op: str, *args: Operand) -> None:
        self.body.append(Instruction(target, op, args))
        if self.entry & set(args):
            self.entry.add(target)


def render(formula: Formula, biased: bool) -> str:
    """Return the source of the module; ``biased``: for calls with an additive mask.

    >>> text = render(Formula("exp(s - m)", "exp(s - m)", "s"), biased=False)
    >>> "HAS_PEAK = tl.constexpr(True)" in text and "def forward_kernel(" in text
    True
    """
    kernels = [(_KERNELS / name).read_text() for name in ("forward.py", "backward.py")]
    return "\n\n".join([formula_source(formula, biased), *kernels])


@lru_cache(maxsize=256)
def kernels(formula: str, biased: bool) -> ModuleType:
    """Return the imported module of a formula's key, with the functions ``forward_kernel``,
    ``query_gradients_kernel``, ``key_gradients_kernel``, ``decode_kernel`` and ``combine_kernel``."""
    text = render(Formula.from_key(formula), biased)
    name = f"formula_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    path = trusted_folder(generated_folder(), ("",)) / f"{name}.py"
    if not path.is_file() or path.read_text() != text:
        write_whole(path, text.encode())
    spec = importlib.util.spec_from_file_location(f"{__package__}.kernel.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def generated_folder() -> Path:
    """Return the folder of the rendered modules."""
    return cache_directory() / "triton"
