"""GPUs by the names of CUDA_VISIBLE_DEVICES: one mapping for placement, trainers, engines and CUDA IPC.

A process numbers the GPUs that it sees from 0, in the order of the list. These numbers (ordinals) are what torch and
SGLang take; the list has names: numbers of the machine, UUIDs, or slices of a GPU (MIG). Ray gives out the names of
its node's list, and all processes of a run on a node keep that list, so an ordinal means the same GPU to all of them.

A process that sees several MIG slices can use the first alone. Its list is therefore that one slice, and its ordinal 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """One GPU, or MIG slice, as the processes of its node find it.

    position  its place among those of the node
    ordinal   its number in a process that uses it
    alone     the list of a process that uses it, where that differs from its node's; None: it keeps the node's
    """

    position: int
    ordinal: int
    alone: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that uses it."""
        return {} if self.alone is None else {VARIABLE: self.alone}


def visible_names(value: str | None) -> tuple[str, ...] | None:
    """Return the names in a value of CUDA_VISIBLE_DEVICES, up to the first that is none; None: all GPUs are visible."""
    if value is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in value.split(",")):
        if not (name.isdigit() or name.startswith(("GPU-", "MIG-"))):
            break  # CUDA reads no further; "-1" is the usual way to hide what follows
        names.append(name)
    if len({int(name) if name.isdigit() else name for name in names}) < len(names):
        raise ValueError(f"{VARIABLE}={value}: a GPU is named twice, with which CUDA sees none; name each once")
    return tuple(names)


def countable(value: str | None) -> int | None:
    """Return how many GPUs the list names where only it can tell; None: the machine can, and numbers may be wrong."""
    names = visible_names(value)
    return len(names) if names and not all(name.isdigit() for name in names) else None


def locate(value: str | None, name: str) -> Gpu:
    """Return the GPU that Ray calls `name`, on a node whose Ray was started with this value of CUDA_VISIBLE_DEVICES."""
    names, name = visible_names(value), name.strip()
    if names is None:
        return Gpu(int(name), int(name))
    if name not in names:
        raise ValueError(
            f"{VARIABLE}={value}: Ray gives out the GPU {name!r}, which CUDA does not see there; start Ray with a list"
            " of GPUs that the node has, or without"
        )
    position = names.index(name)
    return Gpu(position, 0, name) if name.startswith("MIG-") else Gpu(position, position)


def nth(value: str | None, number: int) -> Gpu:
    """Return the GPU at this place of the list, for a run without Ray."""
    names = visible_names(value)
    if names is not None and number >= len(names):
        raise ValueError(f"{VARIABLE}={value}: it names {len(names)} GPUs, and the run needs GPU {number}; name more")
    return locate(value, str(number) if names is None else names[number])


def refuse_slices(gpus: Sequence[Gpu], num_trainers: int, engine_size: int, transport: str | None) -> None:
    """Refuse what slices of a GPU (MIG) cannot do: NCCL connects no two of them."""
    if all(gpu.alone is None for gpu in gpus):
        return
    cure = "MIG slices are not connected by NCCL; take whole GPUs"
    if num_trainers > 1:
        raise ValueError(f"--actor-num-gpus-per-node: {num_trainers} trainers on MIG slices: {cure}, or one trainer")
    if engine_size > 1:
        raise ValueError(f"--rollout-num-gpus-per-engine {engine_size} on MIG slices: {cure}, or 1")
    if transport == "broadcast":
        raise ValueError(f"--update-weight-transport broadcast on MIG slices: {cure}, or disk, or --colocate")
