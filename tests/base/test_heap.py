"""Memory that a process frees: kept where it asks for that, and given back when it says so."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, resource, sys
from fusionrl.base.heap import give_freed_back, keep_freed

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1])

if "keep" in sys.argv:
    keep_freed(2**30)
size, libc = 64 * 2**20, ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def use():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)

for _ in range(3):
    use()
before = faults()
use()
again, held = faults() - before, resident()
give_freed_back()
print(again, held - resident())
"""


def _run(*words: str) -> tuple[int, int]:
    """(pages that the system mapped for a block that was there before, pages given back at last)."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    again, given = map(int, done.stdout.split())
    return again, given


def test_freed_blocks_are_kept_and_given_back() -> None:
    pages = 64 * 2**20 // 4096
    again, given = _run("keep")
    assert again < pages / 100 and given > pages / 2
    again, _ = _run()
    assert again > pages / 2  # what glibc does by itself
