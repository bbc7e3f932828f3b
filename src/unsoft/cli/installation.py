"""What ``unsoft doctor`` says about an installation: what is there, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import asdict, dataclass
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
"""Of a CPU, as far as the compiled kernels gain from them."""


@dataclass(frozen=True)
class Fact:
    """One line of the report."""

    what: str
    found: str
    advice: str = ""
    """How to get what is missing; nothing if nothing is."""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def facts() -> list[Fact]:
    """Everything about this machine that decides what unsoft can do on it."""
    from unsoft.lab.bench.machine import machine, versions

    found = [
        Fact(name, version) for name, version in versions().items() if name in ("unsoft", "python", "torch")
    ]
    found += [
        Fact("machine", machine()),
        Fact("CPU features", _cpu_features()),
        _compiler(versions()["compiler"]),
    ]
    return [
        *found,
        *_gpus(),
        *engines("cpu"),
        *(engines("cuda") if _has_gpu() else []),
        *_packages(),
        _cache(),
    ]


def gpu_problem(device: str = "cuda") -> str | None:
    """Why the engine 'triton' cannot run here at all; None if it can."""
    from unsoft.engines.triton.availability import failure, missing

    if device == "cuda" and not _has_gpu():
        return "torch sees no GPU; see unsoft doctor"
    return missing(device, None) or failure(device, None)


def engines(device: str) -> list[Fact]:
    """Which engines run a plain call of a formula on a device."""
    import torch

    from unsoft.engines import POINTWISE
    from unsoft.engines.arguments import checked_call
    from unsoft.modules.registry import resolve

    x = torch.zeros(1, 1, 16, 16, device=device)
    formula = resolve("softmax")
    call = checked_call(x, x, x, formula)[0]  # type: ignore[arg-type]
    found = []
    for engine in POINTWISE.engines:
        reason = engine.supports(call) or engine.unavailable(call)
        found.append(
            Fact(f"engine {engine.name} on {device}", "available" if reason is None else f"no: {reason}")
        )
    return found


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus() -> list[Fact]:
    import torch

    if not _has_gpu():
        build = torch.version.cuda or torch.version.hip
        advice = "" if build else "this torch is a CPU build; see pytorch.org for one with CUDA or ROCm"
        return [Fact("GPUs", "none", advice)]
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        text = f"{about.name}, capability {capability}, {about.total_memory / 2**30:.0f} GB"
        found.append(Fact(f"GPU {index}", text))
    return found


def _cpu_features() -> str:
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "unknown"
    return ", ".join(feature for feature in _FEATURES if feature in words) or "none of those that help"


def _compiler(found: str) -> Fact:
    advice = "install g++ or clang++, or set CXX: without one the slower engine 'tiled' runs"
    return Fact("C++ compiler", found, advice if found == "none" else "")


def _packages() -> list[Fact]:
    found = []
    for package, extra in _PACKAGES.items():
        try:
            found.append(Fact(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Fact(package, "not installed", f"pip install 'unsoft[{extra}]'"))
    return found


def _cache() -> Fact:
    from unsoft.cache_dir import cache_directory

    folder = cache_directory()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(place, os.W_OK)
    advice = "" if writable else "set UNSOFT_CACHE_DIR to a folder that you can write to"
    return Fact("cache folder", f"{folder}{'' if writable else ' (not writable)'}", advice)
