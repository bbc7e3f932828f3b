"""Facts about an installation for ``unsoft doctor``: present, missing, and how to install it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = {
    "triton": "gpu",
    "transformers": "hf",
    "altair": "report",
    "vl-convert-python": "report",
    "x-transformers": "bench",
    "ray": "cluster",
    "scikit-learn": "tasks",
}
"""Optional packages and the extra that brings them."""
_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""CPU features that make the compiled kernels faster."""


@dataclass(frozen=True)
class Fact:
    """One line of the report."""

    what: str
    found: str
    advice: str = ""
    """Command that installs what is missing, or ""."""


def facts() -> list[Fact]:
    """Return everything about this machine that decides what unsoft can do on it."""
    from unsoft.lab.bench.machine import machine, versions

    known = versions()
    return [
        *(Fact(name, known[name]) for name in ("unsoft", "python", "torch")),
        Fact("machine", machine()),
        Fact("CPU features", _cpu_features()),
        _compiler(known["compiler"]),
        *_gpus(),
        *engines("cpu"),
        *(engines("cuda") if _has_gpu() else []),
        *_packages(),
        _cache(),
    ]


def gpu_problem(device: str = "cuda") -> str | None:
    """Return why the engine 'triton' cannot run here, or None if it can."""
    from unsoft.engines.triton.availability import failure, missing

    if device == "cuda" and not _has_gpu():
        return "torch sees no GPU; see unsoft doctor"
    return missing(device, None) or failure(device, None)


def engines(device: str) -> list[Fact]:
    """Return, for each engine, whether it runs a plain call of a formula on a device."""
    import torch

    from unsoft.engines import POINTWISE
    from unsoft.engines.arguments import checked_call
    from unsoft.modules.registry import resolve

    x = torch.zeros(1, 1, 16, 16, device=device)
    formula = resolve("softmax")
    call = checked_call(x, x, x, formula)[0]  # type: ignore[arg-type]
    facts = []
    for engine in POINTWISE.engines:
        reason = engine.unsupported_reason(call) or engine.unavailable_reason(call)
        facts.append(
            Fact(f"engine {engine.name} on {device}", "available" if reason is None else f"no: {reason}")
        )
    return facts


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus() -> list[Fact]:
    import torch

    if not _has_gpu():
        build = torch.version.cuda or torch.version.hip
        advice = "" if build else "this torch is a CPU build; see pytorch.org for one with CUDA or ROCm"
        return [Fact("GPUs", "none", advice)]
    facts = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        text = f"{about.name}, capability {capability}, {about.total_memory / 2**30:.0f} GB"
        facts.append(Fact(f"GPU {index}", text))
    return facts


def _cpu_features() -> str:
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "unknown"
    return ", ".join(feature for feature in _FEATURES if feature in flags) or "none of those that help"


def _compiler(version: str) -> Fact:
    advice = "install g++ or clang++, or set CXX: without one the slower engine 'tiled' runs"
    return Fact("C++ compiler", version, advice if version == "none" else "")


def _packages() -> list[Fact]:
    from unsoft.lab.bench.machine import MISSING, package_versions

    known = package_versions(*_PACKAGES)
    missing = {name: f"pip install 'unsoft[{_PACKAGES[name]}]'" for name in known if known[name] == MISSING}
    return [Fact(name, known[name], missing.get(name, "")) for name in _PACKAGES]


def _cache() -> Fact:
    from unsoft.cache_dir import cache_directory

    folder = cache_directory()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(nearest, os.W_OK)
    advice = "" if writable else "set UNSOFT_CACHE_DIR to a folder that you can write to"
    return Fact("cache folder", f"{folder}{'' if writable else ' (not writable)'}", advice)
