"""The end of a run that was stopped or has failed: what failed first and where, what is saved, how to continue.

All of it is read from the error and the run's folder, so it holds however the run ended. `spans.phase` has noted the
phase and the step on the error, and `Actors` its process, before the processes ended.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from fusionrl.base.sockets import LOOPBACK
from fusionrl.base.wording import LOG_END, headline
from fusionrl.config.config import Config
from fusionrl.config.run_parts import changes_weights, saves
from fusionrl.observe.formats import write_atomically
from fusionrl.observe.metrics import read_metrics
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.observe.spans import failed_in
from fusionrl.runtime.checkpoints import Checkpoints
from fusionrl.runtime.supervisor import origin_of, root_cause


@dataclass(frozen=True)
class Failure:
    """The content of `failure.a<attempt>.json`."""

    attempt: int
    exit_code: int
    error: str  # without the end of a log
    process: str  # that failed first: "trainer rank 3", "engine 0", "the driver"
    pid: int | None  # None: of a server, whose number is not known
    node: str
    phase: str | None  # of the driver
    step: int | None
    time: str  # when the first error left that phase
    checkpoint: str | None  # the newest finished one
    last_samples: int | None  # step of the newest training samples in rollouts/
    command: str | None  # continues the run; None where nothing is saved

    @classmethod
    def of(
        cls, error: BaseException, message: str, exit_code: int, config: Config, path: Path, attempt: int
    ) -> Failure:
        """Collect the facts of an `error`, printed as `message`, that has ended the run in `path`."""
        links = _links(error)
        origin = next(filter(None, map(origin_of, links)), None)
        place = next(filter(None, map(failed_in, links)), None)
        node = LOOPBACK if origin is None else origin.node
        return cls(
            attempt=attempt,
            exit_code=exit_code,
            error=headline(message),
            process="the driver" if origin is None else origin.process,
            pid=os.getpid() if origin is None else origin.pid,
            node=socket.gethostname() if node == LOOPBACK else node,
            phase=None if place is None else place.phase,
            step=None if place is None else place.step,
            time=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(None if place is None else place.time_s)),
            checkpoint=_saved(path)[1] or None,
            last_samples=_last_samples(path),
            command=_resume_command(path.absolute()) if saves(config) and not config.checkpoint.no_save else None,
        )

    def describe(self) -> str:
        """Return two lines: what failed first, and what is saved."""
        process = f"{self.process} ({f'process {self.pid} ' if self.pid else ''}on {self.node})"
        phase = "" if self.phase is None else f', in "{self.phase}"'
        step = "" if self.step is None else f" of step {self.step}"
        saved = [f"checkpoints/{self.checkpoint}"] if self.checkpoint else []
        saved += [f"samples up to step {self.last_samples} in rollouts/"] if self.last_samples else []
        return f"failed first: {process}{phase}{step}, {self.time}\nsaved: {', '.join(saved) or 'nothing'}"

    def write(self, path: Path) -> Path:
        """Write it into the run's folder, and return the file."""
        file = path / f"failure.a{self.attempt}.json"
        write_atomically(file, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return file


def _links(error: BaseException) -> list[BaseException]:
    """Return the errors that led to this one, in the order in which they were raised; it is the last."""
    links = [error]
    while (cause := links[0].__cause__ or links[0].__context__) is not None and cause not in links:
        links.insert(0, cause)
    return links


def full_traceback(error: BaseException) -> str:
    """Return the traceback of an error. The end of a log, which several of its messages may quote, comes once."""
    text = "".join(traceback.format_exception(error))
    quote = str(root_cause(error)).partition(LOG_END)[2]
    if not quote.strip():
        return text
    head, *others = text.split(quote)
    return head + quote + "(as above)".join(others)


def end_message(config: Config, path: Path, attempt: int) -> str:
    """Say after which step the run in `path` ended, what is lost, and how to resume it; "" in modes without saves."""
    if not saves(config):
        return ""
    saved, name = _saved(path)
    finished = _finished(path, attempt, saved)
    where = f" after step {finished}" if finished else " before the end of the first step"
    if config.checkpoint.no_save:
        return f"{where}; nothing is saved (--no-save)"
    on_from = name or "the start"
    if finished > saved:
        are_lost = f"steps {saved + 1}-{finished} are lost" if finished > saved + 1 else f"step {finished} is lost"
        more = "" if config.checkpoint.save_interval else " (--save-interval N saves every N steps)"
        text = f"; {are_lost}: --resume continues from {on_from}{more}"
    elif saved:
        text = f"; {name} has all of it: --resume continues from there"
    else:
        text = f"; nothing is {'trained' if changes_weights(config) else 'saved'} yet: --resume begins at step 1"
    return f"{where}{text}\nto continue: {_resume_command(path)}"


def _resume_command(path: Path) -> str:
    return f"fusionrl train --run-dir {shlex.quote(str(path))} --resume"


def _saved(path: Path) -> tuple[int, str]:
    """The number of steps in the newest finished checkpoint, and its name; 0 and "" without one."""
    try:
        latest = Checkpoints(path / "checkpoints").latest()
    except (ValueError, OSError):  # damaged: a resume says so
        latest = None
    return (0, "") if latest is None else (latest.rollout_id + 1, latest.path.name)


def _last_samples(path: Path) -> int | None:
    try:
        return max((file.step for file in list_rollouts(path, "train")), default=None)
    except OSError:
        return None


def _finished(path: Path, attempt: int, saved: int) -> int:
    """Return the number of finished steps, with those of the checkpoint that this attempt resumed."""
    try:
        rows = read_metrics(path)
    except (ValueError, OSError):
        rows = []
    return max((row["step"] for row in rows if row["attempt"] == attempt), default=saved)
