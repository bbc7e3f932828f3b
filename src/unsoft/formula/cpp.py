"""Prints instructions as C++ on SIMD registers, for the native engine.

The text uses the functions of engines/native/kernel/simd.h and the definitions in the operations' records.

>>> operation("exp", ["s"]), operation("mul", ["a", "b"]), operation("where", ["c", "a", "b"])
('vexp(s)', 'a * b', 'vselect(c, a, b)')
>>> definitions(["cos", "exp"])
'UNSOFT_LANEWISE(vcos, std::cos)'
"""

from collections.abc import Iterable, Sequence

from unsoft.formula.operation import OPERATIONS


def literal(number: float) -> str:
    """Return a number, exactly.

    >>> literal(0.1), literal(2)
    ('real(0.1)', 'real(2.0)')
    """
    return f"real({float(number)!r})"


def operation(op: str, args: Sequence[str]) -> str:
    """Return one instruction on operands that are names, literals or bracketed expressions."""
    return OPERATIONS[op].write("cpp", f"v{op}", list(args))


def definitions(ops: Iterable[str]) -> str:
    """Return the C++ that the operations need beyond the functions of simd.h."""
    texts = (OPERATIONS[op].cpp_definition for op in sorted(set(ops)))
    return "\n".join(filter(None, texts))
