"""Run the engine on the CPU with the PTX compiled for an NVIDIA GPU, instruction by instruction."""

from contextlib import contextmanager
from unittest import mock

from tests.engines.triton.compiled.ahead import compile_launch, pretending
from tests.engines.triton.compiled.ptx.launch import run
from unsoft.engines.triton import availability
from unsoft.engines.triton.launch import Launch, TileSizes


@contextmanager
def emulated(sizes: TileSizes | dict[str, TileSizes], target: str = "sm_80"):
    """Compile launches for the target and run them on the CPU. Yield the list of kernels that ran."""
    done: list[str] = []

    def start(launch: Launch) -> None:
        # these end at once where all numbers are finite, and the interpreter runs them
        if launch.only_for_nan:
            return
        named = sizes[launch.name] if isinstance(sizes, dict) else sizes
        chosen = launch.sizes[0] if launch.sizes else named
        run(compile_launch(launch, chosen), launch.complete(chosen), launch.grid(chosen))
        done.append(launch.name)

    with (
        pretending(target, start),
        mock.patch.object(availability, "missing", lambda device, index: None),
        mock.patch.object(availability, "failure", lambda device, index: None),
    ):
        yield done
