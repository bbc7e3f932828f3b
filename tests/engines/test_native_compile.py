"""How the native engine compiles and caches: each test starts processes with a cache of their own."""

import errno
import json
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import unsoft
from tests.conftest import HANG
from unsoft.engines.native import compiler
from unsoft.engines.native.binding import kernel
from unsoft.engines.native.codegen import formula_source

CALLS = """
import json, sys, warnings
import torch, unsoft
torch.set_num_threads(1)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 3, 17, 8) for _ in range(3))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    results, errors = [], []
    for name in sys.argv[1:]:
        expected = unsoft.attention(q, k, v, name, engine="dense")
        for engine in ("native", "auto", "auto"):
            try:
                results.append((unsoft.attention(q, k, v, name, engine=engine), expected))
            except ValueError as error:
                errors.append(str(error))
print(json.dumps({
    "warnings": [[w.category.__name__, str(w.message)] for w in seen],
    "errors": errors,
    "close": all(torch.allclose(x, y, atol=1e-5) for x, y in results),
}))
"""
RIGHT = {"warnings": [], "errors": [], "close": True}
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'
SOURCE = str(Path(unsoft.__file__).parents[1])


@pytest.fixture(scope="module", autouse=True)
def hasty_compiler(tmp_path_factory):
    """It optimises nothing: these tests are about who compiles and when, not about speed."""
    path = script(tmp_path_factory.mktemp("bin") / "hasty-c++", f'exec {compiler.find_compiler()} "$@" -O0')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", path)
        yield path


def start(cache, *mechanisms, **environment):
    env = os.environ | {"UNSOFT_CACHE_DIR": str(cache), "PYTHONPATH": SOURCE} | environment
    command = [sys.executable, "-c", CALLS, *(mechanisms or ("cog",))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(process):
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    return json.loads(out)


def run(cache, *mechanisms, **environment):
    return finish(start(cache, *mechanisms, **environment))


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def libraries(cache):
    return sorted(cache.glob("*.so"))


def leftovers(cache):
    """Return unfinished files and locks, which a finished compilation deletes."""
    return sorted(file for file in cache.iterdir() if file.suffix in (".tmp", ".lock"))


@pytest.fixture
def logged_compiler(tmp_path, hasty_compiler):
    """A compiler that notes every call in a file, and the number of calls so far."""
    log = tmp_path / "calls"
    log.touch()
    path = script(tmp_path / "logged-c++", f'echo call >> {log}\nexec {hasty_compiler} "$@"')
    return path, lambda: len(log.read_text().splitlines())


def test_processes_that_start_at_once_compile_once_and_later_ones_only_what_is_new(tmp_path, logged_compiler):
    path, calls = logged_compiler
    cache = tmp_path / "cache"
    processes = [start(cache, CXX=path) for _ in range(2)]
    assert [finish(process) for process in processes] == [RIGHT] * 2
    assert calls() == len(libraries(cache)) == 2, "the kernel and the formula"
    assert leftovers(cache) == []
    assert run(cache, "cog", "relu", CXX=path) == RIGHT
    assert calls() == 3, "another formula shares what does not depend on the formula"


@pytest.fixture
def stuck(tmp_path):
    """A process whose two compilers never finish, after both have started, and its cache."""
    cache, started = tmp_path / "cache", tmp_path / "started"
    compiler = script(tmp_path / "endless", f"echo $$ >> {started}\nexec sleep 600")
    process = start(cache, CXX=compiler)
    while not started.exists() or len(started.read_text().split()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    yield process, cache
    process.kill()
    process.communicate()
    for pid in started.read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def test_files_of_a_killed_process_are_deleted_and_those_of_a_living_one_are_kept(stuck, monkeypatch):
    process, cache = stuck
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(cache))
    before = leftovers(cache)
    assert sorted(file.suffix for file in before) == [".lock", ".lock", ".tmp", ".tmp"]
    compiler.remove_unfinished(cache)
    assert compiler.clear_cache() == 0
    assert leftovers(cache) == before
    process.kill()
    process.communicate()
    assert len(compiler.unfinished_files()) == 2
    aged = cache / "without-a-lock.tmp"
    aged.touch()
    (library,) = compiler.load_libraries({"answer": ANSWER}, "float")
    assert library.answer() == 42
    assert leftovers(cache) == [aged], "it may belong to a process on a filesystem without locks"
    os.utime(aged, (0, 0))
    compiler.remove_unfinished(cache)
    assert leftovers(cache) == []


def test_a_filesystem_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", no_locks)
    (library,) = compiler.load_libraries({"answer": ANSWER}, "float")
    assert library.answer() == 42
    assert leftovers(tmp_path) == [] and len(libraries(tmp_path)) == 1


def test_a_holder_that_does_not_finish_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_LONGEST_WAIT", 0.2)
    stem = compiler.library_stem("answer", ANSWER, "float")
    with compiler.library_lock(tmp_path, stem, threading.Event()) as locked:
        (library,) = compiler.load_libraries({"answer": ANSWER}, "float")
        assert locked and library.answer() == 42
    assert leftovers(tmp_path) == []


WAITING = """
import signal, sys, threading
from pathlib import Path
from unsoft.engines.native import compiler
folder, source = Path(sys.argv[1]), sys.argv[2]
stem = compiler.library_stem("answer", source, "float")
with compiler.library_lock(folder, stem, threading.Event()) as locked:
    assert locked
    # Repeatedly: a KeyboardInterrupt that happens to be raised in a destructor is ignored by Python.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        compiler.load_libraries({"answer": source}, "float")
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("interrupted")
"""
FORKING = """
import os, signal, sys, threading, time
from pathlib import Path
from unsoft.engines.native import compiler
with compiler.library_lock(Path(sys.argv[1]), "answer", threading.Event()) as locked:
    assert locked
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(code, *arguments, **variables):
    env = os.environ | {"PYTHONPATH": SOURCE} | variables
    # No pipe for the forked child to keep open.
    with tempfile.TemporaryFile("w+") as out:
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code, *arguments], stdout=out, timeout=HANG, env=env)
        out.seek(0)
        return done.returncode, out.read(), time.monotonic() - begin


def test_waiting_for_a_lock_can_be_interrupted(tmp_path):
    code, out, seconds = run_script(WAITING, str(tmp_path), ANSWER, UNSOFT_CACHE_DIR=str(tmp_path))
    assert (code, out) == (0, "interrupted\n") and seconds < compiler._LONGEST_WAIT / 2


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(tmp_path):
    assert run_script(FORKING, str(tmp_path))[0] == -signal.SIGKILL
    begin = time.monotonic()
    with compiler.library_lock(tmp_path, "answer", threading.Event()) as locked:
        assert locked and time.monotonic() - begin < 10, "its child sleeps for longer"


def test_damaged_libraries_are_compiled_again(tmp_path, monkeypatch):
    """One lost half of its content, one has a wrong bit."""
    first, cache = tmp_path / "first", tmp_path / "cache"
    sources = {"answer": ANSWER, "other": ANSWER.replace("42", "43")}
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(first))
    compiler.load_libraries(sources, "float")
    shutil.copytree(first, cache)  # the process has mapped the files themselves
    half, wrong = libraries(cache)
    content = half.read_bytes()
    half.write_bytes(content[: len(content) // 2])
    content = bytearray(wrong.read_bytes())
    content[len(content) // 2] ^= 1
    wrong.write_bytes(content)
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(cache))
    assert [library.answer() for library in compiler.load_libraries(sources, "float")] == [42, 43]
    right, actual = ([file.read_bytes() for file in libraries(folder)] for folder in (first, cache))
    assert actual == right


@pytest.mark.parametrize(
    "kind",
    [
        "missing",
        pytest.param("refuses", marks=pytest.mark.slow),
        pytest.param("writes nothing", marks=pytest.mark.slow),
        "writes nonsense",
    ],
)
def test_without_a_working_compiler_auto_warns_once_and_native_raises(tmp_path, kind):
    broken = {
        "missing": "/nonexistent/c++",
        "refuses": script(tmp_path / "refuses", "echo 'error: no thanks' >&2\nexit 1"),
        "writes nothing": script(tmp_path / "writes-nothing", "exit 0"),
        "writes nonsense": script(
            tmp_path / "writes-nonsense",
            'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo nonsense > "$2"; fi; shift; done',
        ),
    }
    result = run(tmp_path / "cache", "cog", "relu", "softmax1", CXX=broken[kind])
    assert len(result["errors"]) == 3 and all("'native' is not available here" in e for e in result["errors"])
    assert [category for category, _ in result["warnings"]] == ["CompilerWarning"]
    assert "'native' is not available" in result["warnings"][0][1]
    assert result["close"], "another engine takes over"


def test_a_compiler_without_native_flags_compiles_everything_without_them(tmp_path):
    refuse = 'case " $* " in *=native*) echo "error: unknown CPU" >&2; exit 1;; esac'
    path = script(tmp_path / "old-c++", f'{refuse}\nexec {compiler.find_compiler()} "$@" -O0')
    assert run(tmp_path / "cache", CXX=path) == RIGHT


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an instruction set of x86")
def test_a_source_that_fails_with_the_flags_of_others_is_not_compiled_without_them(tmp_path, monkeypatch):
    """It would have shorter vectors than the libraries that it is used with."""
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path))
    source = f"#ifdef __SSE3__\n#error only for older CPUs\n#endif\n{ANSWER}"
    with pytest.raises(compiler.CompilationError, match="only for older CPUs"):
        compiler.load_libraries({"answer": source}, "float")


def test_cache_directory_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (library,) = compiler.load_libraries({"answer": ANSWER}, "float")
    assert library.answer() == 42


def test_cache_directory_that_can_only_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path))
    compiler.load_libraries({"answer": ANSWER}, "float")
    tmp_path.chmod(0o500)
    sources = {"answer": ANSWER, "other": ANSWER.replace("42", "43")}
    assert [library.answer() for library in compiler.load_libraries(sources, "float")] == [42, 43]
    tmp_path.chmod(0o700)


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_clang(tmp_path):
    assert run(tmp_path / "cache", "cog", "relu", CXX="clang++") == RIGHT


def test_cache_directory_and_clearing(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path))
    assert compiler.cache_directory() == tmp_path
    for name in ("a.so", "b.so", "c.tmp", "keep.txt"):
        (tmp_path / name).touch()
    assert compiler.clear_cache() == 2
    assert [file.name for file in tmp_path.iterdir()] == ["keep.txt"]
    monkeypatch.delenv("UNSOFT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_directory() == tmp_path / "unsoft"


def test_every_formula_gets_a_library_of_its_own():
    formulas = [unsoft.Formula("s/n"), unsoft.Formula("s/n", bias="logit"), unsoft.Formula("2*s/n")]
    stems = {
        compiler.library_stem("formula", formula_source(f), real)
        for f in formulas
        for real in ("float", "double")
    }
    assert len(stems) == 6


def test_equal_formulas_share_a_library():
    """A second formula object of the same content is not compiled, nor loaded, again."""
    q = torch.randn(1, 1, 4, 4)
    unsoft.attention(q, q, q, unsoft.Formula("exp(s - m)", "exp(s - m)", "s"), engine="native")
    loaded = kernel.cache_info().misses
    unsoft.attention(q, q, q, unsoft.Formula("exp(s-m)", "exp(s-m)", peak="s", name="again"), engine="native")
    assert kernel.cache_info().misses == loaded


def test_a_changed_header_makes_only_those_anew_that_include_it(tmp_path, monkeypatch):
    """arrival.h is reached through library.cpp, matmul.h through another header."""
    copy = tmp_path / "kernel"
    shutil.copytree(compiler.KERNEL, copy)
    monkeypatch.setattr(compiler, "KERNEL", copy)
    sources = {str(file.relative_to(copy)): file.read_text() for file in copy.rglob("*.cpp")}

    def stems():
        compiler._header.cache_clear()
        return {name: compiler.library_stem(name, source, "float") for name, source in sources.items()}

    for header, who in {
        "gaussian/arrival.h": {"gaussian/library.cpp"},
        "matmul.h": {
            *("gaussian/library.cpp", "density/library.cpp", "core.cpp", "rows/core.cpp", "delta.cpp"),
        },
        "simd.h": set(sources),
    }.items():
        before = stems()
        with open(copy / header, "a") as file:
            file.write("// changed\n")
        after = stems()
        assert {name for name in sources if before[name] != after[name]} == who
