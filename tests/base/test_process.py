"""What a process sets of itself: freed memory that is kept or given back, and its limit of open files."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fusionrl.base import process
from tests.own_process import run_code

PROGRAM = """
import ctypes, mmap, sys
from fusionrl.base.process import give_freed_back, keep_freed

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

if "keep" in sys.argv:
    keep_freed(2**30)
size, libc = 24 * 2**20, ctypes.CDLL(None)  # as large as every version of glibc keeps
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = resident()
blocks = [libc.malloc(size) for _ in range(8)]
for block in blocks:
    ctypes.memset(block, 1, size)
used = resident() - before
for block in blocks:
    libc.free(block)
kept = resident() - before
give_freed_back()
print(used / size, kept / size, (resident() - before) / size)
"""


def test_freed_blocks_are_kept_and_given_back() -> None:
    """Memory of eight blocks in use, freed, and given back, in blocks."""
    used, kept, left = map(float, run_code(PROGRAM, "keep").split())
    assert used > 7.5 and kept > 7.5 and left < 1
    used, kept, _ = map(float, run_code(PROGRAM).split())
    assert used > 7.5 and kept < 4  # what glibc does by itself


def test_an_older_glibc_keeps_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses more than 32 MiB; the other setting alone would make it keep less than before."""
    asked: list[tuple[int, int]] = []

    def set_option(name: int, value: int) -> int:
        asked.append((name, value))
        return int(name != process._MMAP_THRESHOLD or value <= limit)

    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=set_option))
    limit = 32 * 2**20
    process.keep_freed(2**30)
    assert asked == [(-3, 2**30), (-3, limit), (-1, 2**31 - 1)]
    asked.clear()
    limit = 0
    process.keep_freed(2**30)
    assert asked == [(-3, 2**30), (-3, 32 * 2**20)]
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace())  # no glibc
    process.keep_freed(1)
    process.give_freed_back()


RAISING = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from fusionrl.base.process import most_open_files, raise_open_files
assert most_open_files() == raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_a_process_and_those_that_it_starts() -> None:
    assert int(run_code(RAISING)) == process.most_open_files() > 256


def test_no_limit_is_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may say "infinity" or a billion, and programs that close every number would take minutes."""
    for hard in (resource.RLIM_INFINITY, 1 << 30):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        assert process.most_open_files() == 1 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert process.most_open_files() == 4096


def test_threads_that_ask_at_once_get_one_object() -> None:
    begun, is_second = threading.Event(), threading.Event()

    @process.made_once
    def make(name: str) -> object:
        if begun.is_set():
            is_second.set()
        begun.set()
        is_second.wait(0.5)  # a second maker has that long to come in
        return object()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(make, "a")
        assert begun.wait(60)
        assert threads.submit(make, "a").result(60) is first.result(60) is make("a")
    assert not is_second.is_set() and make("b") is not make("a")
