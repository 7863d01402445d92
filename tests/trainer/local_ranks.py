"""Processes on this machine that hold one trainer rank after the other, without Ray: starting one costs seconds."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar
from unittest.mock import patch

from fusionrl.algorithms.estimators import Role
from fusionrl.base.group_stores import create_group_store
from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import trainer_plan

TIMEOUT_S = 120.0
T = TypeVar("T")


class Failed(Exception):
    """An error that a worker raised: the name of its type, its message, and where."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


def serve(connection: Connection, environment: dict[str, str]) -> None:
    """Start the actors that are asked for, and call their methods, or functions on them.

    `environment` is the starter's, as a fork has that of the process that it is forked from.
    """
    os.environ.clear()
    os.environ.update(environment)
    warnings.filterwarnings("ignore")
    faulthandler.enable()  # pytest enables it in its own process only
    import tests.trainer.rank_imports  # noqa: F401  # Megatron; a fork has it already
    from fusionrl.trainer.policy import PolicyTrainer
    from fusionrl.trainer.trainer_base import CriticTrainer, ProcessRewardTrainer

    trainers: dict[str | None, Any] = {None: PolicyTrainer, "critic": CriticTrainer, "prm": ProcessRewardTrainer}
    gc.freeze()  # each actor's end collects garbage; what was imported is none
    _Groups()
    _share_writer()
    actor = None
    while True:
        try:
            command, args = connection.recv()  # imports the modules of functions that are sent
            if command == "exit":
                return
            if command == "start":
                if actor is not None:
                    actor.shutdown()
                config, plan, rank, address, port, role = args
                actor = trainers[role](config, plan, rank, "unused")
                result = actor.setup(address, port)
            else:
                what, *values = args
                result = getattr(actor, what)(*values) if isinstance(what, str) else what(actor, *values)
            connection.send((True, result))
        except BaseException as error:  # the parent raises it
            connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class _Groups:
    """A rank stays among the ranks that it has met, and in the groups of each layout that it had: half a second each.

    Ranks meet anew where the starter gives them another store: with other ranks, or after a failure.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        from fusionrl.trainer import process_groups

        self._groups_of_megatron = vars(parallel_state)
        self._unset, self._layouts = self._groups(), {}
        self._address: tuple[str, int] | None = None
        self._join, self._leave = process_groups.join_ranks, process_groups.leave_ranks
        self._seed = process_groups.seed_rank
        process_groups.join_ranks, process_groups.leave_ranks = self.join, lambda: None

    def _groups(self) -> dict[str, Any]:
        return {name: value for name, value in self._groups_of_megatron.items() if name.isupper()}

    def join(
        self, layout: TrainerLayout, rank: int, device: Any, address: tuple[str, int], *, seed: int, **options: Any
    ) -> None:
        if address != self._address:
            self._leave()
            self._address, self._layouts = address, {}
        self._groups_of_megatron.update(self._layouts.get(layout, self._unset))
        if layout in self._layouts:
            self._seed(seed + 100 * layout.coordinates(rank).pp)
            return
        has_met = patch("torch.distributed.init_process_group") if self._layouts else contextlib.nullcontext()
        with has_met:
            self._join(layout, rank, device, address, seed=seed, **options)
        self._layouts[layout] = self._groups()


def _share_writer() -> None:
    """Give a rank's actors one process that writes checkpoints, whose imports take seconds, until it dies."""
    from fusionrl.trainer.checkpoint_io import WriterProcess

    start, started = WriterProcess.__init__, []

    def share(self: WriterProcess) -> None:
        if not started or started[-1]._process.poll() is not None:
            start(self)
            started.append(self)
        vars(self).update(vars(started[-1]))

    WriterProcess.__init__, WriterProcess.close = share, lambda self: None


def _context() -> Any:
    """Make processes as forks of one that has imported Megatron, 3 s of a core; CUDA does not survive a fork."""
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.rank_imports"])
    return context


class LocalRanks:
    """`count` processes; rank i of a group of trainers is in process i, and a rank that is alone in the last.

    Methods raise Failed where a process raised, TimeoutError where one did not answer in time, and EOFError or
    ConnectionError where one died, `run_on` a RuntimeError. The next `start` replaces the group's processes then.
    """

    def __init__(self, count: int) -> None:
        self._context, self._environment = _context(), dict(os.environ)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            pipe, process = self._new_process()
            self._pipes.append(pipe)
            self._processes.append(process)
        self._locks = [threading.Lock() for _ in range(count)]  # of `run_on`
        self._met: list[tuple[int, Any]] = [(0, None)] * count  # of each: with how many ranks, in which store
        self.world_size, self._group, self._layout = 0, range(0), TrainerLayout(1)
        self._is_broken = False  # a call of `run_on` found a rank dead or hanging

    def _new_process(self) -> tuple[Connection, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self._environment), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _end_group(self) -> str:
        """End processes of which one died or hangs; return how each ended, and what they said before."""
        pipes, processes = ([all_[index] for index in self._group] for all_ in (self._pipes, self._processes))
        said = []
        for pipe in pipes:
            with contextlib.suppress(OSError, EOFError):
                while pipe.poll():
                    said.append(pipe.recv())
        errors = [Failed(*value) for good, value in said if not good]
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return "\n".join([f"exit codes of the ranks (None: it lived): {codes}", *map(str, errors)])

    def _all(self, commands: Sequence[tuple[str, tuple]]) -> list[Any]:
        pipes = [self._pipes[index] for index in self._group]
        answers = []
        try:
            for pipe, command in zip(pipes, commands, strict=True):
                pipe.send(command)
            for pipe in pipes:
                if not pipe.poll(TIMEOUT_S):
                    raise TimeoutError(f"a trainer worker did not answer {commands[0][:2]} in {TIMEOUT_S} s")
                answers.append(pipe.recv())
        except Exception as error:  # whatever it is, answers may be left in the pipes
            if isinstance(error, EOFError | ConnectionError):  # its pipe closes before its end is known
                wait([self._processes[index].sentinel for index in self._group], 10.0)
            for line in [str(Failed(*value)) for good, value in answers if not good]:
                error.add_note(line)
            error.add_note(self._end_group())
            raise
        failed = [value for good, value in answers if not good]
        if failed:
            if len(pipes) > 1:  # collectives may have been left in the middle
                self._met = [(0, None)] * len(self._met)
            raise Failed(*failed[0])
        return [value for _, value in answers]

    def start(self, config: Config, layout: TrainerLayout | None = None, role: Role | None = None) -> list[dict]:
        """A fresh group of actors in the first `layout.world_size` processes."""
        import torch

        if self._is_broken:
            self._end_group()
            self._is_broken = False
        self._layout = layout = layout or TrainerLayout(1)
        self.world_size = layout.world_size

        configured, detected = config.cluster.device, "cuda" if torch.cuda.is_available() else "cpu"
        device: Literal["cpu", "cuda"] = "cuda" if "cuda" in (configured, detected) and configured != "cpu" else "cpu"
        plan = trainer_plan(config, layout, device, len(os.sched_getaffinity(0)))
        host, ranks = "127.0.0.1", range(layout.world_size)
        self._group = ranks if len(ranks) > 1 else range(len(self._pipes) - 1, len(self._pipes))
        for index in self._group:
            if not self._processes[index].is_alive():
                self._pipes[index].close()
                self._pipes[index], self._processes[index] = self._new_process()
                self._met[index] = (0, None)
        met = {self._met[index] for index in self._group}
        size, store = met.pop()
        if met or size != layout.world_size:  # the store of a group is the parent's, which outlives the actors
            store = create_group_store(host, TIMEOUT_S)
        facts = self._all([("start", (config, plan, rank, host, store.port, role)) for rank in ranks])
        for index in self._group:
            self._met[index] = (layout.world_size, store)
        return facts

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method with the same arguments on every rank."""
        return self._all([("run", (method, *args))] * self.world_size)

    def run(self, function: Callable[..., T], *args: object) -> list[T]:
        """Run `function(actor, *args)` on every rank."""
        return self._all([("run", (function, *args))] * self.world_size)

    def run_on(self, rank: int, function: Callable[..., object], *args: object) -> object:
        """Run `function(actor, *args)` on one rank; ranks that work together are asked from a thread each.

        Calls of one rank come one after the other, also after one whose caller stopped waiting.
        """
        pipe = self._pipes[self._group[rank]]
        try:
            with self._locks[rank]:
                pipe.send(("run", (function, *args)))
                if not pipe.poll(TIMEOUT_S):
                    raise TimeoutError(f"trainer worker {rank} did not answer in {TIMEOUT_S} s")
                good, value = pipe.recv()
        except TimeoutError:
            self._is_broken = True
            raise
        except (EOFError, OSError) as error:
            self._is_broken = True
            raise RuntimeError(f"trainer worker {rank} is dead") from error
        if not good:
            raise Failed(*value)
        return value

    def on_shards(
        self, what: str | Callable[..., Any], shards: Sequence[TrainShard], *args: object, rollout_id: int | None = None
    ) -> list[Any]:
        """Call a method, or run a function, with the shard of each rank before `args`, and the rollout before both."""
        assert len(shards) == self._layout.dp
        first = () if rollout_id is None else (rollout_id,)
        own = [shards[self._layout.dp_rank(rank)] for rank in range(self.world_size)]
        return self._all([("run", (what, *first, shard, *args)) for shard in own])

    def train(self, shards: Sequence[TrainShard], layout: TrainerLayout | None = None, rollout_id: int = 0) -> dict:
        """Train on one shard a data-parallel rank; rank 0's metrics."""
        assert layout in (None, self._layout)
        return self.on_shards("train", shards, rollout_id=rollout_id)[0]

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):  # it died
                pipe.send(("exit", ()))
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
