"""Programs that try to get out of the sandbox, or at something that is not theirs. One that succeeds prints ESCAPED.

Each is run behind `PRELUDE`, which gives it the targets that the test has set up, as `T`, and some ctypes. An error is
a failed attempt.
"""

import json
import re
from collections.abc import Iterable
from textwrap import indent
from typing import Any, NamedTuple

PRELUDE = '''
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
'''
ATTEMPT = """
def attempt():
{body}
try:
    attempt()
except (OSError, MemoryError, ValueError, OverflowError) as error:
    print("refused:", error, flush=True)
print("tried", flush=True)
"""


class Escape(NamedTuple):
    """One attempt; `bare`: it succeeds for any user without a sandbox, which a test checks. `limits`: of its run."""

    name: str
    body: str
    bare: bool = False
    limits: dict[str, Any] = {}  # noqa: RUF012

    @property
    def is_short(self) -> bool:
        """Whether a fork may run it after others: it is one line, and does not look at its parent."""
        return "\n" not in self.body and "getppid" not in self.body


def program(escape: Escape, targets: dict[str, Any]) -> str:
    """The text of the program."""
    return PRELUDE.replace("{targets!r}", repr(targets)) + ATTEMPT.replace("{body}", indent(escape.body, "    "))


def programs(escapes: Iterable[Escape], targets: dict[str, Any]) -> str:
    """The text of one program that makes each attempt in a fork, after a line "== NAME"."""
    text = PRELUDE.replace("{targets!r}", repr(targets))
    for escape in escapes:
        attempt = indent(ATTEMPT.replace("{body}", indent(escape.body, "    ")), "    ")
        text += f"print('==', {escape.name!r}, flush=True)\nif os.fork() == 0:{attempt}    os._exit(0)\n"
        text += "if os.WIFSIGNALED(os.wait()[1]): print('killed')\n"
    return text


CATALOGUE = r"""
# files
== read the password file
escaped(open('/etc/shadow').read(9))
== list root's home
escaped(os.listdir('/root')) if not set(os.listdir('/root')) <= {'.pyenv'} else None
== read the labels | bare
escaped(open(T['label']).read())
== overwrite the labels | bare
open(T['label'], 'w').write('mine'); escaped()
== list the folder of the run | bare
escaped(os.listdir(T['folder']))
== read the source of the grader | bare
escaped(open(T['source']).read(9))
== read the user accounts | bare
escaped(open('/etc/passwd').read(9))
== write to shared memory | bare
open('/dev/shm/fusionrl-escape', 'w').write('x'); os.remove('/dev/shm/fusionrl-escape'); escaped()
== write to /var/tmp | bare
open('/var/tmp/fusionrl-escape', 'w').write('x'); os.remove('/var/tmp/fusionrl-escape'); escaped()
== write to a system folder
open('/usr/fusionrl-escape', 'w').write('x'); escaped()
== replace the interpreter
open(sys.executable, 'r+b').close(); escaped()
== follow a link out of its folder | bare
os.symlink(T['label'], 'link'); escaped(open('link').read())
== climb by dots | bare
escaped(open('../' * 20 + T['label'].lstrip('/')).read())
== open a file by its handle
handle = struct.pack("Ii", 128, 0) + bytes(128)
mount_id = ctypes.c_int()
if call(303, 264, -100, T["label"].encode(), handle, ctypes.byref(mount_id), 0) == 0: escaped()
== make a device
os.mknod('disk', 0o60600, os.makedev(254, 0)); open('disk', 'rb').read(1); escaped()
# other processes
== read a key on a command line | bare
for name in filter(str.isdecimal, os.listdir("/proc")):
    try:
        if T["key"] in open(f"/proc/{name}/cmdline").read(): escaped(name)
    except OSError: pass
== read a process's environment | bare
if T['key'] in open(f"/proc/{T['pid']}/environ").read(): escaped()
== read a process's memory | bare
escaped(os.open(f"/proc/{T['pid']}/mem", os.O_RDONLY))
== read the launcher's memory
escaped(os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY))
== list the launcher's descriptors
escaped(os.listdir(f'/proc/{os.getppid()}/fd'))
== signal a process | bare
os.kill(T['pid'], 0); escaped()
== signal the launcher
os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.2)
escaped() if os.getppid() == 0 else None
== trace the launcher
if call(101, 117, 16, os.getppid(), 0, 0) == 0: escaped()
== trace its own child | bare
if os.fork() == 0: os._exit(0) if call(101, 117, 0, 0, 0, 0) else escaped()
os.wait()
== read another process's memory by process_vm_readv | bare
buffer = ctypes.create_string_buffer(8)
local = struct.pack("PN", ctypes.addressof(buffer), 8)
for pid in (os.getppid(), os.getpid()):
    if call(310, 270, pid, local, 1, local, 1, 0) == 8: escaped(pid)
== steal a descriptor | bare
descriptor = os.pidfd_open(os.getpid())
if call(438, 438, descriptor, 1, 0) >= 0: escaped()
== blind the launcher by its limits
resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)); escaped()
if os.fork() == 0: time.sleep(60)
== change a process's limits | bare
resource.prlimit(T['pid'], resource.RLIMIT_CORE, resource.prlimit(T['pid'], resource.RLIMIT_CORE)); escaped()
== slow a process down | bare
os.setpriority(os.PRIO_PROCESS, T['pid'], 19); escaped()
== slow all processes of its user down
os.setpriority(os.PRIO_USER, 0, 1); escaped()
== take a process's processors | bare
os.sched_setaffinity(T['pid'], os.sched_getaffinity(T['pid'])); escaped()
== take a process's turn at the disk | bare
if call(251, 30, 1, T['pid'], 3 << 13) == 0: escaped()
== use an inherited descriptor
for number in range(3, 256):
    try: os.fstat(number); escaped(number)
    except OSError: pass
# the network
== connect to a local server | bare
socket.create_connection(T['tcp'], 5); escaped()
== send a datagram | bare
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', tuple(T['tcp'])); escaped()
== connect to a socket in the file system | bare
socket.socket(socket.AF_UNIX).connect(T['unix']); escaped()
== send a datagram to a socket in the file system | bare
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', T['datagrams']); escaped()
== connect to an abstract socket | bare
socket.socket(socket.AF_UNIX).connect('\0' + T['abstract']); escaped()
== make a vsock
socket.socket(40, socket.SOCK_STREAM); escaped()
== make a netlink socket | bare
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); escaped()
== make a packet socket
socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()
== make a key socket
socket.socket(38, socket.SOCK_SEQPACKET); escaped()
# the kernel
== make a user namespace
if libc.unshare(0x10000000) == 0: escaped()
== clone into a user namespace
pid = call(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0: escaped(); os._exit(0)
if pid > 0: os.waitpid(pid, 0); escaped()
== clone by clone3 | bare
if call(435, 435, None, 0) == -1 and ctypes.get_errno() != errno.ENOSYS: escaped()
== mount a tmpfs
if libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0: escaped()
== change its root
os.chroot('.'); escaped()
== make an io_uring | bare
if call(425, 425, 1, bytes(120)) >= 0: escaped()
== load a BPF program
if call(321, 280, 0, bytes(128), 128) >= 0 or ctypes.get_errno() != errno.EPERM: escaped()
== open a performance counter
if call(298, 241, struct.pack('II', 1, 128) + bytes(120), 0, -1, -1, 0) >= 0: escaped()
== handle page faults
if call(323, 282, 1) >= 0: escaped()
== add a key to the kernel's ring | bare
if call(248, 217, b'user', b'fusionrl', b'x', 1, -2) >= 0: escaped()
== set the clock
time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()
== read the kernel's log
if call(103, 116, 3, ctypes.create_string_buffer(99), 99) > 0: escaped()
== call in the manner of 32 bits
import mmap
if not X86: return
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() > 0: escaped()
== call by x32 numbers
if X86 and call(0x40000000 + 39, 0) >= 0: escaped()
# privileges and limits
== become root
os.setuid(0)
if T["uid"] != 0: escaped()
escaped(open("/etc/shadow").read(9))
== keep a capability
import re
if re.search('Cap(Eff|Prm|Inh|Amb):\t0*[1-9a-f]', open('/proc/self/status').read()): escaped()
== raise its limits
resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); escaped()
== make itself no victim of the lack of memory | bare
open('/proc/self/oom_score_adj', 'w').write('0'); escaped()
== take memory without a process | bare
os.ftruncate(os.memfd_create('x'), 1 << 30); escaped()
== take memory of System V | bare
if call(29, 194, 0, 1 << 20, 0o1600) >= 0: escaped()
== take ten times 400 MiB | wall_s 15 | memory_bytes 1073741824
for _ in range(10):
    if os.fork() == 0:
        block = bytearray(400 << 20)
        for i in range(0, len(block), 4096): block[i] = 1
        time.sleep(20); os._exit(0)
time.sleep(20)
escaped()
== fill the disk
for i in range(300):
    with open(f"f{i}", "wb") as file: file.write(bytes(1 << 20))
    time.sleep(0.005)
escaped()
== fill the disk in a folder that nobody may read
os.mkdir("closed")
os.chmod("closed", 0o300)
for i in range(300):
    with open(f"closed/f{i}", "wb") as file: file.write(bytes(1 << 20))
    time.sleep(0.005)
escaped()
== fill the disk below a path too long to open
for i in range(25): os.mkdir("d" * 200); os.chdir("d" * 200)
for i in range(300):
    with open(f"f{i}", "wb") as file: file.write(bytes(1 << 20))
    time.sleep(0.005)
escaped()
== fill the disk with files without a name
files = []
for i in range(150):
    files.append(open("f", "wb", buffering=0)); os.remove("f")
    files[-1].write(bytes(1 << 20))
    time.sleep(0.01)
escaped()
== fill the disk from a process that hides its descriptors | bare
files = []
if libc.prctl(4, 0, 0, 0, 0) == -1: return
for i in range(150):
    files.append(open("f", "wb", buffering=0)); os.remove("f")
    files[-1].write(bytes(1 << 20))
    time.sleep(0.01)
escaped()
== fill the disk with names
for i in range(5000):
    open(f"f{i}", "w").close()
    if i % 100 == 0: time.sleep(0.01)
escaped()
== nest folders deeper than Python's stack | num_files 5000
for i in range(1500):
    os.mkdir("d"); os.chdir("d")
    if i % 100 == 0: os.mkdir("closed", 0)
os.chmod(".", 0)
== have a hundred processes | num_processes 30 | wall_s 5
count = 0
while count < 100:
    if os.fork() == 0: time.sleep(60); os._exit(0)
    count += 1
escaped()
== leave a process behind
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", T["mark"]])
    os._exit(0)
os.wait()
"""


def _read(entry: str) -> Escape:
    """The first line has the name, and after bars "bare" and limits."""
    heading, _, body = entry.partition("\n")
    name, *marks = heading.split(" | ")
    limits = [mark.split() for mark in marks if mark != "bare"]
    return Escape(name, body.strip(), "bare" in marks, {limit: json.loads(value) for limit, value in limits})


ESCAPES = [_read(entry) for entry in re.split(r"^(?:# .*\n)?== ", CATALOGUE, flags=re.MULTILINE)[1:]]
