"""Parses formula text. This is the whole grammar, and nothing is ever executed:

    value      :=  term  (("+" | "-") term)*
    term       :=  factor  (("*" | "/") factor)*
    factor     :=  ("+" | "-") factor  |  atom ["**" factor]
    atom       :=  number  |  symbol  |  "(" value ")"  |  function "(" value ("," value)* ")"
                |  "where" "(" value comparison value "," value "," value ")"
    comparison :=  "<" | "<=" | ">" | ">=" | "==" | "!="

>>> parse("where(s > 0, s**2, 0) / n")
Expr('where(s > 0, s**2, 0)/n')
>>> parse("exq(s)")  # doctest: +ELLIPSIS
Traceback (most recent call last):
unsoft.errors.FormulaError: formula: unknown function 'exq'; did you mean 'exp'?
    exq(s)
    ^
allowed: numbers, + - * / **, comparisons inside where(condition, a, b), exp log ... and the names i j m n s
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, reduce
from typing import Any, NamedTuple

from unsoft.checks import did_you_mean, shortened
from unsoft.errors import FormulaError
from unsoft.formula.expr import Expr, make, number, symbol
from unsoft.formula.operation import COMPARISONS, FUNCTIONS

SYMBOLS = ("s", "m", "n", "i", "j")
MAX_LENGTH = 2000
MAX_DEPTH = 64
MAX_NODES = 2000
MAX_EXPONENT = 64
_COMPARE = dict(zip(("<", "<=", ">", ">=", "==", "!="), COMPARISONS, strict=True))
_SUMS = {"+": "add", "-": "sub"}
_PRODUCTS = {"*": "mul", "/": "div"}
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<mark>\*\*|<=|>=|==|!=|[-+*/(),<>])"
)
_HINTS = {
    "^": "powers are written with **",
    "=": "equality is written with ==",
    ".": "attributes do not exist in formulas",
    "'": "text does not exist in formulas",
    '"': "text does not exist in formulas",
    "[": "only round brackets are allowed",
    "{": "only round brackets are allowed",
    "|": "the absolute value is written abs(s)",
    "%": "there is no remainder in formulas",
    "\u2212": "minus is written -",
    **dict.fromkeys("\u00b7\u00d7\u2217\u22c5", "a product is written with *"),
    **dict.fromkeys("\u00b2\u00b3", "powers are written with **"),
    "\u221a": "the square root is written sqrt(s)",
    "\u03c3": "the sigmoid is written sigmoid(s)",
}
_WORDS = {
    "if": "write where(condition, a, b)",
    "and": "nest where(...) instead",
    "or": "nest where(...) instead",
    "not": "turn the comparison around",
    "lambda": "a formula is an expression of its symbols",
    "ln": "the logarithm is written log(...)",
    "pow": "powers are written with **",
    **dict.fromkeys(("silu", "SiLU", "swish"), "it is written s*sigmoid(s)"),
    **dict.fromkeys(("gelu", "GELU", "GeLU"), "it is written s*(1 + erf(s/sqrt(2)))/2"),
    "softmax": 'it is written exp(s) with normalise="sum"',
}


_LOGIT = ("x", "logit", "score", "qk")


class Token(NamedTuple):
    """A piece of formula text; ``kind`` is "number", "name", "mark" or "end"."""

    kind: str
    text: str
    column: int

    @property
    def shown(self) -> str:
        return repr(self.text) if self.text else "the end"


def tokenize(source: str, argument: str = "formula") -> list[Token]:
    """Return all tokens of a formula text, closed by one of kind "end".

    >>> [(token.kind, token.text) for token in tokenize("2*exp")]
    [('number', '2'), ('mark', '*'), ('name', 'exp'), ('end', '')]
    """
    tokens, column = [], 0
    while column < len(source):
        match = _TOKEN.match(source, column)
        if match is None:
            raise error_at(column, _describe(source[column]), source, argument)
        if match.lastgroup != "space":
            tokens.append(Token(match.lastgroup or "", match.group(), column))
        column = match.end()
    return [*tokens, Token("end", "", len(source))]


def error_at(column: int, problem: str, source: str, argument: str) -> FormulaError:
    """Return an error that shows the text with a caret under the problem; long texts are cut around it.

    >>> print(error_at(4, "unknown name 'x'", "s + x", "weight"))
    weight: unknown name 'x'
        s + x
            ^
    """
    line = re.sub(r"[^ -~]", lambda c: c.group() if c.group().isprintable() else " ", source)
    start = max(0, column - 60)
    shown = line[start : start + 100]
    lead, tail = ("..." if start else ""), ("..." if start + 100 < len(line) else "")
    caret = " " * (len(lead) + column - start) + "^"
    return FormulaError(f"{argument}: {problem}\n    {lead}{shown}{tail}\n    {caret}")


def _describe(character: str) -> str:
    hint = _HINTS.get(character)
    if ord(character) < 128:
        return f"unexpected {character!r}" + (f": {hint}" if hint else "")
    name = unicodedata.name(character, "a character without a name")
    hint = hint or "formulas are plain ASCII"
    return f"unexpected {character!r} (U+{ord(character):04X}, {name}): {hint}"


def parse(
    source: str,
    symbols: Iterable[str] = SYMBOLS,
    *,
    argument: str = "formula",
    hints: Mapping[str, str] | None = None,
) -> Expr:
    """Return the expression of a formula text, in which only the given symbol names may occur.

    ``argument`` is the name used in error messages; ``hints`` explain names that a user might expect but that
    are not allowed here. Raises a FormulaError that points at the problem.
    """
    if not isinstance(source, str):
        raise TypeError(f"{argument}: expected formula text (str), not {type(source).__name__}")
    if len(source) > MAX_LENGTH:
        raise FormulaError(
            f"{argument}: the text has {len(source)} characters; at most {MAX_LENGTH} are allowed"
        )
    allowed = tuple(sorted(symbols))
    try:
        return _Parser(source, allowed, argument, {**_WORDS, **(hints or {})}).whole()
    except FormulaError as problem:
        raise FormulaError(f"{problem}\n{_allowed(allowed)}") from None


@lru_cache(maxsize=1024)
def reread(text: str) -> Expr:
    """Return the expression that printed ``text``: no limits and any names, since the text is our own."""
    names = tuple(set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text)) - FUNCTIONS.keys())
    return _Parser(text, names, "formula", _WORDS, limited=False).whole()


def _allowed(symbols: tuple[str, ...]) -> str:
    return (
        "allowed: numbers, + - * / **, comparisons inside where(condition, a, b), "
        f"{' '.join(FUNCTIONS)}, and the names {' '.join(symbols)}"
    )


class _Parser:
    """Recursive descent; ``depth`` bounds the recursion and ``nodes`` the size of what is built."""

    def __init__(
        self,
        source: str,
        symbols: tuple[str, ...],
        argument: str,
        hints: Mapping[str, str],
        limited: bool = True,
    ) -> None:
        self.source, self.symbols, self.argument = source, symbols, argument
        self.hints, self.limited = hints, limited
        self.tokens = tokenize(source, argument)
        self.next = self.depth = self.nodes = 0

    def whole(self) -> Expr:
        if self.peek.kind == "end":
            raise self.wrong("the formula is empty")
        value = self.value()
        if self.peek.kind != "end":
            raise self.wrong(self.leftover(self.peek))
        return value

    @property
    def peek(self) -> Token:
        return self.tokens[self.next]

    def take(self) -> Token:
        token = self.peek
        self.next += 1
        return token

    def wrong(self, problem: str, token: Token | None = None) -> FormulaError:
        return error_at((token or self.peek).column, problem, self.source, self.argument)

    def expect(self, mark: str, why: str) -> None:
        if self.peek.text in self.hints or self.peek.text in _COMPARE:
            raise self.wrong(self.leftover(self.peek))
        if self.peek.text != mark:
            raise self.wrong(f"expected {mark!r} {why}, found {self.peek.shown}")
        self.take()

    def build(self, token: Token, op: str, *args: Expr) -> Expr:
        self.nodes += 1
        if self.limited and self.nodes > MAX_NODES:
            raise self.wrong(f"the formula has more than {MAX_NODES} parts", token)
        if self.limited and op == "pow" and abs(args[1].constant or 0) > MAX_EXPONENT:
            raise self.wrong(
                f"the exponent {args[1].constant:g} is too large; at most {MAX_EXPONENT} is allowed", token
            )
        return self.pointing(token, make, op, *args)

    def pointing(self, token: Token, construct: Callable[..., Expr], *args: Any) -> Expr:
        """Return ``construct(*args)``; an error points at the token."""
        try:
            return construct(*args)
        except FormulaError as problem:
            raise self.wrong(str(problem), token) from None

    def value(self) -> Expr:
        return self.chain(_SUMS, self.term)

    def term(self) -> Expr:
        return self.chain(_PRODUCTS, self.factor)

    def chain(self, operators: Mapping[str, str], operand: Callable[[], Expr]) -> Expr:
        left = operand()
        while self.peek.text in operators:
            token = self.take()
            left = self.build(token, operators[token.text], left, operand())
        return left

    def factor(self) -> Expr:
        self.depth += 1
        if self.limited and self.depth > MAX_DEPTH:
            raise self.wrong(f"the formula is nested more than {MAX_DEPTH} levels deep")
        token = self.peek
        if token.text in _SUMS:
            self.take()
            inner = self.factor()
            result = inner if token.text == "+" else self.build(token, "neg", inner)
        else:
            result = self.atom()
            if self.peek.text == "**":
                token = self.take()
                result = self.build(token, "pow", result, self.factor())
        self.depth -= 1
        return result

    def atom(self) -> Expr:
        token = self.take()
        if token.kind == "number":
            return self.pointing(token, number, float(token.text))
        if token.kind == "name":
            return self.call(token) if self.peek.text == "(" else self.symbol(token)
        if token.text == "(":
            inner = self.value()
            self.expect(")", "to close the bracket")
            return inner
        raise self.wrong(f"expected a number, a symbol, a function or '(', found {token.shown}", token)

    def symbol(self, token: Token) -> Expr:
        if token.text in self.symbols:
            return symbol(token.text)
        if token.text in FUNCTIONS:
            raise self.wrong(f"{token.text} is a function: write {token.text}(...)", token)
        raise self.wrong(self.unknown("name", token.text, (*self.symbols, *FUNCTIONS)), token)

    def call(self, token: Token) -> Expr:
        name = token.text
        if name in self.symbols and name not in FUNCTIONS:
            raise self.wrong(f"{name} is not a function; a product is written {name}*(...)", token)
        if name not in FUNCTIONS:
            raise self.wrong(self.unknown("function", name, tuple(FUNCTIONS)), token)
        self.take()
        args = [self.condition() if name == "where" else self.value()]
        while self.peek.text == ",":
            self.take()
            args.append(self.value())
        self.expect(")", f"to close {name}(")
        return self.apply(token, args)

    def apply(self, token: Token, args: list[Expr]) -> Expr:
        arity, many = FUNCTIONS[token.text], token.text in ("max", "min")
        if len(args) != arity and not (many and len(args) > arity):
            expected = f"at least {arity}" if many else str(arity)
            raise self.wrong(f"{token.text} takes {expected} argument(s), not {len(args)}", token)
        if not many:
            return self.build(token, token.text, *args)
        return reduce(lambda a, b: self.build(token, token.text, a, b), args)

    def condition(self) -> Expr:
        left = self.value()
        if self.peek.text not in _COMPARE:
            raise self.wrong("the first argument of where must be a comparison, such as s > 0")
        token = self.take()
        return self.build(token, _COMPARE[token.text], left, self.value())

    def leftover(self, token: Token) -> str:
        if token.text in _COMPARE:
            return "a comparison is only allowed as the condition of where(condition, a, b); no chains"
        if token.text in self.hints:
            return f"unexpected {token.text!r}: {self.hints[token.text]}"
        if token.kind in ("name", "number") or token.text == "(":
            return f"unexpected {token.text!r}: an operator is missing before it (a product is written 2*s)"
        return f"unexpected {token.text!r}"

    def unknown(self, kind: str, name: str, known: tuple[str, ...]) -> str:
        if name in self.hints:
            return f"unexpected {name!r}: {self.hints[name]}"
        if name in _LOGIT:
            return f"unknown {kind} {name!r}; the logit is written s"
        hint = did_you_mean(name, known, cutoff=0.55) or did_you_mean(name.lower(), known, cutoff=0.55)
        return f"unknown {kind} {shortened(name)!r}{hint}"
