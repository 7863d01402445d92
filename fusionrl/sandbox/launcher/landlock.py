"""Landlock: without any privilege, a process hides files from itself and from all its descendants.

Access rights are those of linux/landlock.h; a kernel knows those up to its ABI version.
"""

from __future__ import annotations

import ctypes
import os
import struct

from .kernel import PR_SET_NO_NEW_PRIVS, prctl, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file system rights
_TCP_RIGHTS, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
READ, WRITE = 0b1101, (1 << 16) - 1  # execute, read a file, list a folder; every right
_OF_FILES = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # execute, write, read, truncate, ioctl


def abi() -> int:
    """The version of Landlock that the kernel has; 0: none."""
    try:
        return syscall("landlock_create_ruleset", _CREATE, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def make_ruleset(paths: Mapping[str, int]) -> int:
    """Return a descriptor of rules that allow each path, with all below it, the rights `READ` or `WRITE`.

    Paths that do not exist are passed over. Everything else in the file system, TCP, and signals to other processes are
    refused once `restrict` is called, as far as the kernel's version goes.
    """
    version = abi()
    known = (1 << _RIGHTS_OF_ABI.get(version, 16)) - 1
    attributes = struct.pack("QQQ", known, _TCP_RIGHTS, _SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = syscall("landlock_create_ruleset", _CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path, rights in paths.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights &= known if os.path.isdir(path) else known & _OF_FILES
        try:
            syscall("landlock_add_rule", _ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0)
        finally:
            os.close(place)
    return ruleset


def restrict(ruleset: int) -> None:
    """Put the rules on this process, for good."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall("landlock_restrict_self", _RESTRICT, ruleset, 0)
    os.close(ruleset)
