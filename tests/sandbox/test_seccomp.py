"""The filter of system calls, by itself: its numbers against the headers of the system, and its branches."""

import re
from pathlib import Path

import pytest

from fusionrl.sandbox.launcher.seccomp import (
    AUDIT_ARCH,
    CONDITIONAL,
    NEWEST,
    OF_A_PROCESS,
    REFUSED,
    CannotStart,
    Line,
    build_filter,
)

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),  # aarch64 has the generic numbers
}
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


@pytest.mark.parametrize("machine", list(AUDIT_ARCH))
def test_numbers_are_those_of_the_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]}")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    numbers = {name: int(number) for name, number in found}
    column = list(AUDIT_ARCH).index(machine)
    for name, row in (REFUSED | CONDITIONAL | OF_A_PROCESS).items():
        if name in numbers:  # the headers of an older kernel lack the newest
            assert row[column] == numbers[name], name
    assert sum(name in numbers for name in REFUSED) > 50
    assert max(numbers.values()) < NEWEST


def decide(program: list[Line], number: int, argument: int = 0, second: int = 0, audit: int | None = None) -> int:
    """Run the BPF program as the kernel would."""
    data = {0: number, 4: AUDIT_ARCH["x86_64"] if audit is None else audit, 16: argument, 24: second}
    accumulator = place = 0
    while True:
        operation, if_true, if_false, operand = program[place]
        place += 1
        if operation == 0x20:
            accumulator = data[operand]
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            place += if_true if holds[operation] else if_false


def test_every_branch() -> None:
    for machine, audit in AUDIT_ARCH.items():
        column = list(AUDIT_ARCH).index(machine)
        for unix in (True, False):
            program = build_filter(machine, allow_unix_sockets=unix)
            assert all(jump <= 255 for line in program for jump in line[1:3])
            for row in REFUSED.values():
                if (refused := row[column]) is not None:
                    assert decide(program, refused, audit=audit) == REFUSE
            number = {name: row[column] for name, row in CONDITIONAL.items()}
            for name, arguments, wanted in [
                ("clone3", (), UNKNOWN),
                ("clone", (0x01200011,), ALLOW),  # fork
                ("clone", (0x10000011,), REFUSE),  # CLONE_NEWUSER
                ("socketpair", (1, 0x80801), ALLOW),  # a stream, with flags
                *(("socketpair", (1, kind), ALLOW if unix else REFUSE) for kind in (2, 5)),  # datagrams, packets
                ("socketpair", (40,), REFUSE),
                ("prctl", (15,), ALLOW),  # PR_SET_NAME
                ("prctl", (4,), REFUSE),  # PR_SET_DUMPABLE
                ("setpriority", (0, 0), ALLOW),  # nice
                ("setpriority", (0, 7), REFUSE),
                ("setpriority", (2, 0), REFUSE),  # all of the user
                ("socket", (1,), ALLOW if unix else REFUSE),
                ("socket", (40,), REFUSE),  # AF_VSOCK
                ("ioctl", (0, 0x5413), ALLOW),
                ("ioctl", (0, 0x5412), REFUSE),  # TIOCSTI
            ]:
                assert decide(program, number[name], *arguments, audit=audit) == wanted, (name, arguments)
            for name in OF_A_PROCESS:
                assert decide(program, OF_A_PROCESS[name][column], 0, audit=audit) == ALLOW
                assert decide(program, OF_A_PROCESS[name][column], 1, audit=audit) == REFUSE
            assert decide(program, 64 if machine == "aarch64" else 1, audit=audit) == ALLOW, "write"
            assert decide(program, NEWEST, audit=audit) == UNKNOWN
            assert decide(program, 0x40000001, audit=audit) == KILL, "x32"
            assert decide(program, 1, audit=0x40000003) == KILL, "i386"


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(CannotStart, match="no table of system calls for riscv64"):
        build_filter("riscv64", allow_unix_sockets=False)
