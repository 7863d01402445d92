"""Programs that try to get out of the sandbox, or at something that is not theirs. One that succeeds prints ESCAPED.

Each is run behind `HEADER`, which gives it the targets that the test has set up, as `T`, and some ctypes. An error is a
failed attempt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

HEADER = '''
import ctypes, errno, os, resource, signal, socket, struct, sys, time
T = {targets!r}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = os.uname().machine == "x86_64"
def call(x86, arm, *arguments):
    """A system call; its result, or -1."""
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return libc.syscall(ctypes.c_long(x86 if X86 else arm), *values)
def escaped(what=""):
    print("ESCAPED", what, flush=True)
def attempt():
{body}
try:
    attempt()
except (OSError, MemoryError, ValueError, OverflowError) as error:
    print("refused:", error, flush=True)
print("tried", flush=True)
'''


class Escape(NamedTuple):
    """One attempt; `bare`: it succeeds for any user without a sandbox, which a test checks. `limits`: of its run."""

    name: str
    body: str
    bare: bool = False
    limits: dict[str, Any] = {}  # noqa: RUF012


def program(escape: Escape, targets: dict[str, Any]) -> str:
    """The text of the program."""
    body = "".join(f"    {line}\n" for line in escape.body.strip().splitlines())
    return HEADER.replace("{targets!r}", repr(targets)).replace("{body}", body)


ESCAPES = [
    # files
    Escape("read the password file", "escaped(open('/etc/shadow').read(9))"),
    Escape("list root's home", "escaped(os.listdir('/root')) if not set(os.listdir('/root')) <= {'.pyenv'} else None"),
    Escape("read the labels", "escaped(open(T['label']).read())", bare=True),
    Escape("overwrite the labels", "open(T['label'], 'w').write('mine'); escaped()", bare=True),
    Escape("list the folder of the run", "escaped(os.listdir(T['folder']))", bare=True),
    Escape("read the source of the grader", "escaped(open(T['source']).read(9))", bare=True),
    Escape("read the user accounts", "escaped(open('/etc/passwd').read(9))", bare=True),
    Escape(
        "write to shared memory",
        "open('/dev/shm/fusionrl-escape', 'w').write('x'); os.remove('/dev/shm/fusionrl-escape'); escaped()",
        bare=True,
    ),
    Escape(
        "write to /var/tmp",
        "open('/var/tmp/fusionrl-escape', 'w').write('x'); os.remove('/var/tmp/fusionrl-escape'); escaped()",
        bare=True,
    ),
    Escape("write to a system folder", "open('/usr/fusionrl-escape', 'w').write('x'); escaped()"),
    Escape("replace the interpreter", "open(sys.executable, 'r+b').close(); escaped()"),
    Escape(
        "follow a link out of its folder", "os.symlink(T['label'], 'link'); escaped(open('link').read())", bare=True
    ),
    Escape("climb by dots", "escaped(open('../' * 20 + T['label'].lstrip('/')).read())", bare=True),
    Escape(
        "open a file by its handle",
        """
handle = struct.pack("Ii", 128, 0) + bytes(128)
mount_id = ctypes.c_int()
if call(303, 264, -100, T["label"].encode(), handle, ctypes.byref(mount_id), 0) == 0: escaped()
""",
    ),
    Escape("make a device", "os.mknod('disk', 0o60600, os.makedev(254, 0)); open('disk', 'rb').read(1); escaped()"),
    # other processes
    Escape(
        "read a key on a command line",
        """
for name in filter(str.isdecimal, os.listdir("/proc")):
    try:
        if T["key"] in open(f"/proc/{name}/cmdline").read(): escaped(name)
    except OSError: pass
""",
        bare=True,
    ),
    Escape(
        "read a process's environment",
        "if T['key'] in open(f\"/proc/{T['pid']}/environ\").read(): escaped()",
        bare=True,
    ),
    Escape("read a process's memory", "escaped(os.open(f\"/proc/{T['pid']}/mem\", os.O_RDONLY))", bare=True),
    Escape("read the launcher's memory", "escaped(os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY))"),
    Escape("list the launcher's descriptors", "escaped(os.listdir(f'/proc/{os.getppid()}/fd'))"),
    Escape("signal a process", "os.kill(T['pid'], 0); escaped()", bare=True),
    Escape(
        "signal the launcher",
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.2)\nescaped() if os.getppid() == 0 else None",
    ),
    Escape("trace the launcher", "if call(101, 117, 16, os.getppid(), 0, 0) == 0: escaped()"),
    Escape(
        "trace its own child",
        "if os.fork() == 0: os._exit(0) if call(101, 117, 0, 0, 0, 0) else escaped()\nos.wait()",
        bare=True,
    ),
    Escape(
        "read another process's memory by process_vm_readv",
        """
buffer = ctypes.create_string_buffer(8)
local = struct.pack("PN", ctypes.addressof(buffer), 8)
for pid in (os.getppid(), os.getpid()):
    if call(310, 270, pid, local, 1, local, 1, 0) == 8: escaped(pid)
""",
        bare=True,
    ),
    Escape(
        "steal a descriptor",
        "descriptor = os.pidfd_open(os.getpid())\nif call(438, 438, descriptor, 1, 0) >= 0: escaped()",
        bare=True,
    ),
    Escape(
        "blind the launcher by its limits",
        """
resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)); escaped()
if os.fork() == 0: time.sleep(60)
""",
    ),
    Escape(
        "change a process's limits",
        "resource.prlimit(T['pid'], resource.RLIMIT_CORE, resource.prlimit(T['pid'], resource.RLIMIT_CORE)); escaped()",
        bare=True,
    ),
    Escape("slow a process down", "os.setpriority(os.PRIO_PROCESS, T['pid'], 19); escaped()", bare=True),
    Escape("slow all processes of its user down", "os.setpriority(os.PRIO_USER, 0, 1); escaped()"),
    Escape(
        "take a process's processors",
        "os.sched_setaffinity(T['pid'], os.sched_getaffinity(T['pid'])); escaped()",
        bare=True,
    ),
    Escape("take a process's turn at the disk", "if call(251, 30, 1, T['pid'], 3 << 13) == 0: escaped()", bare=True),
    Escape(
        "use an inherited descriptor",
        """
for number in range(3, 256):
    try: os.fstat(number); escaped(number)
    except OSError: pass
""",
    ),
    # the network
    Escape("connect to a local server", "socket.create_connection(T['tcp'], 5); escaped()", bare=True),
    Escape(
        "send a datagram",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', tuple(T['tcp'])); escaped()",
        bare=True,
    ),
    Escape(
        "connect to a socket in the file system",
        "socket.socket(socket.AF_UNIX).connect(T['unix']); escaped()",
        bare=True,
    ),
    Escape(
        "send a datagram to a socket in the file system",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', T['datagrams']); escaped()",
        bare=True,
    ),
    Escape(
        "connect to an abstract socket",
        "socket.socket(socket.AF_UNIX).connect('\\0' + T['abstract']); escaped()",
        bare=True,
    ),
    Escape("make a vsock", "socket.socket(40, socket.SOCK_STREAM); escaped()"),
    Escape("make a netlink socket", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); escaped()", bare=True),
    Escape("make a packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()"),
    Escape("make a key socket", "socket.socket(38, socket.SOCK_SEQPACKET); escaped()"),  # AF_ALG
    # the kernel
    Escape("make a user namespace", "if libc.unshare(0x10000000) == 0: escaped()"),
    Escape(
        "clone into a user namespace",
        """
pid = call(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0: escaped(); os._exit(0)
if pid > 0: os.waitpid(pid, 0); escaped()
""",
    ),
    Escape(
        "clone by clone3",
        "if call(435, 435, None, 0) == -1 and ctypes.get_errno() != errno.ENOSYS: escaped()",
        bare=True,
    ),
    Escape("mount a tmpfs", "if libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0: escaped()"),
    Escape("change its root", "os.chroot('.'); escaped()"),
    Escape("make an io_uring", "if call(425, 425, 1, bytes(120)) >= 0: escaped()", bare=True),
    Escape(
        "load a BPF program",
        "if call(321, 280, 0, bytes(128), 128) >= 0 or ctypes.get_errno() != errno.EPERM: escaped()",
    ),
    Escape(
        "open a performance counter",
        "if call(298, 241, struct.pack('II', 1, 128) + bytes(120), 0, -1, -1, 0) >= 0: escaped()",
    ),
    Escape("handle page faults", "if call(323, 282, 1) >= 0: escaped()"),
    Escape(
        "add a key to the kernel's ring",
        "if call(248, 217, b'user', b'fusionrl', b'x', 1, -2) >= 0: escaped()",
        bare=True,
    ),
    Escape("set the clock", "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()"),
    Escape("read the kernel's log", "if call(103, 116, 3, ctypes.create_string_buffer(99), 99) > 0: escaped()"),
    Escape(
        "call in the manner of 32 bits",
        """
import mmap
if not X86: return
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() > 0: escaped()
""",
    ),
    Escape("call by x32 numbers", "if X86 and call(0x40000000 + 39, 0) >= 0: escaped()"),
    # privileges and limits
    Escape(
        "become root",
        """
os.setuid(0)
if T["uid"] != 0: escaped()
escaped(open("/etc/shadow").read(9))
""",
    ),
    Escape(
        "keep a capability",
        "import re\nif re.search('Cap(Eff|Prm|Inh|Amb):\\t0*[1-9a-f]', open('/proc/self/status').read()): escaped()",
    ),
    Escape("raise its limits", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); escaped()"),
    Escape(
        "make itself no victim of the lack of memory",
        "open('/proc/self/oom_score_adj', 'w').write('0'); escaped()",
        bare=True,
    ),
    Escape("take memory without a process", "os.ftruncate(os.memfd_create('x'), 1 << 30); escaped()", bare=True),
    Escape("take memory of System V", "if call(29, 194, 0, 1 << 20, 0o1600) >= 0: escaped()", bare=True),
    Escape(
        "take ten times 400 MiB",
        """
for _ in range(10):
    if os.fork() == 0:
        block = bytearray(400 << 20)
        for i in range(0, len(block), 4096): block[i] = 1
        time.sleep(20); os._exit(0)
time.sleep(20)
escaped()
""",
        limits={"wall_s": 15.0, "memory_bytes": 1 << 30},
    ),
    Escape(
        "fill the disk",
        """
for i in range(300):
    with open(f"f{i}", "wb") as file: file.write(bytes(1 << 20))
    time.sleep(0.005)
escaped()
""",
    ),
    Escape(
        "fill the disk in a folder that nobody may read",
        """
os.mkdir("closed")
os.chmod("closed", 0o300)
for i in range(300):
    with open(f"closed/f{i}", "wb") as file: file.write(bytes(1 << 20))
    time.sleep(0.005)
escaped()
""",
    ),
    Escape(
        "fill the disk below a path too long to open",
        """
for i in range(25): os.mkdir("d" * 200); os.chdir("d" * 200)
for i in range(300):
    with open(f"f{i}", "wb") as file: file.write(bytes(1 << 20))
    time.sleep(0.005)
escaped()
""",
    ),
    Escape(
        "fill the disk with files without a name",
        """
files = []
for i in range(150):
    files.append(open("f", "wb", buffering=0)); os.remove("f")
    files[-1].write(bytes(1 << 20))
    time.sleep(0.01)
escaped()
""",
    ),
    Escape(
        "fill the disk from a process that hides its descriptors",
        """
files = []
if libc.prctl(4, 0, 0, 0, 0) == -1: return
for i in range(150):
    files.append(open("f", "wb", buffering=0)); os.remove("f")
    files[-1].write(bytes(1 << 20))
    time.sleep(0.01)
escaped()
""",
        bare=True,
    ),
    Escape(
        "fill the disk with names",
        """
for i in range(5000):
    open(f"f{i}", "w").close()
    if i % 100 == 0: time.sleep(0.01)
escaped()
""",
    ),
    Escape(
        "nest folders deeper than Python's stack",
        """
for i in range(1500):
    os.mkdir("d"); os.chdir("d")
    if i % 100 == 0: os.mkdir("closed", 0)
os.chmod(".", 0)
""",
        limits={"num_files": 5000},
    ),
    Escape(
        "have a hundred processes",
        """
count = 0
while count < 100:
    if os.fork() == 0: time.sleep(60); os._exit(0)
    count += 1
escaped()
""",
        limits={"num_processes": 30, "wall_s": 5.0},
    ),
    Escape(
        "leave a process behind",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", T["mark"]])
    os._exit(0)
os.wait()
""",
    ),
]
