"""Launching the command line in tests, and counting what is left of it."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fusionrl import cli
from fusionrl.observe.glossary import undocumented
from fusionrl.observe.rollouts import list_rollouts
from tests.e2e.strangers import command_of
from tests.warm_start import ForkedDriver

TOKEN_VARIABLE = "FUSIONRL_TEST_TOKEN"


@dataclass
class Launched:
    """A running `fusionrl train`; every process of it carries a token in its environment.

    As a context manager it kills a run that has not ended, and then checks that nothing is left.
    """

    process: subprocess.Popen[str] | ForkedDriver
    output_path: Path
    token: str

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.kill()
        if error is None:
            self.assert_nothing_left()

    def kill(self) -> None:
        """Kill every process of a run that has not ended."""
        for pid in self.living() if self.process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def wait(self, timeout_s: float = 400.0) -> int:
        """Exit code; a run that does not end is killed and fails the test with its output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end after {timeout_s} s:\n{self.output()[-3000:]}") from None

    def living(self) -> list[int]:
        """Processes with the token that are alive."""
        needle = f"{TOKEN_VARIABLE}={self.token}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z" and needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue
        return found

    def assert_nothing_left(self, grace_s: float = 60.0) -> None:
        """Every process of the run is gone, within `grace_s` seconds of the driver's end."""
        deadline = time.monotonic() + grace_s
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = {pid: command_of(pid) for pid in left}
        assert not left, f"processes left behind: {names}"

    def find(self, pattern: str) -> list[int]:
        """Living processes of the run whose command line matches."""
        return [pid for pid in self.living() if re.search(pattern, command_of(pid))]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 400.0, look_s: float = 0.1) -> None:
        """Wait until `condition`, while the run lives; look every `look_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended first:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.output()[-3000:]}"
            time.sleep(look_s)


def launch(arguments: list[str], folder: Path, **env: str) -> Launched:
    """Start `fusionrl train` with `arguments` from the repository's root, its processes as forks where it may be so."""
    token = uuid.uuid4().hex
    output = folder / f"output-{token[:6]}.txt"
    environment = {**os.environ, TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1", **env}
    argv, root = ["train", *arguments], Path(__file__).parents[2]
    with output.open("w") as file, contextlib.chdir(root):
        try:
            process: subprocess.Popen[str] | ForkedDriver = ForkedDriver(
                argv, file.fileno(), environment, folder / f"status-{token[:6]}"
            )
        except (OSError, KeyError):  # a cold start, or a variable with which imports must be made anew
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", *argv],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
    return Launched(process, output, token)


def run(arguments: list[str], folder: Path, *, code: int = 0, timeout_s: float = 400.0, **env: str) -> Launched:
    """Launch, wait, and check the exit code and that nothing is left."""
    launched = launch(arguments, folder, **env)
    found = launched.wait(timeout_s)
    assert found == code, f"exit code {found}, expected {code}:\n{launched.output()[-3000:]}"
    launched.assert_nothing_left()
    return launched


def printed_by(*arguments: str | Path) -> str:
    """What a short `fusionrl` command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main([str(argument) for argument in arguments]) == 0
    return output.getvalue()


def metrics_of(run_dir: Path, own: Collection[str] = ()) -> list[dict]:
    """Every whole line of metrics.jsonl; fails for a metric that no entry of the glossary describes.

    own: metrics of the test's own functions.
    """
    path = run_dir / "metrics.jsonl"
    whole, _, _ = path.read_text().rpartition("\n") if path.is_file() else ("", "", "")  # the run may write the next
    rows = [json.loads(line) for line in whole.splitlines()]
    unknown = undocumented({name for row in rows for name in row} - set(own))
    assert not unknown, (
        f"{path} has metrics that no entry describes: {unknown}; declare them in METRICS of the module "
        "that computes them, and run: python -m fusionrl.cli metrics > docs/reference/metrics.md. "
        "A test's own functions: metrics_of(…, own=…)"
    )
    return rows


def undocumented_files(run_dir: Path) -> list[str]:
    """Files of a run's folder, outside of checkpoints, that no row of docs/reference/run-folder.md describes."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    patterns = [re.sub(r"<\w+>", "*", name) for row in rows for name in re.findall(r"`([^`]+)`", row)]
    files = [str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()]
    return [
        file
        for file in files
        if not any(
            fnmatch.fnmatchcase(file, pattern) or (pattern.endswith("/") and fnmatch.fnmatchcase(file, pattern + "*"))
            for pattern in patterns
        )
    ]


def train_steps(run_dir: Path) -> list[tuple[int, int]]:
    """(attempt, step) of every line that reports training."""
    return [(row["attempt"], row["step"]) for row in metrics_of(run_dir) if "train/loss" in row]


def samples_of_step(folder: Path, step: int) -> list[dict]:
    """The samples that the first attempt trained in this step."""
    path = folder / "rollouts" / f"step_{step:06d}.train.a1.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_prompts(folder: Path) -> list[str]:
    """The prompt of each group that was trained, of a step that ran twice the later time."""
    files = [found for found in list_rollouts(folder) if found.kind == "train"]
    rows = [json.loads(line) for found in files for line in found.path.read_text().splitlines()]
    return [row["prompt"] for row in rows[::4]]
