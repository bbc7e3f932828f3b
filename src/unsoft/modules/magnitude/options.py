"""What the options of the mechanism may be."""

from __future__ import annotations

from unsoft.magnitude.solver import solver_names

WHERE = ("values", "mass")
CAUSAL = ("auto", "arrival", "prefix", "streaming")
STARTS = {"plain": (1.0, 0.0), "open": (0.0, 9.0)}
"""beta and gamma. Open: beta is 0, so no key, however placed, moves the gate from sigmoid(9) = 0.9999; it
learns from there.
"""


def check_choices(**chosen: str) -> None:
    """ValueError unless each option is one of those there are."""
    known = {"where": WHERE, "causal": CAUSAL, "solver": solver_names(), "start": tuple(STARTS)}
    for name, value in chosen.items():
        if value not in known[name]:
            raise ValueError(
                f"magnitude: argument '{name}' must be one of {', '.join(known[name])}, not {value!r}"
            )


def check_counts(**counts: int) -> None:
    """ValueError unless each option is a whole number of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"magnitude: argument '{name}' must be a whole number of at least 1, not {count!r}"
            )
