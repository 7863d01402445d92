"""One stage of the proof: a command in a process group of its own, at most two minutes, and figures read from it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

END_S = 20.0  # for a command to end its own processes


class Failed(Exception):
    """The stage ran, and did not show what it should; says what."""


@dataclass(frozen=True)
class Setting:
    """Values that the commands of stages are made of."""

    folder: Path  # of the stage alone, empty
    task: Path  # the quickstart: model, train.jsonl
    rehearses: bool  # on a CPU, at tiny sizes: bounds on figures do not hold

    @property
    def device(self) -> str:
        """ "cuda" or "cpu"."""
        return "cpu" if self.rehearses else "cuda"


Figures = dict[str, object]
Read = Callable[[Setting, int, str], Figures]
"""(setting, exit status, output) → figures. Raises Failed."""


@dataclass(frozen=True)
class Stage:
    """A stage."""

    name: str  # of it, on the command line and in its folder
    rows: tuple[str, ...]  # beginnings of the rows of docs/results/gpu-results.md that it fills in
    command: Callable[[Setting], list[str]]  # what it runs
    read: Read  # its figures
    num_gpus: int = 1  # that it needs
    packages: tuple[str, ...] = ()  # that it needs in addition to those of a run
    variables: tuple[str, ...] = ()  # of the environment that name what it needs
    limit_s: float | None = None  # seconds that it may take; None: those of the command line


@dataclass
class Result:
    """The outcome of a stage: "passed", "failed" or "skipped", and why."""

    stage: str
    status: str
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    why: str = ""


def missing(stage: Stage, num_gpus: int, has_package: Callable[[str], bool], rehearses: bool) -> str | None:
    """Say why this machine cannot run the stage; None: it can. A rehearsal needs no GPU."""
    absent = [name for name in stage.packages if not has_package(name)]
    if absent and not rehearses:
        return f"not installed: {', '.join(absent)}"
    unset = [name for name in stage.variables if name not in os.environ]
    if unset and not rehearses:
        return f"not in the environment: {', '.join(unset)}"
    if stage.num_gpus > num_gpus and not rehearses:
        return f"needs {stage.num_gpus} GPUs, and this machine shows {num_gpus}"
    return None


def run_stage(stage: Stage, setting: Setting, limit_s: float, environ: Mapping[str, str]) -> Result:
    """Run it. What it prints is in its folder, as output.txt."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    path, start = setting.folder / "output.txt", time.monotonic()
    with open(path, "wb") as output:
        process = subprocess.Popen(
            stage.command(setting), stdout=output, stderr=subprocess.STDOUT, env=dict(environ), start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            why = f"no end after {limit_s:.0f} s; the last line: {_last_line(path)}"
            return Result(stage.name, "failed", time.monotonic() - start, why=why)
        except BaseException:
            _end(process)
            raise
    seconds = time.monotonic() - start
    try:
        figures = stage.read(setting, code, path.read_text(errors="replace"))
    except (Failed, OSError, ValueError, KeyError, IndexError) as error:  # files that are not there, or are cut off
        why = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        return Result(stage.name, "failed", seconds, why=f"{why} (exit status {code}; {_last_line(path)})")
    return Result(stage.name, "passed", seconds, figures)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command's own group alone: first politely, so that a run ends its engines and Ray."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "it printed nothing"
