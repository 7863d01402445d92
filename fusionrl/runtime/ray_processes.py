"""The processes that Ray starts for a local cluster: only those that a run uses, in groups of their own."""

import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ray import _raylet as raylet
from ray._private import services, workers
from ray._private.node import Node

_raylet: types.ModuleType = raylet  # compiled, without annotations
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Starters of the autoscaler, of what prints actors' output in the driver, and of the dashboard's server."""
_DASHBOARD_AGENT, _RUNTIME_ENV_AGENT = "--dashboard_agent_command", "--runtime_env_agent_command"
_SLEEPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("ray_agent_stub.py")))
_WORKER, _WORKER_PROGRAM = "--python_worker_command", str(Path(workers.__path__[0], "default_worker.py"))
_STARTER = ("-I", "-S", str(Path(__file__).with_name("worker_starter.py")))
_SETUP_PROGRAM, _SETUP = "setup_worker.py", str(Path(__file__).with_name("ray_setup_worker.py"))
_AGENT_PORTS = (
    _raylet.METRICS_AGENT_PORT_NAME,
    _raylet.METRICS_EXPORT_PORT_NAME,
    _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
)
_NO_PORT = -1  # what Ray's own agent says where the packages of a dashboard are not installed


@contextmanager
def only_what_is_used(dashboard: bool) -> Iterator[None]:
    """Start Ray within it: in process groups of its own, and without the processes that a run does not use.

    `timeout`, a shell or a scheduler sends SIGTERM to the command's whole group. The command then ends Ray; if
    Ray were dead by then, each of the command's calls would wait for a minute.

    The cluster has one node and actors write their own logs, so without a dashboard three of its processes, and two
    agents of a raylet, cost 4 s of a core for nothing. Ray has no options for it. One agent makes the environments of
    `runtime_env`; the run's actors have none, and for a user's function a sleeper listens and becomes that agent.
    """
    popen, start_raylet = services.ConsolePopen, Node.start_raylet

    def start(command: Sequence[str], *args: object, **options: object) -> subprocess.Popen[bytes]:
        command = [_sleeper(word, dashboard) for word in command]
        return popen(command, *args, process_group=0, **options)

    def start_without_ports(node: Node, *args: object, **options: object) -> None:
        for name in _AGENT_PORTS:
            _raylet.persist_port(node.get_session_dir_path(), node._node_id, name, _NO_PORT)
        start_raylet(node, *args, **options)

    unused: dict[str, Callable[..., None]] = {}
    if not dashboard:
        unused = {name: lambda node, **options: None for name in _UNUSED if hasattr(Node, name)}
        unused["start_raylet"] = start_without_ports
    originals = {name: getattr(Node, name) for name in unused}
    services.ConsolePopen = start
    for name, function in unused.items():
        setattr(Node, name, function)
    try:
        yield
    finally:
        services.ConsolePopen = popen
        for name, function in originals.items():
            setattr(Node, name, function)


def _sleeper(word: str, dashboard: bool) -> str:
    """Return a word of a raylet's command, with a sleeper for an agent, and workers that may be forks."""
    flag, _, program = word.partition("=")
    if flag == _WORKER:  # with an environment of its own, a worker is started by the second program
        word = word.replace(str(Path(_WORKER_PROGRAM).with_name(_SETUP_PROGRAM)), _SETUP)
        return word.replace(_WORKER_PROGRAM, f"{subprocess.list2cmdline(_STARTER)} {_WORKER_PROGRAM}")
    if flag == _RUNTIME_ENV_AGENT:
        return f"{flag}={subprocess.list2cmdline([*_SLEEPER, _raylet.RUNTIME_ENV_AGENT_PORT_NAME])} {program}"
    if flag == _DASHBOARD_AGENT and not dashboard:
        return f"{flag}={subprocess.list2cmdline(_SLEEPER)}"
    return word
