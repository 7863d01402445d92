"""What a process sets and reads of itself: open files, freed memory, its title, and the stacks of its threads.

SIGUSR1 asks a process of a run for the stacks of its threads: they go to its standard error, which is its log. Sent to
the thread `stacks`, as `ask_for_stacks` does, the signal is answered with Python's lock. Sent to the process
(`kill -USR1`, or `is_forced`), the handler itself writes, in C: also where a library holds the lock, but other threads
may change the stacks meanwhile, and the process may crash. Standard library alone.
"""

import ctypes
import faulthandler
import functools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_MOST = 1 << 20
"""Linux opens no more by default (fs.nr_open), and programs that walk all numbers up to a larger limit take minutes."""


def made_once(make: Callable[P, T]) -> Callable[P, T]:
    """Let each call of `make` with equal arguments return one object, also calls that begin at the same moment.

    `functools.cache` alone makes two then; a second pool, or event loop, would live as long as the process.
    """
    lock, cached = threading.Lock(), functools.cache(make)

    @functools.wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return cached(*args, **kwargs)  # type: ignore[arg-type]  # the cache takes what can be hashed

    return get


def most_open_files() -> int:
    """Return how many files a process may open, once it has raised its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = _MOST
    return max(soft, min(hard, _MOST))


def raise_open_files() -> int:
    """Raise this process's limit, and that of processes that it starts, as far as it may go; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = most_open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of the two settings
_LARGEST = 2**31 - 1  # of a setting
_OLD_LIMIT = 32 * 2**20


def keep_freed(largest: int) -> None:
    """Let this process, and its forks, keep freed blocks of up to `largest` bytes for those that come after them.

    Of its main thread: blocks of others are kept where they are small. Its memory stays at its peak, until
    `give_freed_back`.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    # Older versions take no more than 32 MiB. Neither setting helps without the other.
    if set_option(_MMAP_THRESHOLD, largest) or set_option(_MMAP_THRESHOLD, min(largest, _OLD_LIMIT)):
        set_option(_TRIM_THRESHOLD, _LARGEST)


def give_freed_back() -> None:
    """Return to the system what was freed: glibc keeps the room of many small blocks in any case."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


ROOM = 6000
"""Characters that a process leaves for titles at the end of its command line: `python -m MODULE ROOM_OF_SPACES`."""


def set_title(words: str) -> None:
    """Show `python -m WORDS` as this process's command line, cut to the room that is there.

    Only the arguments are written over, their number stays, and the environment behind them, by which a process of a
    run is known, stays too: packages that set titles write over all of it.
    """
    if (arguments := _arguments()) is None:
        return
    start, size, python = arguments
    head = python + b"\0-m\0"
    room = size - len(head) - 3
    title = words.encode()[:room]
    text = head + title + b" \0" + b" " * (room - len(title)) + b"\0"
    assert len(text) == size
    ctypes.memmove(start, text, len(text))


def replace_title(title: str) -> None:
    """Show `title` alone as the command line of a process that has called `set_title`, or is a fork of one.

    In the place of `setproctitle.setproctitle`, which does nothing there: it does not find its arguments.
    """
    if (arguments := _arguments()) is not None:
        start, size, _ = arguments
        ctypes.memmove(start, title.encode()[: size - 1].ljust(size - 1) + b"\0", size)


def _arguments() -> tuple[int, int, bytes] | None:
    """(address and bytes of the arguments, the first of them); None without room for a title."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49, counted from 1
        parts = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    except (OSError, IndexError, ValueError):
        return None  # this system has no such files: the process keeps its command line
    if len(parts) != 5 or parts[1] != b"-m" or len(parts[3]) < ROOM // 2:  # the last one is empty
        return None
    return start, end - start, parts[0]


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, "SIGRTMIN+6" for a real-time signal, else "signal 99"."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a process may be ended by any number; Python names the first and the last real-time signal
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"


STACK_SIGNAL = signal.SIGUSR1
_STDERR = 2
_THREAD = "stacks"  # as the kernel knows it
_PR_SET_NAME = 15
# A young process may be a fork that is about to run another program. Until then it has its parent's handler; the
# signal would end the program.
_YOUNG_S = 5.0


def answer_with_stacks() -> None:
    """Let this process answer SIGUSR1 from now on. A log that is set up later gets them as well."""
    faulthandler.register(STACK_SIGNAL, file=_STDERR, all_threads=True)
    is_ready = threading.Event()
    threading.Thread(target=_answer, args=(is_ready,), name=_THREAD, daemon=True).start()
    is_ready.wait()


def _answer(is_ready: threading.Event) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _THREAD.encode(), 0, 0, 0)
    is_ready.set()
    while True:
        signal.sigwait({STACK_SIGNAL})
        faulthandler.dump_traceback(_STDERR, all_threads=True)


def answers_with_stacks(pid: int) -> bool:
    """Return whether a process of this machine has a handler for the signal: any other would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, or is another user's
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def ask_for_stacks(pid: int, *, is_forced: bool = False) -> bool:
    """Send the signal to a process that answers it. Returns whether it was sent: not to a young fork.

    is_forced  for a process that has not answered: it may hold Python's lock
    """
    if not answers_with_stacks(pid):
        return False
    try:
        thread = _thread_of(pid)
        if thread is None and _age_s(pid) < _YOUNG_S:
            return False
        if thread is None or is_forced:
            os.kill(pid, STACK_SIGNAL)
            return True
        return bool(ctypes.CDLL(None).tgkill(pid, thread, int(STACK_SIGNAL)) == 0)
    except OSError:  # it has ended meanwhile
        return False


def _thread_of(pid: int) -> int | None:
    """Return the id of the thread that answers; None where there is none, as in a process that was forked later."""
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        if name.read_text().rstrip("\n") == _THREAD:
            return int(name.parent.name)
    return None


def _age_s(pid: int) -> float:
    """Return the seconds since a process started. Raises OSError if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
