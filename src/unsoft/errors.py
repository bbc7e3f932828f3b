"""Every exception and warning that unsoft raises on purpose, so that a caller can catch them by name."""


def one_line(error: BaseException) -> str:
    """Return an exception as one line, short enough to be part of a message.

    >>> one_line(OSError("no such\\n  file"))
    'OSError: no such file'
    """
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class UnsoftWarning(UserWarning):
    """Base of all warnings raised by unsoft."""


class CompilerWarning(UnsoftWarning):
    """Code of the engine 'native' or 'triton' cannot be compiled here;
    ``engine="auto"`` computes the same results by a slower engine."""


class CacheWarning(UnsoftWarning):
    """The cache folder is not used: others could have put code into it, or there is no home folder.
    A temporary folder takes its place, and formulas are compiled again."""


class FormulaError(ValueError):
    """A formula is not well formed: its text, its symbols, or its behaviour."""


class MechanismError(AssertionError):
    """A mechanism broke a property of the contract battery, :func:`unsoft.testing.check_mechanism`."""


class SolverError(ArithmeticError):
    """A linear system was not solved to the requested accuracy; the message contains the residual and what
    helps."""


class ConvergenceWarning(UnsoftWarning):
    """A linear system inside a gradient was not solved to the requested accuracy."""


class PluginWarning(UnsoftWarning):
    """A package that brings mechanisms (entry points ``unsoft.mechanisms``) could not be loaded;
    the others are there."""


class DivergenceError(ArithmeticError):
    """The loss of a training run is not a number any more; checkpoints from before are kept."""


class Interrupted(KeyboardInterrupt):
    """A training run was stopped by Ctrl-C or SIGTERM, after it had saved itself;
    the same call resumes it."""
