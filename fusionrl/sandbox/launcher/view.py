"""The files that the code sees: system libraries, its interpreter and its own folder, and nothing else.

With namespaces that is a root of its own, built of read-only binds; without, rules of Landlock, by which a process
hides files from itself and its descendants. Rights are those of linux/landlock.h; a kernel knows them up to its ABI.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from .seccomp import PR_SET_NO_NEW_PRIVS, call, mount, number_of, prctl, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWIPC, CLONE_NEWUSER = 1 << 17, 1 << 25, 1 << 27, 1 << 28
CLONE_NEWPID, CLONE_NEWNET = 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/alternatives"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_HARMLESS = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu")  # counts of cores and memory


def enter_namespaces() -> bool:
    """Enter new network, pid, mount, IPC and cgroup namespaces; False if the kernel grants none.

    Root takes them by right, others within a user namespace.
    """
    flags = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    try:
        call("unshare", flags)
        return True
    except OSError:
        pass
    try:
        call("unshare", flags | CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return False
    return True


def interpreter_folders() -> list[str]:
    """The folders of the interpreter, its standard library and its packages that lie outside of `SYSTEM`."""
    executable = os.path.abspath(sys.executable)
    folders = {os.path.abspath(sys.base_prefix), os.path.realpath(sys.base_prefix)}
    folders.add(os.path.dirname(os.path.dirname(os.path.realpath(executable))))
    environment = os.path.dirname(os.path.dirname(executable))
    if os.path.exists(os.path.join(environment, "pyvenv.cfg")):
        folders.add(environment)
    folders.discard("/")  # an interpreter in /bin: its library lies in /usr or /lib
    outer: list[str] = []
    for place in sorted(folders):
        if not any((place + "/").startswith(known + "/") for known in (*SYSTEM, *outer)):
            outer.append(place)
    return outer


def build_root(root: str, disk_bytes: int, num_files: int) -> str:
    """Make the folder `root` the root of this mount namespace; return the one place to write in it.

    Raises OSError if the kernel refuses a mount, or is older than 5.12.
    """
    os.umask(0o022)
    python = interpreter_folders()
    home = "/box" if any(place.startswith("/tmp/") for place in python) else "/tmp"
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("none", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1000,mode=755")
    for place in (*SYSTEM, *python):
        _bind(place, root + place, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for place in DEVICES:
        try:
            _bind(place, root + place, MS_RDONLY | MS_NOSUID)
        except OSError:
            pass  # a container may not let its devices be bound
    os.mkdir(root + "/proc")
    try:
        mount("none", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_RDONLY)
    except OSError:
        pass  # a container whose /proc is partly masked: none at all
    os.makedirs(root + home, exist_ok=True)
    size = f"size={disk_bytes},nr_inodes={num_files + 2},mode=700"  # + the folder and main.py
    mount("none", root + home, "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir(root)
    syscall("pivot_root", number_of("pivot_root"), b".", b".")
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    return home


def _bind(source: str, target: str, flags: int) -> None:
    if os.path.islink(source) and source in SYSTEM:  # /bin is a link to usr/bin on most systems
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    else:
        return
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)  # struct mount_attr: set, clear, propagation, descriptor
    size = ctypes.c_size_t(len(attributes))
    syscall("mount_setattr", number_of("mount_setattr"), _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, size)


def landlock_rules(home: str) -> int | None:
    """Rules of Landlock that show the same files to a process without a root of its own; None: no Landlock."""
    if not landlock_version():
        return None
    paths = dict.fromkeys((*SYSTEM, *interpreter_folders(), *_HARMLESS), _READ)
    return make_ruleset(paths | dict.fromkeys((*DEVICES, home), _WRITE))


# ---------------------------------------------------------------- Landlock
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file system rights
_TCP_RIGHTS, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
_READ, _WRITE = 0b1101, (1 << 16) - 1  # execute, read a file, list a folder; every right
_OF_FILES = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # execute, write, read, truncate, ioctl


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0: none."""
    try:
        return syscall("landlock_create_ruleset", _CREATE, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def make_ruleset(paths: Mapping[str, int]) -> int:
    """Return a descriptor of rules that allow each path, with all below it, the rights `_READ` or `_WRITE`.

    Paths that do not exist are passed over. Everything else in the file system, TCP, and signals to other processes are
    refused once `restrict` is called, as far as the kernel's version goes.
    """
    version = landlock_version()
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
