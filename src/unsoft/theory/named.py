"""Which formula a name stands for.

Those with a closed form are written here once more, so that the theory judges the mechanisms' own text. Every
other name ("tanh", "polynomial(3)", "logn+cog") is looked up among the mechanisms, of which no more is read
than the expressions: how they are evaluated is the theory's own (:mod:`unsoft.theory.signed_log`).
"""

from __future__ import annotations

from unsoft.formula import Formula

WEIGHTS = {  # up to the factors that cancel
    **dict.fromkeys(("exp", "softmax", "softmax1", "l2"), "exp(s)"),
    **dict.fromkeys(("identity", "linear-identity"), "s"),
    "relu": "max(s, 0)",
    "relu2": "max(s, 0)**2",
    "cog": "sign(s)*exp(abs(s))",
    "sinh": "(exp(s) - exp(-s))/2",
    "sigmoid": "sigmoid(s - log(n))",
}


def formula_of(mechanism: str | Formula) -> Formula:
    """The formula to integrate, of a name or as it is.

    >>> formula_of("relu").weight, formula_of("tanh").weight
    (Expr('max(s, 0)'), Expr('tanh(s)/n'))
    """
    if isinstance(mechanism, str) and mechanism in WEIGHTS:
        return Formula(WEIGHTS[mechanism])
    # Not at the top: the mechanisms stand above the theory, which needs nothing but their names.
    from unsoft.modules.registry import resolve_formula

    try:
        return resolve_formula(mechanism)
    except ValueError as problem:
        if isinstance(mechanism, str) and "is not a formula" in str(problem):
            raise ValueError(
                f"mechanism: {mechanism!r} is not a formula, so it has no weight that depends on the logit"
                " alone"
            ) from None
        raise
