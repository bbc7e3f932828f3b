"""Finds the system's C++ compiler and turns source into a shared library, cached on disk.

The cache key covers the source, every kernel header it includes, the compiler's identity and the CPU's
features, so a cached library is never used elsewhere. A library is written aside and renamed
into place, so no process sees half a file.

One process compiles a library while others wait for its lock: ``flock`` on ``<library>.lock`` in the cache
folder. The system releases it when its holder ends, also after ``kill -9``. The holder deletes the file, so
lock files do not accumulate. No result depends on a lock. Where there are none (some network filesystems,
Windows) or the holder takes too long, a library is compiled without a lock, at worst twice.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from unsoft.cache_dir import cache_directory, files_in, temporary_folder, trusted_folder
from unsoft.files import UNFINISHED

KERNEL = Path(__file__).parent / "kernel"
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_SECONDS = 300
_LOCK = ".lock"
_LONGEST_WAIT = 120.0
_SECONDS_BETWEEN_TRIES = 0.05
_STALE_AFTER = 3600.0
"""Seconds until an unfinished file without a lock counts as abandoned; compilers are stopped earlier."""
_held: set[int] = set()
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class CompilationError(RuntimeError):
    """No usable compiler, or it failed; the message is one line for the user."""


def clear_cache() -> int:
    """Delete the compiled libraries of :func:`cache_directory`; return how many there were."""
    libraries = list(cache_directory().glob("*.so"))
    for library in libraries:
        library.unlink(missing_ok=True)
    remove_unfinished(cache_directory(), stale_after=0)
    return len(libraries)


def unfinished_files() -> list[Path]:
    """Return the files that are being compiled now, and those that killed processes left behind."""
    return list(cache_directory().glob(f"*{UNFINISHED}"))


def load_libraries(sources: dict[str, str], real: str) -> list[ctypes.CDLL]:
    """Return shared libraries of several sources (name -> text) for ``real`` = "float" or "double".

    Those that are not in the cache are compiled side by side.
    """
    stems = {name: library_stem(name, source, real) for name, source in sources.items()}
    try:
        return _load(sources, real, stems)
    except OSError as error:
        raise CompilationError(f"compiled code can neither be kept nor loaded: {error}") from None


def _load(sources: dict[str, str], real: str, stems: dict[str, str]) -> list[ctypes.CDLL]:
    beginnings = tuple(f"{stem}-" for stem in stems.values())
    folder = trusted_folder(cache_directory(), beginnings)
    files = files_in(folder, beginnings)
    libraries = {name: _cached(files, stem) for name, stem in stems.items()}
    missing = [name for name, library in libraries.items() if library is None]
    if missing:
        folder = folder if os.access(folder, os.W_OK) else temporary_folder()
        remove_unfinished(folder)
        cancelled = threading.Event()

        def compiled(name: str) -> ctypes.CDLL:
            return _compiled_by_one(sources[name], real, folder, stems[name], cancelled)

        with ThreadPoolExecutor(len(missing)) as pool:
            try:
                libraries.update(zip(missing, pool.map(compiled, missing), strict=True))
            except BaseException:
                cancelled.set()  # or leaving the pool would wait for those that wait for a lock
                raise
    return [library for library in libraries.values() if library is not None]


def _cached(files: list[Path], stem: str) -> ctypes.CDLL | None:
    for library in (file for file in files if file.name.startswith(f"{stem}-")):
        with suppress(FileNotFoundError):  # deleted meanwhile, by "unsoft cache clear"
            # Loading a damaged library can crash the whole process, so the name contains the digest.
            if library.stem.endswith(f"-{_digest(library)}"):
                return ctypes.CDLL(str(library))
            library.unlink()
    return None


def library_stem(name: str, source: str, real: str) -> str:
    """Return the beginning of the file name of a library, with a hash of all that its content depends on."""
    texts = (source, real, _environment_key(), *_included_headers(source, KERNEL))
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return f"{name}-{key[:32]}"


def _included_headers(source: str, folder: Path) -> list[str]:
    """Return the headers in the kernel's folder that a source includes, also through others, in a fixed
    order."""
    texts: dict[str, str] = {}
    waiting = [(str(folder), name) for name in _INCLUDE.findall(source)]
    while waiting:
        beside, name = waiting.pop()
        candidates = (os.path.normpath(os.path.join(parent, name)) for parent in (beside, folder))
        path = next(path for path in candidates if _header(path) is not None)
        if path not in texts and (header := _header(path)) is not None:
            texts[path], others = header
            waiting += [(os.path.dirname(path), other) for other in others]
    return [texts[path] for path in sorted(texts)]


@cache  # of a few files, each of which several sources include
def _header(path: str) -> tuple[str, list[str]] | None:
    """Return the text of a header and what it includes; None if there is no such file."""
    try:
        with open(path) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    return text, _INCLUDE.findall(text)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


@cache
def find_compiler() -> str:
    """Return the path of the C++ compiler: ``$CXX`` if set, else the first of g++, clang++ and c++."""
    chosen = os.environ.get("CXX")
    for candidate in (chosen,) if chosen else _COMPILERS:
        if path := shutil.which(candidate):
            return path
    what = (
        f"CXX={chosen} is not an executable" if chosen else f"none of {', '.join(_COMPILERS)} is on the path"
    )
    raise CompilationError(f"no C++ compiler found: {what}")


@cache
def _environment_key() -> str:
    compiler = Path(find_compiler()).resolve()
    stat = compiler.stat()
    return "\0".join([str(compiler), str(stat.st_size), str(stat.st_mtime_ns), _cpu_features()])


def _cpu_features() -> str:
    try:
        with open("/proc/cpuinfo") as file:  # the first core's entry says it all, and the file can be long
            text = file.read(8192)
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        sorted({line for line in text.splitlines() if line.startswith(("flags", "Features", "CPU part"))})
    )


def _compiled_by_one(
    source: str, real: str, folder: Path, stem: str, cancelled: threading.Event
) -> ctypes.CDLL:
    """Return the library, compiled here or by the process that held its lock first."""
    with library_lock(folder, stem, cancelled) as locked:
        library = _cached(files_in(folder, (f"{stem}-",)), stem)
        # The name tells remove_unfinished which lock protects the file.
        return library or _compile(source, real, folder, stem, prefix=f"{stem}." if locked else "")


def _compile(source: str, real: str, folder: Path, stem: str, prefix: str) -> ctypes.CDLL:
    descriptor, path = tempfile.mkstemp(suffix=UNFINISHED, prefix=prefix, dir=folder)
    os.close(descriptor)
    unfinished = Path(path)
    try:
        _run_compiler(source, real, path)
        unfinished.chmod(0o700)  # linkers make a new file, with the rights that the umask leaves
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        library = folder / f"{stem}-{_digest(unfinished)}.so"
        os.replace(unfinished, library)
    finally:
        unfinished.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        library.unlink(missing_ok=True)
        raise CompilationError(
            f"the C++ compiler {find_compiler()} made no usable library: {error}"
        ) from None


def _run_compiler(source: str, real: str, output: str) -> None:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    options = [f"-DUNSOFT_REAL={real}", f"-I{KERNEL}"]
    reason = ""
    # From the best to what every compiler takes: Apple's clang has no OpenMP,
    # some virtual machines no -march=native.
    for flags in ((native, "-fopenmp"), (native, "-pthread"), ("-pthread",)):
        error = _compiler_error(source, output, [*options, *flags])
        if error is None:
            return
        reason = reason or error
        # Other flags mean other vectors. Core and formula share structures that depend on their length, so a
        # source that fails with flags that all others are compiled with must not be compiled without them.
        if _accepts(flags):
            break
    raise CompilationError(f"the C++ compiler {find_compiler()} failed: {reason}")


@cache
def _accepts(flags: tuple[str, ...]) -> bool:
    """Return whether the compiler makes a library of an empty source with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        return _compiler_error("", os.path.join(folder, "empty.so"), list(flags)) is None


def _compiler_error(source: str, output: str, options: list[str]) -> str | None:
    """Compile a source; return the line of the compiler's output that says what is wrong, or None."""
    command = [find_compiler(), *"-x c++ - -std=c++17 -O2 -fno-math-errno -fPIC -shared".split()]
    command += ["-fvisibility=hidden", "-o", output, *options]
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilationError(f"the C++ compiler {command[0]} does not run: {error}") from None
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines()
    return next((line for line in lines if "error" in line), done.stderr.strip()[:200])


@contextmanager
def library_lock(folder: Path, stem: str, cancelled: threading.Event) -> Iterator[bool]:
    """Hold the lock of a library; yield False if there are no locks here or its holder does not finish.

    Raise InterruptedError once ``cancelled`` is set: signals do not reach threads that wait.
    """
    path = folder / f"{stem}{_LOCK}"
    descriptor = _wait_for(path, cancelled)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _release(descriptor, path)


def remove_unfinished(folder: Path, *, stale_after: float = _STALE_AFTER) -> None:
    """Delete what killed processes left in the folder: lock files and unfinished libraries.

    Files of a process that holds a lock stay. Those that were written without a lock are deleted
    ``stale_after`` seconds after their last change.
    """
    for path in folder.glob(f"*{_LOCK}"):
        with suppress(OSError):  # another process holds the lock, or there are no locks here
            descriptor = _take(path)
            try:
                for file in folder.glob(f"{path.stem}.*{UNFINISHED}"):
                    file.unlink(missing_ok=True)
            finally:
                _release(descriptor, path)
    for file in folder.glob(f"*{UNFINISHED}"):
        is_locked = (folder / f"{file.name.partition('.')[0]}{_LOCK}").exists()
        with suppress(OSError):  # deleted by another process
            if not is_locked and time.time() - file.stat().st_mtime >= stale_after:
                file.unlink()


def _wait_for(path: Path, cancelled: threading.Event) -> int | None:
    # flock could wait by itself, but nothing would interrupt it in a thread, nor end it after a while.
    deadline = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < deadline:
        try:
            return _take(path)
        except BlockingIOError:
            if cancelled.wait(_SECONDS_BETWEEN_TRIES):
                raise InterruptedError(f"interrupted while waiting for {path}") from None
        except OSError:
            return None
    return None


def _take(path: Path) -> int:
    """Return the descriptor of the lock file, locked.

    Raise BlockingIOError if it is held, another OSError if this filesystem has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(descriptor)
        if not _is_same_file(descriptor, path):  # its last holder deleted it after it was opened here
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    _held.add(descriptor)
    return descriptor


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError("no file locks") from error
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release(descriptor: int, path: Path) -> None:
    import fcntl

    # Deleted before it is released: whoever opens the file later makes a new one.
    if _is_same_file(descriptor, path):
        path.unlink(missing_ok=True)
    _held.discard(descriptor)
    # Explicitly: a child that was forked a moment ago may have the file open, too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _after_fork() -> None:
    """Let go of the parent's locks: the child would keep them if the parent were killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
