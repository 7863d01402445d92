"""Logging: who speaks on the terminal, who only in the file."""

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionrl.observe.logs import LIBRARIES, quiet_libraries, setup_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger, state in zip(loggers, before, strict=True):
        logger.level, logger.propagate, logger.handlers = state
    logging.captureWarnings(False)


def test_a_worker_writes_each_line_once_and_whole(tmp_path: Path) -> None:
    """Its stdout and stderr are the file itself; a kill must not lose what was printed before it."""
    file = tmp_path / "trainer-0.a1.log"
    code = f"""
import logging, os, signal, warnings
from fusionrl.runtime.actor_process import log_to
log_to({str(file)!r}, "trainer-0")
print("printed by a hook")
logging.getLogger("my_hook").info("logged by a hook")
warnings.warn("a warning", stacklevel=1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    lines = file.read_text().splitlines()
    assert lines.count("printed by a hook") == sum("a warning" in line for line in lines) == 1
    (logged,) = (line for line in lines if "logged by" in line)
    assert logged.split(" ", 2)[2] == "trainer-0 INFO my_hook: logged by a hook"


def test_lines_of_two_processes_stay_whole(tmp_path: Path) -> None:
    """A print is one write, with PYTHONUNBUFFERED and within Ray's processes, whose stream is Ray's own."""
    code = """
import sys
if sys.argv[1][0] == "r":
    from ray._private.utils import Unbuffered
    sys.stdout = Unbuffered(sys.stdout)
from fusionrl.observe.logs import write_whole_lines
write_whole_lines()
print("ready", file=sys.stderr, flush=True)
sys.stdin.readline()
for _ in range(3000):
    print("printed by " + sys.argv[1])
"""
    names, pipe = ("r" * 30, "p" * 30), subprocess.PIPE
    with (tmp_path / "log").open("a") as log:
        commands = [[sys.executable, "-u", "-c", code, name] for name in names]
        started = [subprocess.Popen(command, stdin=pipe, stdout=log, stderr=pipe) for command in commands]
        for process in started:
            process.stderr.readline()
        for process in started:
            process.stdin.write(b"go\n")
            process.stdin.close()
        assert [process.wait() for process in started] == [0, 0]
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(set(lines)) == [f"printed by {name}" for name in sorted(names)] and len(lines) == 6000


def test_ours_everywhere_theirs_in_the_file(tmp_path: Path) -> None:
    lines: list[str] = []
    file = tmp_path / "logs" / "driver.log"
    setup_logging("info", file, role="driver", console=lines.append)
    logging.getLogger("fusionrl.buffer").info("rollout %d", 12)
    logging.getLogger("fusionrl.buffer").debug("hidden")
    logging.getLogger("my_reward").warning("slow")
    logging.getLogger("httpx").info("HTTP 200")
    logging.getLogger("ray.worker").warning("ray noise")
    logging.getLogger("megatron.core").error("a rank died")
    warnings.warn("deprecated", UserWarning, stacklevel=1)
    texts = [line.split(" ", 1)[1] for line in lines]
    assert texts == ["driver  rollout 12", "driver  WARNING slow", "driver  ERROR a rank died"]
    written = file.read_text()
    shown = ("driver INFO fusionrl.buffer: rollout 12", "ray.worker: ray noise", "deprecated")
    assert [part in written for part in (*shown, "HTTP 200", "hidden")] == [True] * 3 + [False] * 2


def test_a_second_set_up_replaces_the_first(tmp_path: Path) -> None:
    first: list[str] = []
    second: list[str] = []
    setup_logging("INFO", tmp_path / "a.log", console=first.append)
    setup_logging("DEBUG", tmp_path / "b.log", role="100 % trainer", console=second.append)
    logging.getLogger("fusionrl").debug("once")
    logging.getLogger("fusionrl").error("the reward failed", exc_info=KeyError("reward"))
    assert first == [] and len(second) == 2 and "KeyError: 'reward'" in second[1]
    assert not (tmp_path / "a.log").exists() and (tmp_path / "b.log").read_text().count("once") == 1


def test_a_full_disk_keeps_no_log_from_being_replaced(tmp_path: Path) -> None:
    """A record that found no room stays in the stream, and closing it tries once more."""
    (tmp_path / "full.log").symlink_to("/dev/full")
    setup_logging("info", tmp_path / "full.log")
    logging.getLogger("fusionrl.x").warning("no room for this")
    setup_logging("info", tmp_path / "driver.log")
    logging.getLogger("fusionrl.x").warning("but for this")
    assert "but for this" in (tmp_path / "driver.log").read_text()


def test_a_library_that_brings_its_own_handler_is_quiet_again(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    setup_logging("INFO", None, console=lines.append)
    library = logging.getLogger("transformers")
    library.addHandler(logging.StreamHandler())
    library.propagate, library.level = False, logging.INFO
    quiet_libraries()
    library.warning("noise")
    assert lines == [] and "noise" not in capsys.readouterr().err
