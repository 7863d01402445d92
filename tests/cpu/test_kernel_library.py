"""The library of kernels: compiled once for this user alone, never loaded where it is damaged, missed with a reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.cpu import kernel_library
from fusionrl.cpu.kernel_library import CompileError, load
from tests.own_process import lives, wait_until


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(kernel_library.SWITCH, raising=False)
    return tmp_path / "cache" / "fusionrl"


def compiler(tmp_path: Path, script: str, name: str = "own-cc") -> str:
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What gcc makes of the kernels."""
    path = tmp_path_factory.mktemp("built") / "kernels.so"
    path.write_bytes(kernel_library._compiled("gcc"))
    return path


@pytest.fixture
def quick(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script of a compiler that has done its work before; it is this machine's."""
    script = f"""while [ "$1" != -o ]; do shift; done; /bin/cp {built} "$2" """
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    return script


@pytest.fixture
def no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without cc and gcc."""
    for name in ("sh", "sleep", "printf"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}" if Path("/bin", name).exists() else f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_compiled_once_for_this_user_alone(cache: Path, quick: str) -> None:
    assert load().rms_norm
    (library,) = cache.iterdir()
    before = library.stat()
    assert before.st_mode & 0o077 == 0
    load()
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    library.chmod(0o722)  # others may have written to it
    load()
    assert library.stat().st_mtime_ns != before.st_mtime_ns
    assert library.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("size", [0, 4_096, -1])
def test_a_damaged_library_is_compiled_again(cache: Path, quick: str, size: int) -> None:
    """dlopen of a file that is cut off ends the process by SIGBUS."""
    load()
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    library.write_bytes(whole[:size])
    assert load().rms_norm
    assert library.stat().st_size == len(whole)


def test_processes_that_start_together(cache: Path, quick: str) -> None:
    program = "from fusionrl.cpu.kernel_library import load; load(); print('loaded')"
    starts = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in starts] == [b"loaded\n"] * 3
    assert len(list(cache.iterdir())) == 1


def test_another_compiler_has_a_library_of_its_own(
    cache: Path, quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    monkeypatch.setenv("CC", compiler(tmp_path, quick, "another-cc"))
    load()
    assert len(list(cache.iterdir())) == 2


def test_a_compiler_that_fails_is_named_with_its_message(
    tmp_path: Path, no_others: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiler(tmp_path, "printf 'pas d\\351fini' >&2\nexit 3")  # Latin-1
    monkeypatch.setenv("CC", path)
    with pytest.raises(CompileError) as raised:
        load()
    assert str(raised.value) == f"{path}: exit status 3: pas d\N{REPLACEMENT CHARACTER}fini"


def test_a_compiler_that_hangs_ends_with_what_it_started(
    tmp_path: Path, no_others: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiler(tmp_path, f"echo begun >&2\nsleep 1000 &\necho $! > {tmp_path}/pid\nwait")
    monkeypatch.setenv("CC", path)
    monkeypatch.setattr(kernel_library, "COMPILE_LIMIT_S", 2.0)
    with pytest.raises(CompileError, match=f"^{path}: did not end within 2 s$"):
        load()
    started = int((tmp_path / "pid").read_text())
    wait_until(lambda: not lives(started))


def test_gcc_takes_the_place_of_a_compiler_that_fails(
    tmp_path: Path, no_others: None, quick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "bin", quick, "gcc")
    monkeypatch.setenv("CC", compiler(tmp_path, "echo omp.h not found >&2\nexit 1"))
    assert load().rms_norm


def test_without_a_compiler(no_others: None) -> None:
    with pytest.raises(CompileError, match="^no C compiler: install gcc$"):
        load()


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CompileError, match="Not a directory"):
        load()


def test_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_library.SWITCH, "0")
    with pytest.raises(CompileError, match="^FUSIONRL_CPU_KERNELS=0$"):
        load()
    assert not cache.exists()


def test_a_file_of_somebody_else_is_not_loaded(cache: Path, quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that gives every new file to one user."""
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(CompileError, match="is not this user's alone"):
        load()
