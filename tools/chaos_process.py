"""One attempt of a run: start it, kill a part of it at a chosen moment, wait for its end, and see what is left."""

import os
import re
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[1]
MARK_VARIABLE = "FUSIONRL_CHAOS_MARK"  # a name with TOKEN is taken for a secret, and not passed on
VICTIMS = ("driver", "buffer", "engine", "trainer")
# The moment's name → the line that the console shows when it begins; of `any`, a step's own line.
MOMENTS = {
    "any": "",
    "generating": "generating",
    "training": "training",
    "push": "pushing weights",
    "checkpoint": "saving a checkpoint",
}
# First line of the message with which a run ends whose part was killed. A driver that is killed says nothing.
MESSAGES = {
    "buffer": r"the Buffer died: its process {pid}\b",
    "engine": r"engine \d+ .*the process ended \(killed by SIGKILL\)",
    "trainer": r"trainer rank \d+ died: its process {pid}\b",
}
_STEP = re.compile(r"step (\d+)/\d+\b")
_LOOK_S = 0.002  # at the console: a push of a tiny model takes 0.03 s
_SWEEP_S = 0.3  # between two looks at all processes
_GRACE_S = 20.0  # for all processes of a run to be gone after its end
_LOG_OF = {"buffer": r"/buffer\.a\d+\.log", "trainer": r"/trainer-\d+\.a\d+\.log"}


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when: `delay_s` after the moment starts for the first time with `after_step` finished."""

    victim: str
    moment: str
    after_step: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.victim} at {self.moment} after step {self.after_step} + {self.delay_s * 1000:.0f} ms"


@dataclass
class End:
    """The end of an attempt."""

    code: int | None  # its exit code; None: it did not end in time
    state: str | None  # what the console said when the kill was sent; None: it ended before the moment came
    pid: int  # of the process that was killed
    seconds: float  # from the kill to the end
    output: str
    missed: str | None = None  # who was to be killed, and was not found when the moment came


class Console:
    """The output of the run so far, read as it comes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open(encoding="utf-8", errors="replace")
        self._rest = ""
        self.last_step = -1
        """The last step that it said to be finished."""
        self.status = ""
        """Its last line about what it does now; empty right after a step's line."""

    def read(self) -> None:
        """Take over what is new."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            if match := _STEP.match(line):
                self.last_step, self.status = int(match[1]), ""
            elif line in MOMENTS.values():
                self.status = line

    def is_at(self, kill: Kill) -> bool:
        """Return whether the moment started; `any` begins with the line of its step."""
        return self.last_step >= kill.after_step and kill.moment in ("any", self.moment)

    @property
    def moment(self) -> str:
        """The name of the moment that it is in."""
        return next(name for name, line in MOMENTS.items() if line == self.status)


class Attempt:
    """A running command (`fusionrl train`), and all its descendants."""

    def __init__(self, command: list[str], output: Path) -> None:
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

    def living(self) -> list[psutil.Process]:
        """Processes of the run that are alive; `is_running` knows a number that another process has taken over."""
        self._look()
        with self._lock:
            processes = [process for process in self._family.values() if process.pid != os.getpid()]
        return [process for process in processes if process.is_running() and _status(process) != psutil.STATUS_ZOMBIE]

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
        """Return the process to kill; 0 where there is none (any more)."""
        if name == "driver":
            return self.process.pid
        with self._lock:
            family = list(self._family.values())
        for process in family:
            if name == "engine":
                is_it = re.match(r"\S+ -m fusionrl\.engines\.launch_server ", _command(process))
            else:
                is_it = re.search(_LOG_OF[name] + "$", _stdout(process))
            if is_it:
                return process.pid
        return 0

    # ------------------------------------------------------------------------------------ its end
    def run(self, kill: Kill | None, limit_s: float, end_limit_s: float) -> End:
        """Wait for the end; with `kill` send SIGKILL at its moment. What does not end in time is ended here.

        limit_s      for an attempt that ends by itself, or to the moment
        end_limit_s  from the kill to the end
        """
        console, pid, state = Console(self.output_path), None, None
        began = time.monotonic()
        deadline = began + limit_s
        try:
            if kill is not None and (pid := self._wait_until(console, kill, deadline)):
                console.read()  # for what it does now
                state = f"{console.moment} after step {console.last_step}"
                os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                deadline = began + end_limit_s
            code: int | None = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also after Ctrl-C
            seconds = time.monotonic() - began
            if self.process.poll() is None:
                self._end([*self.living(), psutil.Process(self.process.pid)])
                self.process.wait()
        missed = kill.victim if kill is not None and pid == 0 else None
        return End(code, state, pid or 0, seconds, self.output_path.read_text(errors="replace"), missed)

    def _wait_until(self, console: Console, kill: Kill, deadline: float) -> int | None:
        """Wait for the moment, and return the process to kill.

        0: it is not there. None: the run has ended, or the deadline has come, before the moment.
        """
        pid = 0
        while self.process.poll() is None and time.monotonic() < deadline:
            console.read()
            if not pid and console.last_step >= 0:
                pid = self.victim(kill.victim)  # before the moment: it takes longer than a push
            if console.is_at(kill):
                time.sleep(kill.delay_s)
                if not pid:
                    self._look()
                    pid = self.victim(kill.victim)
                return pid if self.process.poll() is None else None
            time.sleep(_LOOK_S)
        return None


def check_end(end: End, victim: str | None, is_complete: bool) -> list[str]:
    """Check how an attempt ended: in time, with the right exit code, and one message that names who died.

    victim       who was killed; None: no process
    is_complete  all its steps are done: then it may have ended well, as the kill came too late
    """
    if end.missed is not None:
        return [f"nothing was killed: no process of {end.missed} was found when its moment came"]
    if end.code is None:
        since = "the kill" if end.state else "its start"
        return [f"no end {end.seconds:.0f} s after {since}; it said: {_last(end.output)}"]
    if end.code == 0:
        return [] if is_complete else [f"exit code 0 without all steps: {_last(end.output)}"]
    if victim is None:
        return [f"exit code {end.code}, though nothing was killed: {_last(end.output)}"]
    violations = []
    expected = -signal.SIGKILL if victim == "driver" else 1
    if end.code != expected:
        violations.append(f"exit code {end.code} after the death of {victim}, not {expected}")
    if "Traceback (most recent call last)" in end.output:
        violations.append("a traceback on the console")
    messages = re.findall(r"^(?:failed|error): .*", end.output, re.MULTILINE)
    if victim == "driver":
        return violations + [f"a message of a driver that was killed: {text}" for text in messages]
    if len(messages) != 1:
        return [*violations, f"{len(messages)} messages, not one: {messages}"]
    pattern = MESSAGES[victim].format(pid=end.pid)
    if not re.search(pattern, messages[0]):
        violations.append(f"the message does not name the {victim} ({end.pid}): {messages[0]}")
    return violations


def _last(output: str) -> str:
    return " | ".join(output.rstrip().splitlines()[-5:])


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return str(psutil.STATUS_ZOMBIE)


def _stdout(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""
