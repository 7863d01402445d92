"""What a run measures in its processes: hardware and speed of a step, profiles, and clocks of other machines.

The driver asks trainers, engines and the Buffer for hardware numbers when the training of a step ends, and reads the
answers at the end of the step. It leaves out a process that is dead or does not answer in time: a run neither waits nor
fails for these.
"""

import contextlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import psutil
import ray
from ray.actor import ActorHandle

from fusionrl.config.run import PROFILES, ProfileOrder
from fusionrl.observe import spans
from fusionrl.observe.formats import write_atomically
from fusionrl.observe.hardware import resident_bytes
from fusionrl.observe.spans import phase
from fusionrl.plan.costs import Work, train_flops
from fusionrl.plan.devices import peak_flops
from fusionrl.plan.plan import Plan
from fusionrl.runtime.actor_process import HOST
from fusionrl.runtime.buffer_handle import BufferHandle
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.supervisor import FAILURES, ActorRegistry
from fusionrl.runtime.trainers import TrainerGroups
from fusionrl.weights.remote_calls import Reference, get, wait

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0
_CLOCK_S = 10.0
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 60.0, 600.0  # a large trace takes minutes to write
_CLOSE_TIMEOUT_S = 60.0  # a run that is stopped may have little time left
_MEANS = ("utilisation", "power_w", "slowed")
_RAY = ("raylet", "gcs_server")


METRICS = """
train/patches | patches | Patches of the different images that were trained on: what --max-patches-per-gpu counts. |
    --multimodal-keys
train/image_share | share | FLOPs that the vision tower takes for these images, as a share of those that perf/mfu
    counts; forward passes alone where the tower is frozen. | --multimodal-keys
perf/mfu | share | Model FLOPs utilisation of the training: the FLOPs of forward and backward passes over all tokens
    that are trained on, prompts included, divided by what the trainers' devices could do in perf/time_train_s
    (--peak-tflops, or the data sheet's bf16). Log-prob passes and recomputation count as time, not as work; a critic
    or reward model likewise. | GPUs that the table has, or --peak-tflops
perf/train_tokens_per_s_per_device | tokens/s | Tokens that are trained on, prompts included, divided by
    perf/time_train_s and the policy's trainer devices. | runs that train
perf/generate_tokens_per_s_per_device | tokens/s | Response tokens of the rollout divided by perf/time_generate_s and
    the devices of the policy's engines. Under a pipeline that runs ahead, that time is the wait for the batch. | runs
    with engines
hardware/host_bytes/<group> | bytes | Resident host memory at the end of the step, added up over the group's
    processes: trainers; engines (server, schedulers, actor); the Buffer with the reward processes; the driver; Ray's
    own on the driver's node. Pages that processes share count for each.
"""


class HardwareMetrics:
    """Collects hardware numbers from the processes of a run."""

    def __init__(
        self,
        plan: Plan,
        trainers: TrainerGroups,
        engines: EnginePool,
        buffer: BufferHandle,
        file: Path,
        peak_tflops: float | None,
        asks: bool = True,
    ) -> None:
        """`file`: for the inventory. `asks`: whether there are processes to ask; without, there are speeds alone."""
        self._plan, self._trainers, self._engines, self._buffer, self._file = plan, trainers, engines, buffer, file
        self._peak = None if peak_tflops is None else peak_tflops * 1e12
        self._asks, self._is_listed, self._is_warned = asks, False, False
        self._pending: dict[str, list[ray.ObjectRef]] = {}
        self._ray_processes: list[psutil.Process] | None = None

    def begin(self) -> None:
        """Ask, and do not wait: when the training of a step has ended, so that the push hides the answers."""
        if not self._asks:
            return
        groups = self._groups()
        if not self._is_listed:
            self._list(groups)
        self._pending = {name: [actor.hardware.remote() for actor in group] for name, group in groups.items()}

    def measure(self, values: Mapping[str, float], work: Work) -> dict[str, float]:
        """Return the metrics of a step, whose times and counts are `values`, and which trained on `work`."""
        if not self._asks:
            return self._speeds(values, work)
        if not self._pending:
            self.begin()
        pending, self._pending = self._pending, {}
        metrics: dict[str, float] = {}
        for name, references in pending.items():
            metrics |= {f"hardware/{key}/{name}": value for key, value in pooled(_answers(references)).items()}
        return metrics | self._driver_memory() | self._speeds(values, work)

    def _driver_memory(self) -> dict[str, float]:
        if self._ray_processes is None:  # a look at all processes of the machine
            self._ray_processes = [child for child in psutil.Process().children(recursive=True) if _name(child) in _RAY]
        metrics = {"hardware/host_bytes/driver": float(resident_bytes(os.getpid()))}
        if self._ray_processes:
            metrics["hardware/host_bytes/ray"] = float(
                sum(resident_bytes(process.pid) for process in self._ray_processes)
            )
        return metrics

    def _groups(self) -> dict[str, list[ActorHandle]]:
        groups = {
            "trainers": [*self._trainers.policy, *self._trainers.auxiliaries],
            "engines": self._engines.everyone,
            "buffer": [self._buffer.actor] if self._buffer.is_started else [],
        }
        return {name: group for name, group in groups.items() if group}

    def _list(self, groups: Mapping[str, Sequence[ActorHandle]]) -> None:
        """Write the inventory, and take the peak of the trainers' GPUs from it; again the next time if any is late."""
        with_gpus = {name: group for name, group in groups.items() if name != "buffer"}
        pending = {name: [actor.hardware_facts.remote() for actor in group] for name, group in with_gpus.items()}
        inventory = {name: _answers(references) for name, references in pending.items()}
        late = [name for name, group in with_gpus.items() if len(inventory[name]) < len(group)]
        self._is_listed = not late
        if late and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s lacks some %s, which did not answer in time; asked again", self._file, " and ".join(late)
            )
        write_atomically(self._file, json.dumps(inventory, indent=2) + "\n")
        gpus = [gpu for facts in inventory.get("trainers", []) for gpu in facts["gpus"]]
        if self._peak is None and gpus:
            self._peak = peak_flops(str(gpus[0]["name"]), gpus[0]["memory_bytes"])

    def _speeds(self, values: Mapping[str, float], work: Work) -> dict[str, float]:
        """Tokens a second and device, the share of the devices' peak, and what images take of it."""
        plan, metrics = self._plan, {}
        train_s, generate_s = values.get("perf/time_train_s"), values.get("perf/time_generate_s")
        if plan.layout is not None and train_s and work.tokens:
            devices = len(self._trainers.policy) or plan.layout.world_size
            metrics["perf/train_tokens_per_s_per_device"] = work.tokens / train_s / devices
            images = None if plan.balance is None else plan.balance.images
            flops = train_flops(plan.shape, work, images)
            if images is not None and plan.shape.vision is not None:
                metrics["train/patches"] = float(sum(work.images) * plan.shape.vision.merge**2)
                metrics["train/image_share"] = sum(map(images, work.images)) / flops
            if self._peak is not None:
                metrics["perf/mfu"] = flops / (train_s * devices * self._peak)
        num_tokens = values.get("rollout/num_tokens")
        if plan.num_engines and generate_s and num_tokens:
            left_out = self._engines.left_out
            sizes = [len(devices) for index, devices in enumerate(plan.engine_bundles) if index not in left_out]
            devices = sum(sizes)  # engines of groups differ in size
            metrics["perf/generate_tokens_per_s_per_device"] = num_tokens / generate_s / devices
        return metrics


def pooled(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Numbers of a group of processes: sums of host memory, means of rates, and the largest of everything else."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for name, value in answer.items():
            columns[name].append(value)
    kinds: dict[str, Callable[[Sequence[float]], float]] = {HOST: sum} | dict.fromkeys(_MEANS, fmean)
    return {name: kinds.get(name, max)(column) for name, column in columns.items()}


def _answers(references: Sequence[ray.ObjectRef]) -> list[dict]:
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=_ANSWER_S)
    answers = []
    for reference in done:
        with contextlib.suppress(ray.exceptions.RayError):
            answers.append(ray.get(reference))
    return answers


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:  # it has ended
        return ""


class Profiling:
    """Begins a profile before a step and ends it after it, or after the last of a stretch. A profile that fails
    only logs a warning."""

    def __init__(
        self,
        order: ProfileOrder,
        trainers: TrainerGroups,
        engines: EnginePool,
        run_dir: Path,
        attempt: int,
        last_step: int | None = None,
    ) -> None:
        self._order, self._groups, self._pool, self._last_step = order, trainers, engines, last_step
        self._folder, self._attempt = run_dir.absolute() / PROFILES, attempt
        self._first_step = 0  # of the profile under way; 0: none is

    def begin(self, step: int) -> None:
        """Start the profilers if a step begins that --profile-steps names."""
        if self._first_step or not self._order.has(step):
            return
        self._first_step = step
        tool, folder = self._order.tool, str(self._folder)
        calls = [trainer.start_profile.remote(tool) for _, trainer in self._trainers()]
        for index, engine in self._engines():
            calls.append(engine.start_profile.remote(tool, folder, self._name(f"engine-{index}")))
        with phase("profile", step=step):
            self._wait(calls, _START_TIMEOUT_S, "begun")

    def end(self, step: int) -> None:
        continues = self._order.is_continuous and self._order.has(step + 1) and step != self._last_step
        if self._first_step and not continues:
            self._stop(step, _STOP_TIMEOUT_S)

    def close(self) -> None:
        """The run ends: write a profile of several steps that is under way."""
        if self._first_step:
            self._stop(self._first_step, _CLOSE_TIMEOUT_S)

    def _stop(self, step: int, timeout_s: float) -> None:
        tool = self._order.tool
        calls = [
            trainer.stop_profile.remote(tool, str(self._folder / self._name(f"trainer-{rank}")))
            for rank, trainer in self._trainers()
        ]
        calls += [engine.stop_profile.remote() for _, engine in self._engines()]
        with phase("profile", step=step):
            self._wait(calls, timeout_s, "ended")
        self._first_step = 0

    def _name(self, process: str) -> str:
        return f"step_{self._first_step:06d}.{process}.a{self._attempt}"

    def _trainers(self) -> list[tuple[int, ActorHandle]]:
        return [(rank, actor) for rank, actor in enumerate(self._groups.policy) if self._order.wants_trainer(rank)]

    def _engines(self) -> list[tuple[int, ActorHandle]]:
        engines = [(i, actor) for i, actor in enumerate(self._pool.engines) if i not in self._pool.left_out]
        return [(index, actor) for index, actor in engines if self._order.wants_engine(index)]

    def _wait(self, calls: Sequence[Reference[object]], timeout_s: float, action: str) -> None:
        for call in calls:
            try:
                if not wait([call], timeout=timeout_s)[0]:
                    raise RuntimeError(f"no answer within {timeout_s:g} s")
                get(call)
            except FAILURES as error:
                logger.warning("step %d: a profile could not be %s: %s", self._first_step, action, error)


class ClockOffsets:
    """Knows the actors on each other machine, once `find` has asked them all."""

    def __init__(self, registry: ActorRegistry) -> None:
        self._registry = registry
        self._elsewhere: dict[str, list[str]] = {}  # boot of a machine → names of actors

    def find(self) -> None:
        """Ask the actors of the run for their machine, and measure for the first time."""
        for name in [member.name for member in self._registry]:
            try:
                boot, _ = self._ask(name)
            except FAILURES as error:
                logger.warning("%s did not tell its clock: %s", name, error)
                continue
            if boot != spans.boot_id():
                self._elsewhere.setdefault(boot, []).append(name)
        self.measure()

    def measure(self) -> None:
        """Record the clock of each other machine, if the first of its actors answers; if not, ask another next time."""
        if (recorder := spans.recorder()) is None:
            return
        living = {member.name for member in self._registry}
        machines = {boot: [name for name in names if name in living] for boot, names in self._elsewhere.items()}
        self._elsewhere = {boot: names for boot, names in machines.items() if names}  # ranks may be left out
        for names in self._elsewhere.values():
            try:
                recorder.note_clock(*spans.measure_offset(partial(self._ask, names[0])))
            except FAILURES as error:
                names.append(names.pop(0))
                logger.warning("a machine's clock was not measured: %s", error)

    def _ask(self, name: str) -> tuple[str, int]:
        """Ask the actor that has this name now: a restarted engine keeps the name."""
        handle = next((member.handle for member in self._registry if member.name == name), None)
        if handle is None:
            raise RuntimeError(f"{name} is gone")
        return ray.get(handle.clock.remote(), timeout=_CLOCK_S)
