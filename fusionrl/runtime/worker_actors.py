"""The processes of Buffer and trainers: each writes its output into its own file, then is the plain class."""

import asyncio
import gc
import os

from fusionrl.algorithms.estimators import Role
from fusionrl.base.imports import without_collections
from fusionrl.buffer.actor import BufferActor
from fusionrl.config.config import Config
from fusionrl.observe.hardware import resident_bytes
from fusionrl.plan.plan import Plan
from fusionrl.runtime.actor_process import (
    HOST,
    ActorProcess,
    ProcessHardware,
    ProcessSettings,
    log_to,
    memory_of_torch,
    record_host_memory,
)
from fusionrl.trainer.model_rank import ModelRank, SetupFacts
from fusionrl.trainer.policy import PolicyTrainer
from fusionrl.trainer.trainer_base import CriticTrainer, ProcessRewardTrainer, Profiled


class BufferWorker(ActorProcess, BufferActor):
    """The Buffer's actor process."""

    def __init__(
        self, config: Config, plan: Plan, run_dir: str, attempt: int, log: str, settings: ProcessSettings
    ) -> None:
        settings.apply()
        log_to(log, "buffer", config.run.log_level)
        # Each look at all objects takes a second with 20,000 samples in flight, and finds next to nothing.
        gc.set_threshold(50_000, 20, 20)
        super().__init__(config, plan, run_dir, attempt)

    async def hardware(self) -> dict[str, float]:
        """Return the host memory of this process and of the reward processes."""
        return record_host_memory(
            {HOST: float(await asyncio.to_thread(resident_bytes, os.getpid(), with_children=True))}
        )


class _TrainerProcess(ActorProcess, Profiled, ModelRank):
    """The process of a trainer rank, of whatever role. Megatron is imported here and nowhere in the driver."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        rank: int,
        run_dir: str,
        device_id: int,
        host: str,
        log: str | None,
        settings: ProcessSettings | None = None,
    ) -> None:
        if settings is not None:
            settings.apply()
        if log is not None:  # None: this is the driver's process
            log_to(log, f"{self.role or 'trainer'}-{rank}", config.run.log_level)
        with without_collections():
            import torch

        if plan.device == "cpu":  # a GPU is first touched in `setup`: engines may still be sizing their caches
            torch.set_num_threads(plan.train_num_threads)
        super().__init__(config, plan.trainer_plan(self.role), rank, run_dir, device_id)
        self.plan, self.host = plan, host
        self._ordinals = [device_id] if plan.device == "cuda" else []
        self._binds = settings is not None and settings.numa_affinity

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """See `ModelRank`. The threads that it starts stay on CPUs near its GPU."""
        self._hardware = ProcessHardware(self._ordinals, binds=self._binds)
        return super().setup(master_addr, master_port)

    def hardware(self) -> dict[str, float]:
        if self._hardware is None:
            return {}
        numbers = self._hardware.take()
        for ordinal in self._ordinals:
            numbers |= memory_of_torch(ordinal)
        return record_host_memory(numbers)

    def node_address(self) -> tuple[str, int]:
        """Rendezvous of the ranks, asked of rank 0: this node's address, and the port of a store made here."""
        from fusionrl.base.group_stores import create_group_store

        self._store = create_group_store(self.host, 60.0 * self.config.cluster.distributed_timeout_minutes)
        return self.host, self._store.port


class PolicyWorker(_TrainerProcess, PolicyTrainer):
    """A policy rank's actor process."""


class CriticWorker(_TrainerProcess, CriticTrainer):
    """A critic rank's actor process."""


class ProcessRewardWorker(_TrainerProcess, ProcessRewardTrainer):
    """The actor process of a rank of the process reward model."""


TRAINER_WORKERS: dict[Role | None, type[_TrainerProcess]] = {
    None: PolicyWorker,
    "critic": CriticWorker,
    "prm": ProcessRewardWorker,
}
