"""The JavaScript of the playground: each formula as its printer writes it, so that nothing is written twice."""

from __future__ import annotations

from collections.abc import Mapping

from unsoft.formula import Formula
from unsoft.formula.javascript import formula_source, operations_source
from unsoft.report.escape import embedded_json


def playground_script(formulas: Mapping[str, Formula]) -> str:
    """A script that defines ``unsoftFormulas``, a list of [label, function from logits to weights].

    It also defines ``unsoftOperations``, with which the page reads formulas that are typed into it.

    >>> print(playground_script({"plain": Formula("s/n")}).splitlines()[1])
    const unsoftFormulas = [["plain", (logits, {i = logits.length - 1} = {}) => {
    """
    pairs = ",\n".join(
        f"[{embedded_json(label)}, {formula_source(formula)}]" for label, formula in formulas.items()
    )
    return f'"use strict";\nconst unsoftFormulas = [{pairs}];\n{operations_source()}'
