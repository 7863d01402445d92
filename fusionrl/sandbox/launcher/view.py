"""The files that the code sees: system libraries, its interpreter and its own folder, and nothing else.

With namespaces that is a root of its own, built of read-only binds; without, rules of Landlock.
"""

import ctypes
import os
import struct
import sys

from . import landlock
from .kernel import call, mount, syscall
from .seccomp import number_of

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
    if not landlock.abi():
        return None
    paths = dict.fromkeys((*SYSTEM, *interpreter_folders(), *_HARMLESS), landlock.READ)
    return landlock.make_ruleset(paths | dict.fromkeys((*DEVICES, home), landlock.WRITE))
