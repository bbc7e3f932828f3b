"""Resources of a compiled kernel, read from its code without a GPU."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

from tests.engines.triton.targets import SHARED_KIB

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MATRIX = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma|v_wmma)\S*"
_JUMP = r"(?:BRA(?:\.\S+)?\s+(?:\S+,\s*)?`\(|s_c?branch\S*\s+)(\.L[\w.$]+)"


@dataclass(frozen=True)
class Resources:
    """Registers and spilled bytes of a thread, shared memory of a program,
    matrix instructions in the code."""

    registers: int
    spilled: int
    shared: int
    shared_limit: int
    matrix: int
    hot: tuple[Counter, ...]
    """Instructions of each innermost loop that multiplies matrices, by name."""

    @property
    def spills_in_loops(self) -> int:
        """Accesses to spilled registers in hot loops; outside of them a spill costs nothing measurable."""
        return sum(n for loop in self.hot for name, n in loop.items() if re.match(r"LDL|STL|scratch_", name))

    @property
    def instructions_in_loops(self) -> int:
        return sum(n for loop in self.hot for name, n in loop.items() if name)


def resources(made) -> Resources:
    """Return the resources of a cubin or hsaco that Triton compiled."""
    arch = made.metadata.target.arch
    text = made.asm["ptx"] if "ptx" in made.asm else made.asm["amdgcn"]
    if "cubin" in made.asm:
        usage = _tool("cuobjdump", "--dump-resource-usage", made.asm["cubin"])
        usage_by_kind = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        registers, spilled = usage_by_kind["REG"], usage_by_kind["STACK"] + usage_by_kind["LOCAL"]
    else:
        counts = re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)
        usage_by_kind = {key: int(value) for key, value in counts}
        registers, spilled = usage_by_kind["vgpr_count"], 4 * usage_by_kind["vgpr_spill_count"]
    return Resources(
        registers,
        spilled,
        made.metadata.shared,
        SHARED_KIB[arch if isinstance(arch, str) else f"sm_{arch}"] << 10,
        len(re.findall(_MATRIX, text)),
        hot_loops(machine_code(made)),
    )


def machine_code(made) -> str:
    """Assembly: SASS of a cubin, or what the AMD compiler printed."""
    return _tool("nvdisasm", "-c", made.asm["cubin"]) if "cubin" in made.asm else made.asm["amdgcn"]


def hot_loops(code: str) -> tuple[Counter, ...]:
    """Return the innermost loops that multiply matrices, identified by their backward jumps."""
    lines, labels, loops = code.splitlines(), {}, []
    for at, line in enumerate(lines):
        if label := re.match(r"\s*(\.L\S+):", line):
            labels[label[1]] = at
        elif (jump := re.search(_JUMP, line)) and labels.get(jump[1], at) < at - 8:
            loops.append((labels[jump[1]], at))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [Counter(_instruction(line) for line in lines[begin : end + 1]) for begin, end in inner]
    return tuple(loop for loop in bodies if any(re.search(r"MMA|mfma|wmma", name) for name in loop))


def _instruction(line: str) -> str:
    nvidia = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
    match = nvidia or re.match(r"\t([a-z]\w+)", line)
    return match[1] if match else ""


def _tool(name: str, option: str, code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run(
            [TOOLS / name, option, file.name], capture_output=True, text=True, check=True
        ).stdout
