"""Killing one process of a run: the run's error has to name it."""

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from fusionrl.base.wording import LOG_END
from tests.e2e.launch import Launched


def writer_of(log: Path) -> int:
    """The process whose output is this file, not a child of it that writes there too: the Buffer, not a reward process.

    Ray gives its actors equal command lines.
    """
    writers = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, psutil.NoSuchProcess):  # it ended meanwhile
            if os.readlink(entry / "fd" / "1") == str(log):
                writers.append(psutil.Process(int(entry.name)))
    (writer,) = (process for process in writers if process.ppid() not in {other.pid for other in writers})
    return writer.pid


def kill_and_check(launched: Launched, folder: Path, is_time: Callable[[], bool], log: str, name: str) -> None:
    """Kill the process that writes `log` when it `is_time`: the run ends and names it, by `name`, in its error.

    Ray's and aiohttp's text stays in the log.
    """
    path = folder / "logs" / log
    with launched:
        launched.wait_for(is_time)
        os.kill(router_of(launched) if log == "router.log" else writer_of(path), signal.SIGKILL)
        assert launched.wait() == 1
    text = launched.output()
    message = text[text.index("failed: ") :]
    failure = json.loads((folder / "failure.a1.json").read_text())
    assert failure["process"] in name and failure["phase"] and failure["node"] == socket.gethostname()
    assert f"failed first: {failure['process']} (" in message and f'in "{failure["phase"]}"' in message
    assert text.count(LOG_END) <= 1, "the end of the log comes once"
    assert name in message.splitlines()[0], message
    assert f"Its log is {path}" in message
    assert "ActorDiedError" not in message and "ClientConnector" not in message
    assert message.rstrip().splitlines()[-1].startswith("logs: ")


def router_of(launched: Launched) -> int:
    """It gives itself a title, so it is found by the program that minds it."""
    (minder,) = launched.find(r"process_minder\.py .* fusionrl\.engines\.launch_router")
    (router,) = psutil.Process(minder).children()
    return router.pid


def stop_scheduler(launched: Launched, server: int) -> None:
    """Stop (SIGSTOP) the scheduler of an engine's server, which goes on to answer requests about itself."""
    children = psutil.Process(server).children(recursive=True)
    (scheduler,) = (child.pid for child in children if "scheduler" in "".join(child.cmdline()))
    os.kill(scheduler, signal.SIGSTOP)
