"""No code is loaded that another user could have put into the folder of compiled formulas."""

import json
import os
import stat
import subprocess
import sys
import warnings

import pytest

from unsoft import cache_dir
from unsoft.cli.commands.cache import info
from unsoft.engines.native import compiler
from unsoft.errors import CacheWarning

STRANGER = 54_321
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user"
)
ANSWER = """
extern "C" __attribute__((visibility("default"))) int answer() { return 42; }
"""
PLANTED = """
#include <cstdio>
extern "C" __attribute__((visibility("default"))) int answer() { return 13; }
__attribute__((constructor)) static void planted() { std::FILE *f = std::fopen("%s", "w"); std::fclose(f); }
"""


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch, tmp_path):
    """As in a new process: nothing has been warned of, and there is no temporary folder yet."""
    monkeypatch.setattr(cache_dir, "_warned", set())
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    cache_dir.temporary_folder.cache_clear()
    yield temporary
    cache_dir.temporary_folder.cache_clear()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder of compiled code, with one library in it."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(folder))
    assert load() == 42
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library that writes the file ``proof`` when it is loaded, and that file."""
    folder = tmp_path_factory.mktemp("planted")
    source, made, proof = folder / "planted.cpp", folder / "planted.so", folder / "proof"
    source.write_text(PLANTED % proof)
    command = [compiler.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(made)]
    subprocess.run(command, check=True, timeout=120)
    return made.read_bytes(), proof


@pytest.fixture
def run_info(capsys):
    """The records of ``unsoft cache info``."""

    def run_info():
        info(as_json=True)
        return json.loads(capsys.readouterr().out)

    return run_info


def load():
    (library,) = compiler.load_libraries({"answer": ANSWER}, "float")
    return library.answer()


def plant(cache, library, *, right_digest=True):
    """Puts the library under the name of the one that is in the cache."""
    content, proof = library
    (file,) = cache.glob("*.so")
    file.unlink()
    if right_digest:
        file.write_bytes(content)
        file = file.rename(file.with_name(f"{file.stem.rpartition('-')[0]}-{compiler._digest(file)}.so"))
    file.write_bytes(content)
    file.chmod(0o700)
    return file, proof


def warned(reason):
    """Check that code of others is not loaded but compiled again elsewhere, with one warning."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert load() == load() == 42
    assert [w.category for w in seen] == [CacheWarning]
    assert reason in str(seen[0].message)
    return True


def test_the_planted_library_would_be_loaded(cache, library):
    """The tests below prove nothing if it would not run where everything is in order."""
    _, proof = plant(cache, library)
    assert load() == 13 and proof.exists()
    proof.unlink()


def test_made_for_this_user_only(monkeypatch, tmp_path):
    cache = tmp_path / "a" / "b"
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(cache))
    previous = os.umask(0o002)
    try:
        assert load() == 42
    finally:
        os.umask(previous)
    for path in (cache, cache.parent, *cache.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_folder_that_others_can_write_to(cache, library, mode):
    _, proof = plant(cache, library)
    cache.chmod(mode)
    assert warned("can be written by others") and not proof.exists()


@needs_root
def test_folder_of_somebody_else(cache, library):
    _, proof = plant(cache, library)
    os.chown(cache, STRANGER, STRANGER)
    assert warned(f"belongs to user {STRANGER}") and not proof.exists()


@needs_root
def test_library_of_somebody_else(cache, library):
    file, proof = plant(cache, library)
    os.chown(file, STRANGER, STRANGER)
    assert warned(f"belongs to user {STRANGER}") and not proof.exists()


def test_library_that_others_can_write_to(cache, library):
    file, proof = plant(cache, library)
    file.chmod(0o720)
    assert warned("can be written by others") and not proof.exists()


def test_link_to_a_library(cache, library, tmp_path):
    file, proof = plant(cache, library)
    file.rename(tmp_path / file.name)
    file.symlink_to(tmp_path / file.name)
    assert warned("is a link") and not proof.exists()


def test_wrong_digest_is_compiled_anew(cache, library):
    _, proof = plant(cache, library, right_digest=False)
    assert load() == 42 and not proof.exists()
    (file,) = cache.glob("*.so")
    assert file.stem.endswith(compiler._digest(file))


def test_folder_above_that_others_can_write_to(cache):
    cache.parent.chmod(0o1777)  # sticky: nobody else can move our folder away
    assert load() == 42
    cache.parent.chmod(0o777)
    assert warned("others can replace")


@needs_root
def test_folder_above_of_somebody_else(cache):
    os.chown(cache.parent, STRANGER, STRANGER)
    assert warned(f"{cache.parent} belongs to user {STRANGER}")


@needs_root
def test_group_of_the_folder_above(cache):
    cache.parent.chmod(0o770)
    assert cache_dir.distrust(cache, []) is None, "the private group of the user"
    os.chown(cache.parent, -1, STRANGER)
    assert "others can replace" in cache_dir.distrust(cache, [])


def test_link_to_the_folder_is_followed_once(cache, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert cache_dir.trusted_folder(link, ()) == cache.resolve()


def test_temporary_folder_is_private_and_deleted_by_its_process_only(a_process_of_its_own):
    code = """
import os
from unsoft.cache_dir import temporary_folder
folder = temporary_folder()
assert folder.stat().st_mode & 0o777 == 0o700
child = os.fork()
if child == 0:
    raise SystemExit
os.waitpid(child, 0)
assert folder.is_dir()
"""
    env = os.environ | {"TMPDIR": str(a_process_of_its_own)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=env)
    assert list(a_process_of_its_own.iterdir()) == []


def unknown_user(*_):
    raise KeyError("no such user")


@pytest.mark.parametrize("chosen", [None, "~nobody-of-this-name/x"])
def test_without_a_home_folder_one_warning_and_a_temporary_folder(
    monkeypatch, a_process_of_its_own, run_info, chosen
):
    for name in ("HOME", "XDG_CACHE_HOME", "UNSOFT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown_user)
    if chosen:
        monkeypatch.setenv("UNSOFT_CACHE_DIR", chosen)
    assert warned("home folder is not known")
    (folder,) = a_process_of_its_own.iterdir()
    assert compiler.cache_directory() == folder and run_info()[0]["folder"] == str(folder)
    assert run_info()[0]["count"] == 1


def test_no_safe_folder_at_all(cache, a_process_of_its_own):
    cache.chmod(0o777)
    a_process_of_its_own.chmod(0o777)
    with pytest.warns(CacheWarning), pytest.raises(compiler.CompilationError, match="no folder is safe"):
        load()
