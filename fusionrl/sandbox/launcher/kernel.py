"""System calls that Python has no name for, by ctypes. Numbers and constants are those of linux/*.h."""

import ctypes
import os
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class CannotStart(Exception):
    """The machine lacks something that the sandbox needs; the text is for the user."""


def call(name: str, *arguments: object) -> None:
    """Call a libc function that returns 0. Raises OSError otherwise."""
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def syscall(name: str, number: int, *arguments: object) -> int:
    """Make a system call by its number; integers travel as 64 bits. Raises OSError if it fails."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def prctl(option: int, value: int) -> None:
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())


def drop_capabilities() -> None:
    """Give up every capability of this process: permitted, effective and inheritable."""
    call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0))
