"""A supervised run: start it, send signals to its parts at chosen moments, wait for its end, and see what is left."""

import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[1]
MARK_VARIABLE = "FUSIONRL_CHAOS_MARK"  # a name with TOKEN is taken for a secret, and not passed on
# Part → how its command line is found, or the log that it writes.
_COMMANDS = {
    "engine": r"^\S+ -m fusionrl\.engines\.launch_server ",
    "router": r"fusionrl\.engines\.launch_router",
    "reward": r"fusionrl\.rewards\.reward_call",
    "driver": r"^\S+ -m fusionrl\.cli train ",
}
_LOGS = {
    "engine actor": r"/engine-actor-\d+\.a\d+\.log$",
    "buffer": r"/buffer\.a\d+\.log$",
    "trainer": r"/trainer-\d+\.a\d+\.log$",
}
VICTIMS = (*_COMMANDS, *_LOGS)
# The moment's name → phases of the driver, as its timeline has them.
MOMENTS = {
    "start": {"start"},
    "generate": {"generate", "fetch"},
    "train": {"train"},
    "push": {"push"},
    "save": {"save", "publish checkpoint"},
    "evaluate": {"evaluate"},
    "end": {"end"},
}
_LOOK_S = 0.002  # at the timeline: a push of a tiny model takes 0.03 s
_SWEEP_S = 0.3  # between two looks at all processes
_GRACE_S = 20.0  # for all processes of a run to be gone after its end
_FREEZE_S = 3.0  # a driver that is stopped continues after it, as no other process could tell


@dataclass(frozen=True)
class Fault:
    """A signal to a part: `delay_s` after a moment began for the first time with `after_step` steps finished."""

    victim: str
    signal: str  # KILL or STOP
    moment: str
    after_step: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.signal} {self.victim} at {self.moment} after step {self.after_step} + {self.delay_s:.2f} s"


@dataclass
class End:
    """The end of a run."""

    code: int | None  # its exit code; None: it did not end in time
    states: list[str | None]  # of each fault, what the run was at when it came; None: its moment did not come
    output: str


class Phases:
    """What the run's newest driver is at, by its timeline, to which a phase is written when it begins."""

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._attempt, self._at, self._rest = run_dir / "timeline", 0, 0, ""
        self.open, self.done = list[str](), 0
        """Phases that have not ended, and steps that have."""

    def read(self) -> None:
        """Take over what is new."""
        if (self._folder / f"driver.a{self._attempt + 1}.jsonl").is_file():
            self._attempt, self._at, self._rest, self.open = self._attempt + 1, 0, "", []
        path = self._folder / f"driver.a{self._attempt}.jsonl"
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._at)
            *lines, self._rest = (self._rest + file.read()).split("\n")
            self._at = file.tell()
        for record in map(json.loads, lines):
            if isinstance(record, dict):  # a process began
                self.open.clear()
                continue
            kind, lane, name, *more = record
            if lane or kind not in ("B", "X"):
                continue  # of another thread
            if kind == "B":
                self.open.append(name)
            elif name in self.open:
                self.open.remove(name)
            if name == "step":
                self.done = more[-1]["step"] - (kind == "B")

    def is_at(self, fault: Fault) -> bool:
        """Return whether the moment started."""
        return self.done >= fault.after_step and not MOMENTS[fault.moment].isdisjoint(self.open)

    def __str__(self) -> str:
        moments = [name for name, phases in MOMENTS.items() if not phases.isdisjoint(self.open)]
        return f"{moments[-1] if moments else 'between'} after step {self.done}"


class SupervisedRun:
    """A running command (`fusionrl train --supervise`), and all its descendants."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        """Start it in the repository's root; its console goes to the file `output`."""
        self.output_path = output
        self._mark = uuid.uuid4().hex
        paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
        with output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    MARK_VARIABLE: self._mark,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                },
                cwd=REPO,
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._family: dict[int, psutil.Process] = {}
        self._sweeper = threading.Thread(target=self._sweep, daemon=True)
        self._sweeper.start()

    # ------------------------------------------------------------------------------------ its processes
    def _sweep(self) -> None:
        while self.process.poll() is None:
            self._look()
            time.sleep(_SWEEP_S)

    def _look(self) -> None:
        """Note who belongs to the run: children's children, and who carries its mark; both have holes.

        A child whose parent died is not found through it; a process that gives itself a title (Ray's do) writes it over
        its environment.
        """
        with self._lock:
            roots = [psutil.Process(self.process.pid)] if psutil.pid_exists(self.process.pid) else []
            for process in [*roots, *self._family.values()]:
                try:
                    self._family |= {child.pid: child for child in process.children(recursive=True)}
                except psutil.Error:
                    continue
            needle = f"{MARK_VARIABLE}={self._mark}".encode()
            for pid in psutil.pids():
                try:
                    if pid not in self._family and needle in Path(f"/proc/{pid}/environ").read_bytes():
                        self._family[pid] = psutil.Process(pid)
                except (OSError, psutil.Error):
                    continue
            self._family = {pid: process for pid, process in self._family.items() if _lives(process)}

    def living(self) -> list[psutil.Process]:
        """Processes of the run that are alive; `is_running` knows a number that another process has taken over."""
        self._look()
        with self._lock:
            return [process for process in self._family.values() if process.pid != os.getpid() and _lives(process)]

    def left(self, grace_s: float = _GRACE_S) -> list[str]:
        """Wait until every process is gone; returns the command lines of those that stay, and ends them."""
        deadline = time.monotonic() + grace_s
        while (living := self.living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        lines = [f"{process.pid} {_command(process)[:120]}" for process in living]
        self._end(living)
        return lines

    def _end(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue

    def victim(self, name: str) -> int:
        """Return the process that gets the signal, the last of its kind; 0 where there is none."""
        with self._lock:
            family = list(self._family.values())
        if name in _COMMANDS:
            found = [process for process in family if re.search(_COMMANDS[name], _command(process))]
            if name == "router":  # it gives itself a title, so it is found by the program that minds it
                found = [child for minder in found for child in _children(minder)]
        else:  # not a child of it that writes to the same log
            writers = {process.pid: process for process in family if re.search(_LOGS[name], _stdout(process))}
            found = [process for process in writers.values() if _parent(process) not in writers]
        living = [process for process in found if process.pid != self.process.pid and _lives(process)]
        return max(living, key=lambda process: process.create_time()).pid if living else 0

    # ------------------------------------------------------------------------------------ its end
    def run(self, faults: Sequence[Fault], run_dir: Path, limit_s: float) -> End:
        """Send each signal when its moment comes, and wait for the end; what does not end within `limit_s` is ended."""
        phases, states = Phases(run_dir), dict[int, str]()
        deadline = time.monotonic() + limit_s
        code: int | None = None
        try:
            while (code := self.process.poll()) is None and time.monotonic() < deadline:
                phases.read()
                due = [number for number, fault in enumerate(faults) if number not in states and phases.is_at(fault)]
                if due and self._strike(faults[due[0]]):
                    phases.read()
                    states[due[0]] = str(phases)
                time.sleep(_LOOK_S)
        finally:  # also after Ctrl-C
            if self.process.poll() is None:
                self._end([*self.living(), psutil.Process(self.process.pid)])
                self.process.wait()
        return End(
            code, [states.get(number) for number in range(len(faults))], self.output_path.read_text(errors="replace")
        )

    def _strike(self, fault: Fault) -> bool:
        """Send the signal; returns whether the part was there."""
        time.sleep(fault.delay_s)
        if not (pid := self.victim(fault.victim)):
            self._look()
            pid = self.victim(fault.victim)
        try:
            if pid:
                os.kill(pid, getattr(signal, f"SIG{fault.signal}"))
            if pid and fault.victim == "driver" and fault.signal == "STOP":
                time.sleep(_FREEZE_S)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return False
        return bool(pid)


def check_end(end: End) -> list[str]:
    """Check that the run ended in time and well."""
    last = " | ".join(end.output.rstrip().splitlines()[-5:])
    if end.code is None:
        return [f"a hang: it did not end in time; it said: {last}"]
    return [f"exit code {end.code}: {last}"] if end.code else []


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0


def _stdout(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""
