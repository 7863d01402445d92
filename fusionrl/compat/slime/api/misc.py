"""Small helpers of `slime.utils.misc` and `slime.utils.async_utils`."""

from __future__ import annotations

import asyncio
import base64
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch

from fusionrl.base.environment import child_environment
from fusionrl.config import hooks
from fusionrl.config.hook_files import find_beside
from fusionrl.rollout.event_loop import process_loop, run

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def load_function(path: str) -> Any:
    """Return what a path names: a function, or any object, as a list of tools is.

    Packages next to a hook's file are found as well: `examples.agents.solve`.

    Raises:
        ValueError: the module cannot be imported, or has no such name.
    """
    return hooks.load_object(path if ":" in path else find_beside(path))


class SingletonMeta(type):
    """A metaclass: a class has one object, made at its first call; later calls return it whatever they are given."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the class's one object."""
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]

    def clear_instances(cls) -> None:
        """Forget the objects of all classes of this metaclass."""
        SingletonMeta._instances.clear()


class Box:
    """Holds one object, as `inner`: Ray leaves a reference alone that is inside another object."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    @property
    def inner(self) -> object:
        """The object."""
        return self._inner


class AsyncLoopThread:
    """Runs coroutines on the event loop that lives as long as the process (`fusionrl.rollout.event_loop`)."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = process_loop()

    def run(self, coro: Coroutine[object, object, T]) -> T:
        """Run a coroutine there and wait for its result."""
        return run(coro)


def get_async_loop() -> AsyncLoopThread:
    """Return a runner on the process's event loop."""
    return AsyncLoopThread()


def decode_int32_meta_array(meta_info: Mapping[str, object], keys: str | Iterable[str]) -> torch.Tensor | None:
    """Return the array of whole numbers, [n] int32, that SGLang puts into `meta_info` under the first of `keys` there.

    It is base64 text, bytes or any sequence; None where no key is there, or its value is null.
    """
    names = [keys] if isinstance(keys, str) else keys
    value: Any = next((meta_info[name] for name in names if name in meta_info), None)
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return torch.frombuffer(bytearray(value), dtype=torch.int32)
    return torch.as_tensor(value, dtype=torch.int32).reshape(-1).cpu()


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a command of bash, which gets no secrets of the environment; return what it printed if that is captured.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    env = child_environment("reward-worker")
    done = subprocess.run(["bash", "-c", cmd], check=True, capture_output=capture_output, text=True, env=env)
    return done.stdout if capture_output else None


def get_current_node_ip() -> str:
    """Return the address of this machine, by which others of the cluster reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing: it picks a route
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Return whether something is due after rollout `rollout_id`, counted from 0.

    Due is every `interval` rollouts, at the end of each epoch, and after the last rollout; without `interval`, never.
    """
    if interval is None:
        return False
    number = rollout_id + 1
    ends_epoch = num_rollout_per_epoch is not None and number % num_rollout_per_epoch == 0
    return number == num_rollout or number % interval == 0 or ends_epoch


def group_by(iterable: Iterable[V], key: Callable[[V], K] | None = None) -> dict[Any, list[V]]:
    """Return the items by key (default: the item itself), in the order in which they come."""
    groups: dict[Any, list[V]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups
