"""System calls by ctypes, and the seccomp filter of those that code in the sandbox may not make.

The filter names what is refused: escapes (namespaces, mounts, tracing), interfaces with a long record of kernel bugs
(io_uring, bpf, perf, userfaultfd, keys), memory that no process is charged for (memfd, System V), and sockets. Calls of
another architecture kill the process; calls newer than the tables do not exist.
"""

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


AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: number on x86_64, number on aarch64 (None: the architecture has no such call)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # other processes' memory and descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "ioprio_set": (251, 30),
    # large interfaces of the kernel that no graded program needs
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # memory that belongs to no process, or outlives it
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}
# Calls that depend on an argument, or are answered "no such call" so that libc falls back to an older one.
CONDITIONAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
    "setpriority": (141, 140),
    "prctl": (157, 167),
}
# Calls that change the process of their first argument: only 0, the caller, is allowed.
OF_A_PROCESS = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
NEWEST = 470  # calls above did not exist when the tables were written

_CLONE_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # type into a terminal
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF  # the other bits of a type are flags
_PR_SET_DUMPABLE = 4
_PRIO_PROCESS, _EPERM, _ENOSYS = 0, 1, 38

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|…|K, BPF_RET|K
_AND = 0x54  # BPF_ALU|BPF_AND|BPF_K
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes each

Line = tuple[int, int, int, int]  # operation, lines to skip if true, if false, operand


def build_filter(machine: str, allow_unix_sockets: bool) -> list[Line]:
    """Return the BPF program for `machine` (as uname says it).

    allow_unix_sockets  sockets of AF_UNIX may be made: in a network namespace they reach nobody outside of it.
                        Without them a socketpair is of streams: one of datagrams can be sent to any address

    Raises CannotStart if there is no table for this machine.
    """
    if machine not in AUDIT_ARCH:
        raise CannotStart(f"no table of system calls for {machine}; known are {', '.join(AUDIT_ARCH)}")
    column = list(AUDIT_ARCH).index(machine)
    refuse, unknown = (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ERRNO | _ENOSYS)
    allow, kill = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _KILL)
    special = {name: numbers[column] for name, numbers in (CONDITIONAL | OF_A_PROCESS).items()}
    is_stream: list[Line] = [
        (_LOAD, 0, 0, _ARGUMENT + 8),
        (_AND, 0, 0, _SOCK_TYPE_MASK),
        (_EQUAL, 1, 0, _SOCK_STREAM),
        refuse,
    ]

    def when(name: str, *lines: Line) -> list[Line]:
        return [(_EQUAL, 0, len(lines), special[name]), *lines]

    program: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        kill,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32: the calls of x86_64 under other numbers
        kill,
        (_AT_LEAST, 0, 1, NEWEST),
        unknown,
        *when("clone3", unknown),  # its flags lie in memory, where a filter cannot look; libc then uses clone
        *when("clone", (_LOAD, 0, 0, _ARGUMENT), (_ANY_BIT, 0, 1, _CLONE_NAMESPACES), refuse, allow),
        # asyncio and multiprocessing need a socketpair
        *when(
            "socketpair",
            (_LOAD, 0, 0, _ARGUMENT),
            (_EQUAL, 1, 0, _AF_UNIX),
            refuse,
            *([] if allow_unix_sockets else is_stream),
            allow,
        ),
        *when(
            "ioctl",
            (_LOAD, 0, 0, _ARGUMENT + 8),
            (_EQUAL, 1, 0, _TIOCSTI),
            (_EQUAL, 0, 1, _TIOCLINUX),
            refuse,
            allow,
        ),
        # a process that is not dumpable hides what it holds open from the watch
        *when("prctl", (_LOAD, 0, 0, _ARGUMENT), (_EQUAL, 0, 1, _PR_SET_DUMPABLE), refuse, allow),
        *when(
            "setpriority",
            (_LOAD, 0, 0, _ARGUMENT),
            (_EQUAL, 0, 2, _PRIO_PROCESS),
            (_LOAD, 0, 0, _ARGUMENT + 8),
            (_EQUAL, 1, 0, 0),
            refuse,
            allow,
        ),
    ]
    for name in OF_A_PROCESS:
        program += when(name, (_LOAD, 0, 0, _ARGUMENT), (_EQUAL, 1, 0, 0), refuse, allow)
    if allow_unix_sockets:
        program += when("socket", (_LOAD, 0, 0, _ARGUMENT), (_EQUAL, 1, 0, _AF_UNIX), refuse, allow)
    else:
        program += when("socket", refuse)
    numbers = sorted(number for row in REFUSED.values() if (number := row[column]) is not None)
    program += [(_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    return [*program, allow, refuse]


def install(program: list[Line]) -> None:
    """Put the filter on this process and all its descendants, for good.

    Raises CannotStart if the kernel has no seccomp filters.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    try:
        call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0))
    except OSError as error:
        raise CannotStart(f"the kernel takes no seccomp filter ({error})") from error


def number_of(name: str) -> int:
    """The number of a system call of the tables on this machine."""
    number = REFUSED[name][list(AUDIT_ARCH).index(os.uname().machine)]
    assert number is not None
    return number
