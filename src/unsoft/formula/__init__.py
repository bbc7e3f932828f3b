"""Formulas: parsing, derivatives, evaluation on tensors, and printing as source code."""

import unsoft.formula.operations  # noqa: F401  (registers the operations)
from unsoft.formula.analysis import ONE, Interval, Properties
from unsoft.formula.derive import derivative
from unsoft.formula.evaluation import evaluate, evaluate_all
from unsoft.formula.expr import Expr
from unsoft.formula.formula import Facts, Formula
from unsoft.formula.instructions import Instruction, lower
from unsoft.formula.parser import parse

__all__ = [
    "ONE",
    "Expr",
    "Facts",
    "Formula",
    "Instruction",
    "Interval",
    "Properties",
    "derivative",
    "evaluate",
    "evaluate_all",
    "lower",
    "parse",
]
