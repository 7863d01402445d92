"""Names of `slime.utils`: `misc`, `async_utils`, `accelerator`, `eval_config`, and miles' `file_arg_utils`."""

from __future__ import annotations

import asyncio
import base64
import socket
import subprocess
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fusionrl.base.environment import child_environment
from fusionrl.config import hooks
from fusionrl.config.hook_files import find_beside
from fusionrl.rollout.event_loop import process_loop, run

if TYPE_CHECKING:
    import torch

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


@dataclass(eq=False)  # as any object: it may be in a set, and what it holds is not compared
class Box:
    """Holds one object: Ray leaves a reference alone that is inside another object."""

    inner: object


class AsyncLoopThread:
    """Runs coroutines on the event loop that lives as long as the process (`fusionrl.rollout.event_loop`)."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = process_loop()

    def run(self, coro: Coroutine[object, object, T]) -> T:
        """Run a coroutine there and wait for its result."""
        return run(coro)


get_async_loop = AsyncLoopThread


def decode_int32_meta_array(meta_info: Mapping[str, object], keys: str | Iterable[str]) -> torch.Tensor | None:
    """Return the array of whole numbers, [n] int32, that SGLang puts into `meta_info` under the first of `keys` there.

    It is base64 text, bytes or any sequence; None where no key is there, or its value is null.
    """
    import torch  # seconds, and 200 MB: only where it is needed; so below

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


# ------------------------------------------------------------------------------------------------ accelerator
def device_type() -> str:
    """Return `cuda` or `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(index: int | None = None) -> str:
    """Return a device's name as torch writes it."""
    return device_type() if index is None or device_type() == "cpu" else f"cuda:{index}"


def device(index: int | None = None) -> torch.device:
    """Return a device."""
    import torch

    return torch.device(device_name(index))


def current_device() -> int | torch.device:
    """Return the number of the current GPU, or the CPU."""
    return _of_gpu("current_device") if device_type() == "cuda" else device()


def set_device(index: int) -> None:
    """Make a GPU the current one."""
    _of_gpu("set_device", index)


def _of_gpu(name: str, *values: object, without_gpu: object = None) -> Any:
    """Return what the function of torch.cuda of that name returns; without a GPU `without_gpu`."""
    import torch

    return getattr(torch.cuda, name)(*values) if torch.cuda.is_available() else without_gpu


synchronize, current_stream = partial(_of_gpu, "synchronize"), partial(_of_gpu, "current_stream")
mem_get_info = partial(_of_gpu, "mem_get_info", without_gpu=(0, 0))


def autocast(**options: Any) -> torch.autocast:
    """Return a block of mixed precision."""
    import torch

    return torch.autocast(device_type(), **options)


def is_musa_available() -> bool:
    """Return False."""
    return False


is_musa_environment = is_musa_available


# ------------------------------------------------------------------------------------------------ adapters
LORA_ADAPTER_NAME = "policy"


def is_lora_enabled(args: Namespace) -> bool:
    """Return whether adapters are trained."""
    return bool(args.lora_rank)


# ------------------------------------------------------------------------------------------------ --eval-config
PSEUDO_FILE_PREFIX = "base64:"
_Attributes = Mapping[str, tuple[str, ...]]
# Setting of a set → names in `args`, of which the first that is given counts.
DATASET_RUNTIME_SPECS: _Attributes = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    **{
        name: (f"eval_{name}", f"rollout_{name}")
        for name in ("temperature", "top_p", "top_k", "max_response_len", "stop", "stop_token_ids", "min_new_tokens")
    },
}


def resolve_file_arg(value: str) -> str:
    """Return the text of a file, or the text that `value` encodes after the prefix `base64:`."""
    if value.startswith(PSEUDO_FILE_PREFIX):
        return base64.b64decode(value.removeprefix(PSEUDO_FILE_PREFIX), validate=True).decode()
    return Path(value).read_text(encoding="utf-8")


def _apply_dataset_field_overrides(
    args: Namespace, dataset_cfg: MutableMapping[str, object], defaults: Mapping[str, object], spec_names: _Attributes
) -> None:
    """Fill in the settings of a set that it lacks: from the defaults of the file, else from the flags."""
    for name, attributes in spec_names.items():
        values = (getattr(args, attribute, None) for attribute in attributes)
        of_flags = next((value for value in values if value is not None), None)
        dataset_cfg.setdefault(name, defaults.get(name, of_flags))
