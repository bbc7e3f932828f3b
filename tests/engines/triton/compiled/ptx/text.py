"""One kernel as PTX text, read into instructions."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    predicate: str | None
    """The register that decides whether a thread takes part, with ! in front if it is negated."""
    name: str
    kinds: list[str]
    """Modifiers: the words after the name, separated by dots."""
    args: list[Any]
    """Register names, numbers, [address] as (name, offset), {vector} as a list."""


@dataclass
class Text:
    """Parameters (names and bits), instructions, and where labels point."""

    params: list[tuple[str, int]]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def read(text: str) -> Text:
    """Return the only entry of a PTX file."""
    head, body = re.search(r"\.entry\s+\w+\((.*?)\)(.*)", text, re.S).groups()
    params = re.findall(r"\.param \.[a-z](\d+)[^,\n]*?(\w+_param_\d+)", head)
    entry = Text([(name, int(bits)) for bits, name in params])
    for line in body.splitlines():
        line = re.sub(r"//.*", "", line).strip()
        if label := re.fullmatch(r"(\$?\w+):", line):
            entry.labels[label[1]] = len(entry.code)
        elif not line.startswith("."):
            parts = re.fullmatch(r"(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*;", line)
            if parts:
                name, *kinds = parts[2].split(".")
                entry.code.append(Instruction(parts[1], name, kinds, _operands(parts[3])))
    return entry


def _operands(text: str) -> list[Any]:
    operands: list[Any] = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text):
        part = part.strip()
        if part[0] == "{":
            operands.append([_operand(x) for x in part[1:-1].split(",")])
        elif part[0] == "[":
            base, _, offset = part[1:-1].replace(" ", "").partition("+")
            operands.append((base, int(offset or 0)))
        else:
            operands.append(_operand(part))
    return operands


def _operand(text: str) -> Any:
    text = text.strip()
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    if bits := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
        return int(bits[1] or bits[2], 16)
    return text
