"""The actors' processes: each writes its output into its own file of the run's folder, then is the plain class.

Everything a process prints, and what C++ libraries write to its descriptors, lands in that file.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from fusionrl.base.environment import take_secrets
from fusionrl.buffer.actor import BufferActor
from fusionrl.config.config import Config
from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.observe.log import setup_logging, write_whole_lines
from fusionrl.plan.auxiliary import Role
from fusionrl.plan.plan import Plan


@dataclass(frozen=True)
class Settled:
    """What an actor's process takes over before anything else: the rights of its files, and secrets."""

    umask: int
    hook_secrets: dict[str, str] = field(default_factory=dict, repr=False)

    def apply(self) -> None:
        """Take it over. On a cluster that the run has joined, the process has the environment of that cluster."""
        os.umask(self.umask)
        take_secrets(self.hook_secrets)


def _log_to(path: str, role: str, level: str = "info") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # less the umask
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    write_whole_lines()
    setup_logging(level, Path(path), role=role, terminal=False)


class EngineWorker(EngineActor):
    """An engine's actor process."""

    def __init__(self, spec: EngineSpec, log: str, settled: Settled | None = None) -> None:
        if settled is not None:
            settled.apply()
        _log_to(log, f"{spec.role}-{spec.index}")
        super().__init__(spec)


class BufferWorker(BufferActor):
    """The Buffer's actor process."""

    def __init__(
        self, config: Config, plan: Plan, run_dir: str, attempt: int, endpoints: Any, log: str, settled: Settled
    ) -> None:
        settled.apply()
        _log_to(log, "buffer", config.run.log_level)
        super().__init__(config, plan, run_dir, attempt, endpoints)


class TrainerWorker:
    """A trainer rank's actor process. Megatron is imported here and nowhere in the driver."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        rank: int,
        run_dir: str,
        device_id: int,
        host: str,
        log: str,
        role: Role | None = None,
        settled: Settled | None = None,
    ) -> None:
        if settled is not None:
            settled.apply()
        _log_to(log, f"{role or 'trainer'}-{rank}", config.run.log_level)
        import torch

        if plan.device == "cuda":
            torch.cuda.set_device(device_id)
        else:
            torch.set_num_threads(plan.train_num_threads)
        from fusionrl.trainer.actor import TrainerActor

        layout = plan.auxiliary.layout if role is not None and plan.auxiliary else plan.layout
        assert layout is not None
        self._plan, self._config, self._host, self._rank = plan, config, host, rank
        self._run_dir = run_dir
        self._trainer = TrainerActor(config, layout, rank, run_dir, device_id, role)
        self._sender: Any = None
        self._writer: Any = None

    def node_address(self) -> tuple[str, int]:
        """Rendezvous of the ranks, asked of rank 0: this node's address, and the port of a store made here."""
        from fusionrl.base.stores import create_group_store

        self._store = create_group_store(self._host, 60.0 * self._config.cluster.distributed_timeout_minutes)
        return self._host, self._store.port

    def setup(self, master_address: str, master_port: int) -> dict[str, Any]:
        """Process groups, model, optimizer."""
        return self._trainer.setup(master_address, master_port)

    def prepare_push(self, targets: list[Any], transport: str) -> None:
        """This rank's part of a weight push, as far as the engines need not stand for it."""
        if self._sender is None:
            self._sender = self._make_sender()
        self._sender.prepare(targets, transport)

    def push_weights(self, targets: list[Any], feeds: list[Any], version: int, transport: str) -> dict[str, Any]:
        """This rank's part of a weight push, after `prepare_push`."""
        return self._sender.send(targets, feeds, version, transport)

    def _make_sender(self) -> Any:
        import torch.distributed as dist

        from fusionrl.sync.send import WeightSender

        return WeightSender(
            rank=self._rank,
            device=self._plan.device,
            backend=self._plan.backend,
            host=self._host,
            exporter=self._exporter(),
            buffer_size=self._config.weights.update_weight_buffer_size,
            timeout_s=self._config.weights.update_weight_timeout_s,
            node_id=ray.get_runtime_context().get_node_id(),
            object_group=dist.new_group(backend="gloo"),
        )

    def write_weights(self, version: int, engines: list[Any]) -> dict[str, Any]:
        """This rank's part of a version's files, and the user's function after it; see `DiskWriter.write`."""
        if self._writer is None:
            self._writer = self._make_writer()
        return self._written(self._writer.write(version), engines)

    def write_full_weights(self, version: int, engines: list[Any]) -> dict[str, Any]:
        """The same of a full version in place of a delta; see `DiskWriter.write_full`."""
        return self._written(self._writer.write_full(version), engines)

    def drop_weights(self, keep: int | None) -> None:
        """Remove the files of versions other than `keep`; asked of rank 0 alone."""
        if self._writer is not None:
            self._writer.drop(keep)

    def _make_writer(self) -> Any:
        import torch.distributed as dist

        from fusionrl.sync.disk import DiskOptions, DiskWriter

        weights, world_size = self._config.weights, dist.get_world_size()
        total = self._plan.shape.num_parameters * (4 if self._plan.rollout_dtype == "fp32" else 2)
        assert self._config.model.hf_checkpoint is not None
        options = DiskOptions(
            folder=weights.update_weight_disk_dir or str(Path(self._run_dir, "weights")),
            source=self._config.model.hf_checkpoint,
            keeps_base=weights.update_weight_mode == "delta",
            encoding=weights.update_weight_delta_encoding,
            checksum=weights.update_weight_delta_checksum,
            # A small model, too, is work for every rank.
            max_bytes=min(weights.update_weight_buffer_size, -(-total // world_size)),
        )
        group = dist.new_group(backend="gloo")
        return DiskWriter(options, rank=self._rank, world_size=world_size, export=self._export, group=group)

    def _written(self, written: dict[str, Any], engines: list[Any]) -> dict[str, Any]:
        if (path := self._config.weights.custom_update_weight_post_write_path) is not None:
            from fusionrl.config.hooks import call_hook
            from fusionrl.trainer.actor import hook_args

            args = hook_args(self._config, self._rank, self._run_dir)
            call_hook("custom_update_weight_post_write_path", path, args, written["folder"], engines)
        return written

    def _exporter(self) -> Any:
        from fusionrl.sync.export import Exporter

        trainer = self._trainer
        return Exporter(
            trainer.trained.chunks,
            trainer.trained.transformer,
            trainer.shape,
            trainer.layout,
            self._rank,
            "float32" if self._plan.rollout_dtype == "fp32" else "bfloat16",
            trainer.device,
            reload=lambda: trainer.reload(only_weights=True),
            quantization=self._plan.quantization,
        )

    def _export(self) -> Any:
        """What the engines load, (Hugging Face name, full tensor) of every weight in their precision; collective."""
        return self._exporter().whole()

    def weight_checksums(self, tp_size: int) -> list[dict[str, str]]:
        """What each rank of an engine of `tp_size` should hold; collective over the trainers."""
        from fusionrl.models.fp8 import held
        from fusionrl.sync.checksums import CPU_MULTIPLE, engine_checksums, hash_tensor, hash_words

        tensors = held(self._exporter().full(), self._plan.quantization)
        hash_of, multiple = (hash_tensor, CPU_MULTIPLE) if self._plan.device == "cpu" else (hash_words, 1)
        return engine_checksums(tensors, self._plan.shape, tp_size, hash_of, multiple)

    def offload(self, keep_weights: bool = False) -> int:
        """Give memory away while engines generate; see `TrainerActor.offload`."""
        return self._trainer.offload(keep_weights)

    def train(self, rollout_id: int, shard: Any, columns: Any = ()) -> dict[str, float]:
        """The optimizer steps of one rollout."""
        return self._trainer.train(rollout_id, shard, columns)

    def sample_columns(self, rollout_id: int) -> Any:
        """Return what training found out about single samples; see `TrainerActor.sample_columns`."""
        return self._trainer.sample_columns(rollout_id)

    def values(self, shard: Any) -> tuple[None, Any]:
        """A critic's values, as a second object: the driver waits for the first and never sees them."""
        return None, self._trainer.values(shard)

    def process_rewards(self, rollout_id: int, shard: Any) -> tuple[dict[str, float], Any]:
        """A process reward model's steps of one rollout, and the rewards it then gives, as of `values`."""
        return self._trainer.process_rewards(rollout_id, shard)

    def prepare(self, rollout_id: int, shard: Any, columns: Any) -> tuple[None, Any]:
        """Advantages from a critic's values, for the `train` that follows; the critic's targets, as of `values`."""
        return None, self._trainer.prepare(rollout_id, shard, columns)

    def score(self, shard: Any) -> list[Any]:
        """Log-probs of the responses, forward only."""
        return self._trainer.score(shard)

    def evaluate_loss(self, shard: Any) -> dict[str, float]:
        """Validation loss, forward only."""
        return self._trainer.evaluate_loss(shard)

    def begin_save(self, path: str, rollout_id: int) -> None:
        """Settle what a Megatron checkpoint holds."""
        self._trainer.begin_save(path, rollout_id)

    def is_saved(self) -> bool:
        """Whether its files are written."""
        return self._trainer.is_saved()

    def finish_save(self) -> None:
        """Publish it."""
        self._trainer.finish_save()

    def load(self, path: str) -> dict[str, Any]:
        """Restore a Megatron checkpoint."""
        return self._trainer.load(path)

    def save_hf(self, path: str) -> None:
        """Hugging Face folder."""
        self._trainer.save_hf(path)

    def state_hashes(self) -> dict[str, str]:
        """Hashes of weights, optimizer state and RNG."""
        return self._trainer.state_hashes()
