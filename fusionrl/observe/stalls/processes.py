"""The processes of a run on this machine, found by their logs, with their states and stacks.

A process belongs to the run if its standard error is a file in the run's `logs/`, or if it descends from one: trainers,
the Buffer and its reward processes, engines and their schedulers, whose output a minder passes on to the log. So nobody
has to be asked who they are, who may not answer.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fusionrl.base.stack_signal import ask_for_stacks
from fusionrl.observe.stalls.stacks import Thread, main_thread, read_stacks

ANSWER_S = 1.0
_PATIENCE_S = 0.5  # a process that has written nothing by then may hold Python's lock
_QUIET_S = 0.05  # a process whose log has not grown for so long has written all
_MOST_BYTES = 1 << 20  # of one process
_POLL_S = 0.01
_ROLE = re.compile(r"^(?P<role>.+?)(\.a\d+)?\.log$")
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits for a disk or a driver", "Z": "dead"}
_SAYS_NOTHING = "it has not answered SIGUSR1"


@dataclass(frozen=True)
class ProcessState:
    """A process of the run.

    role      as its log is called: "trainer-3", "buffer", "engine-0"
    title     its command line, shortened
    trouble   "stopped by a signal", …; "" for a process that runs or sleeps
    stacks    as it wrote them; "" where it wrote none
    """

    role: str
    pid: int
    host: str
    title: str
    trouble: str
    stacks: str

    @property
    def threads(self) -> list[Thread]:
        """Its threads."""
        return read_stacks(self.stacks)

    @property
    def thread(self) -> Thread | None:
        """Its main thread."""
        return main_thread(self.threads)

    def render(self) -> str:
        """Return it as the file in `logs/` has it."""
        head = f"=== {self.role}: process {self.pid} on {self.host}" + (f", {self.trouble}" if self.trouble else "")
        return f"{head}\n    {self.title}\n{self.stacks.rstrip() or _SAYS_NOTHING}\n"


def look(logs: Path, answer_s: float = ANSWER_S) -> list[ProcessState]:
    """Return the run's processes on this machine with the folder `logs`, each with its stacks.

    Processes with logs of their own are asked at once; those that share one, one after the other, so that their stacks
    do not mix. Each has `answer_s` seconds.
    """
    processes = sorted(_processes(logs))
    stacks: dict[int, str] = {}
    rounds: list[dict[Path, int]] = []
    for log, pid in processes:
        free = next((batch for batch in rounds if log not in batch), None)
        if free is None:
            rounds.append(free := {})
        free[log] = pid
    for batch in rounds:
        stacks |= _ask(batch, answer_s)
    host = socket.gethostname()
    return [
        ProcessState(_role(log), pid, host, _title(pid), _STATES.get(_state(pid), ""), stacks.get(pid, ""))
        for log, pid in processes
    ]


def _processes(logs: Path) -> Iterable[tuple[Path, int]]:
    """(log, pid) of every process that writes into a log of the folder, itself or by its parents; not of this one."""
    folder = logs.resolve()
    parents: dict[int, int] = {}
    logs_by_pid: dict[int, Path] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            parents[int(entry.name)] = int(_stat(int(entry.name))[1])
            log = Path(os.readlink(entry / "fd" / "2"))
        except (OSError, IndexError):  # it has ended, or is another user's
            continue
        if log.parent == folder and log.suffix == ".log":
            logs_by_pid[int(entry.name)] = log
    for pid in parents:
        above: int | None = pid
        while above is not None and above not in logs_by_pid:
            above = parents.get(above)
        if above is not None:
            yield logs_by_pid[above], pid


def _ask(processes: dict[Path, int], answer_s: float) -> dict[int, str]:
    """Ask one process of each log for its stacks; return what those wrote that answered."""
    before = {log: _size(log) for log in processes}
    pending = {log for log, pid in processes.items() if _state(pid) not in "TtZ" and ask_for_stacks(pid)}
    sizes, grown = dict(before), dict.fromkeys(processes, 0.0)
    deadline = time.monotonic() + answer_s
    forced_at = time.monotonic() + _PATIENCE_S
    while pending and (now := time.monotonic()) < deadline:
        if now > forced_at:
            for log in (log for log in pending if not grown[log]):
                ask_for_stacks(processes[log], is_forced=True)
            forced_at = deadline
        for log in list(pending):
            if (size := _size(log)) > sizes[log]:
                sizes[log], grown[log] = size, now
            elif grown[log] and now - grown[log] > _QUIET_S:
                pending.remove(log)
        time.sleep(_POLL_S)
    return {pid: _read(log, before[log]) for log, pid in processes.items() if sizes[log] > before[log]}


def _read(log: Path, start: int) -> str:
    """Read what was written into a log since `start`, but for lines that are not of stacks."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line for line in text.splitlines() if not line or re.match(r"^(Current t|T)hread 0x|^  ", line))


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _role(log: Path) -> str:
    match = _ROLE.match(log.name)
    return match["role"] if match else log.name


def _state(pid: int) -> str:
    """The letter of its state, as `ps` shows it; "Z" for one that is gone."""
    try:
        return _stat(pid)[0]
    except (OSError, IndexError):
        return "Z"


def _stat(pid: int) -> list[str]:
    """State, parent, …: the fields of /proc/<pid>/stat behind the name."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""
