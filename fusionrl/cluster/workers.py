"""The processes of Buffer and trainers: each writes its output into its own file, then is the plain class."""

from __future__ import annotations

from fusionrl.algorithms.estimators import Role
from fusionrl.base.imports import without_collections
from fusionrl.buffer.actor import BufferActor
from fusionrl.cluster.actor_process import Settled, log_to
from fusionrl.config.config import Config
from fusionrl.plan.plan import Plan
from fusionrl.trainer.critic import CriticTrainer
from fusionrl.trainer.model_rank import ModelRank
from fusionrl.trainer.policy import PolicyTrainer
from fusionrl.trainer.process_reward import ProcessRewardTrainer


class BufferWorker(BufferActor):
    """The Buffer's actor process."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        run_dir: str,
        attempt: int,
        log: str,
        settled: Settled,
    ) -> None:
        settled.apply()
        log_to(log, "buffer", config.run.log_level)
        super().__init__(config, plan, run_dir, attempt)


class _TrainerProcess(ModelRank):
    """The process of a trainer rank, of whatever role. Megatron is imported here and nowhere in the driver."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        rank: int,
        run_dir: str,
        device_id: int,
        host: str,
        log: str,
        settled: Settled | None = None,
    ) -> None:
        if settled is not None:
            settled.apply()
        log_to(log, f"{self.role or 'trainer'}-{rank}", config.run.log_level)
        with without_collections():
            import torch

        if plan.device == "cuda":
            torch.cuda.set_device(device_id)
        else:
            torch.set_num_threads(plan.train_num_threads)
        super().__init__(config, plan.trainer_plan(self.role), rank, run_dir, device_id)
        self.plan, self.host = plan, host

    def node_address(self) -> tuple[str, int]:
        """Rendezvous of the ranks, asked of rank 0: this node's address, and the port of a store made here."""
        from fusionrl.base.stores import create_group_store

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
