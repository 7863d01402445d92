"""The process between `sandbox.run_python` and the code it runs: sets the limits, waits, ends everything, reports.

Run as a script under `python -I -S`; only the standard library. The request comes as JSON on standard input, the
report goes as JSON to the descriptor named on the command line. Standard output and error are the untrusted code's.

    launcher ── waits
      └ init ── process 1 of a new pid namespace: mounts, the clock, the report; when it ends, the kernel kills the rest
          └ the code, in a session of its own, without privileges

Where the kernel grants no namespaces, launcher and init are one process, a subreaper that kills its descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2
CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID = 2, 6, 7
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
HIDDEN = ("/root", "/home", "/run", "/var/run", "/dev/shm", "/var/tmp")  # secrets, and the sockets of local services
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A libc function that returns 0; OSError otherwise."""
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())


# ------------------------------------------------------------------------------------------------ namespaces
def enter_namespaces() -> bool:
    """New network, pid, mount and IPC namespaces: as root by right, else within a user namespace."""
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
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


def mount_view(folder: str, limits: dict[str, Any]) -> str:
    """Everything read-only, secrets hidden, and a small tmpfs as the one place to write; returns that place."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    read_only = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)  # struct mount_attr: set, clear, propagation, fd
    libc.syscall.restype = ctypes.c_long
    call("syscall", MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, ctypes.c_size_t(len(read_only)))
    python = {os.path.dirname(os.path.dirname(os.path.abspath(sys.executable))), sys.base_prefix}
    for place in HIDDEN:
        if os.path.isdir(place) and not os.path.islink(place):
            hide(place, [prefix for prefix in python if (prefix + "/").startswith(place + "/")])
    home, inside = "/tmp", [prefix for prefix in python if (prefix + "/").startswith("/tmp/")]
    if inside:
        home = os.path.join("/tmp", os.path.basename(folder))
        hide("/tmp", inside, empty=home)
    size = f"size={limits['disk_bytes']},nr_inodes={limits['num_files'] + 2},mode=700"  # + the folder and main.py
    mount("none", home, "tmpfs", MS_NOSUID | MS_NODEV, size)
    try:
        mount("none", "/proc", "proc", MS_NOSUID | MS_NODEV)
    except OSError:  # a container whose /proc is partly masked: none at all, rather than the host's
        mount("none", "/proc", "tmpfs", MS_RDONLY, "size=4k,nr_inodes=2")
    return home


def hide(place: str, kept: list[str], empty: str | None = None) -> None:
    """Cover a folder by an empty one in which only the folders `kept` are still there, and a new one, `empty`."""
    opened = [os.open(path, os.O_PATH) for path in kept]
    mount("none", place, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
    for path, descriptor in zip(kept, opened, strict=True):
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
        os.close(descriptor)
    if empty is not None:
        os.mkdir(empty)
    mount("none", place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def become(uid: int, gid: int) -> None:
    """Leave root for good, and every capability of a user namespace with it.

    Only the right to read stays, where the interpreter could not be read without; for want of it, root stays root
    without capabilities.
    """
    keep = 1 << CAP_DAC_READ_SEARCH if os.geteuid() == 0 and not is_python_readable() else 0
    try:
        if keep:
            prctl(PR_SET_KEEPCAPS, 1)
            set_capabilities(keep | 1 << CAP_SETUID | 1 << CAP_SETGID)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        set_capabilities(keep)
        if keep:  # ambient: it outlives the exec
            call("prctl", PR_CAP_AMBIENT, *map(ctypes.c_ulong, (PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)))
    except OSError:
        set_capabilities(0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def set_capabilities(mask: int) -> None:
    """capset(2) of this process: permitted, effective and inheritable."""
    call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", mask, mask, mask, 0, 0, 0))


def is_python_readable() -> bool:
    """Whether users other than root can start this interpreter."""
    for place in (os.path.abspath(sys.executable), os.path.realpath(sys.executable), os.path.realpath(os.__file__)):
        while place != "/":
            needs = 0o1 if os.path.isdir(place) else 0o4
            if not os.stat(place).st_mode & needs:
                return False
            place = os.path.dirname(place)
    return True


# ------------------------------------------------------------------------------------------------ the network
def deny_sockets() -> str:
    """Without a network namespace: refuse sockets by seccomp, else by Python's audit hook; returns which."""
    audit, socket, io_uring_setup = {"x86_64": (0xC000003E, 41, 425), "aarch64": (0xC00000B7, 198, 425)}.get(
        platform.machine(), (0, 0, 0)
    )
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # SECCOMP_RET_ALLOW, _ERRNO | EPERM, _KILL_PROCESS
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    program = [  # operation, lines to skip if true, if false, operand
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, audit),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the system call
        (at_least, 2, 0, 0x40000000),  # x32
        (equal, 1, 0, io_uring_setup),  # opens sockets as well
        (equal, 0, 1, socket),  # socketpair, which multiprocessing and asyncio need, is another call
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    try:
        if not audit:
            raise OSError("no filter for this machine")
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0))
    except OSError:
        return "audit hook"
    return "seccomp"


AUDIT_HOOK = """import sys
def _no_network(event, args):
    if event.startswith("socket."):
        raise PermissionError("no network in the sandbox")
sys.addaudithook(_no_network)
"""


# ------------------------------------------------------------------------------------------------ processes
def tasks_of(uid: int) -> int:
    """Threads of a user on this machine."""
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def kill_descendants() -> None:
    """Kill whatever descends from this subreaper, until nothing does."""
    me = os.getpid()
    while True:
        parents: dict[int, int] = {}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        found = {me}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        for pid in found - {me}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def run_code(request: dict[str, Any], home: str, stdin: int, isolated: bool) -> None:
    """In the child: give up every privilege, set the limits and become the code's interpreter."""
    limits, (uid, gid) = request["limits"], request["ids"]
    os.setsid()  # out of the launcher's process group: a kill of the own group hits nobody else
    os.dup2(stdin, 0)
    num_tasks = limits["num_processes"] if isolated or uid != os.geteuid() else limits["num_processes"] + tasks_of(uid)
    bounds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: num_tasks,
        resource.RLIMIT_CORE: 0,
    }
    become(uid, gid)
    os.chdir(home)
    for name, value in bounds.items():
        hard = resource.getrlimit(name)[1]
        most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        # A second between the CPU limits: at the soft one SIGXCPU says what happened, the hard one cannot be ignored.
        resource.setrlimit(name, (min(value, most), min(value + (name == resource.RLIMIT_CPU), most)))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.execve(sys.executable, [sys.executable, "-I", "-B", "-u", os.path.join(home, "main.py")], environment)


def supervise(request: dict[str, Any], isolated: bool) -> dict[str, Any]:
    """Run the code and wait for it; returns what is reported."""
    limits = request["limits"]
    home, files = request["folder"], "size of each file alone"
    if isolated:
        with contextlib.suppress(OSError):  # a kernel before 5.12 cannot make a whole tree read-only
            home = mount_view(request["folder"], limits)
            files = "read-only but for a bounded tmpfs"
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:  # one user a run, so that RLIMIT_NPROC counts this run's processes alone
        uid = gid = 20_000 + request["number"] % 40_000
    request["ids"] = uid, gid
    network = "network namespace" if isolated else deny_sockets()
    main = os.path.join(home, "main.py")
    with open(main, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write((AUDIT_HOOK if network == "audit hook" else "") + request["code"])
    with contextlib.suppress(OSError):  # a root within a user namespace has no other users, and stays what it is
        os.chown(home, uid, gid)
        os.chown(main, uid, gid)
    stdin = os.memfd_create("stdin")
    _write_all(stdin, request["stdin"].encode("utf-8", "replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    wanted = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    deadline = time.monotonic() + limits["wall_s"]
    child = os.fork()
    if child == 0:
        try:
            run_code(request, home, stdin, isolated)
        except BaseException:  # whatever kept the code from starting is told where its errors would be
            sys.excepthook(*sys.exc_info())
        os._exit(127)
    status, timed_out = None, False
    while status is None:
        remaining = deadline - time.monotonic()
        got = signal.sigtimedwait(wanted, max(0.0, remaining))
        if got is not None and got.si_signo == signal.SIGTERM:
            break
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, ended = os.waitpid(-1, os.WNOHANG)
                if pid == child:
                    status = ended
                if pid in (0, child):
                    break
        if status is None and time.monotonic() >= deadline:
            timed_out = True
            break
    if not isolated:
        kill_descendants()
    return {
        "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "network": f"blocked by {network}",
        "processes": "pid namespace" if isolated else "subreaper",
        "files": files,
    }


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    """Read the request, run it, report."""
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(sys.stdin.buffer.read())
    request["number"] = os.getpid()
    isolated = request["namespaces"] and enter_namespaces()
    prctl(PR_SET_DUMPABLE, 0)  # the code cannot read this process's memory or trace it
    if isolated:
        init = os.fork()
        if init:
            os.close(report)
            os.waitpid(init, 0)
            os._exit(0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    _write_all(report, json.dumps(supervise(request, isolated)).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
