"""A trainer whose weights engines receive: what a rank does in a push, over the network or by files."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import EngineTarget, Feed
from fusionrl.plan.trained_parts import adapter_folders
from fusionrl.trainer.trainer_base import TrainerBase

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from fusionrl.models.shape import ModelShape
    from fusionrl.models.trainable import AdapterSpec
    from fusionrl.weights.adapters import MergeSums
    from fusionrl.weights.disk import DiskWriter
    from fusionrl.weights.gather import Exporter
    from fusionrl.weights.remote_calls import MergeLosses, SendReport, WriteReport
    from fusionrl.weights.send import WeightSender


class PushSource(TrainerBase):
    """A rank that takes part in weight pushes. The process that has it sets `plan` and `host`, its node's address."""

    plan: Plan
    host: str
    _sender: WeightSender | None = None
    _disk: DiskWriter | None = None

    @phase("prepare push")
    def prepare_push(self, targets: Sequence[EngineTarget], transport: str) -> None:
        """Do the part of a push that does not need paused engines."""
        import torch.distributed as dist

        from fusionrl.engines.engine import node_id
        from fusionrl.models.trainable import frozen_names, targeted_names
        from fusionrl.weights.send import WeightSender

        if self._sender is None:
            frozen = frozen_names(self.shape, self.frozen)
            if (spec := self._merged) is not None:
                frozen -= targeted_names(self.shape, spec)
            self._sender = WeightSender(
                rank=self.rank,
                device=self.plan.device,
                backend=self.plan.backend,
                host=self.host,
                exporter=self._exporter(),
                buffer_size=self.config.weights.update_weight_buffer_size,
                timeout_s=self.config.weights.update_weight_timeout_s,
                node_id=node_id(),
                object_group=dist.new_group(backend="gloo"),
                # The contents of weights that an engine has given away are undefined until they are pushed.
                frozen=frozenset() if self.plan.engines_give_memory else frozen,
            )
        self._sender.prepare(targets, transport)

    def push_weights(
        self, targets: Sequence[EngineTarget], feeds: Sequence[Feed], version: int, transport: str
    ) -> SendReport:
        """Send this rank's part of the weights, after `prepare_push`."""
        assert self._sender is not None, "prepare_push comes first"
        with phase("push", version=version):
            return self._sender.send(targets, feeds, version, transport)

    @phase("push adapters")
    def push_adapters(self, targets: Sequence[EngineTarget], version: int, timeout_s: float) -> SendReport:
        """Send the adapters; collective over the trainers, of which rank 0 sends."""
        from fusionrl.models.hf_io import gather_params, iter_hf_tensors
        from fusionrl.weights.adapters import engine_files, send_files
        from fusionrl.weights.remote_calls import new_send_report

        spec = self.adapter_spec
        assert spec is not None, "the run has adapters"
        if self._sender is not None:  # engines have the weights, and few will ask for them again
            self._sender.release()
        self.reload(only_weights=True)
        gather_params(self.trained.chunks)
        adapters = {}
        for name in adapter_folders(self.config):
            with self.lent_adapter(name):
                tensors = iter_hf_tensors(self.trained.chunks, self.trained.transformer, self.shape, adapters=spec)
                if self.rank == 0:
                    adapters[name] = engine_files(tensors, spec, self.shape, self._engine_dtype)
                else:
                    collections.deque(tensors, maxlen=0)
        if self.rank != 0:
            return new_send_report()
        return send_files(adapters, targets, version, timeout_s)

    @phase("write weights")
    def write_weights(self, version: int, engines: Sequence[ActorHandle], is_full: bool = False) -> WriteReport:
        """As `DiskWriter.write`, or `write_full`; then call the user's function, for which `engines` are."""
        disk, path = self._disk_writer(), self.config.weights.custom_update_weight_post_write_path
        written = disk.write_full(version) if is_full else disk.write(version)
        if path is not None:
            from fusionrl.config.hooks import call_hook

            field = "custom_update_weight_post_write_path"
            call_hook(field, path, self.hooks.args(), written["folder"], engines)
        return written

    def drop_weights(self, keep: int | None) -> None:
        """Remove the files of versions other than `keep`; asked of rank 0 alone."""
        if self._disk is not None:
            self._disk.drop(keep)

    def weight_checksums(self, tp_size: int) -> list[dict[str, str]]:
        """Return the checksums that each rank of an engine of `tp_size` should have; collective over the trainers."""
        from fusionrl.models.convert import held
        from fusionrl.weights.checksums import CPU_MULTIPLE, engine_checksums, hash_tensor, hash_words

        # A draft model has further layers in other tensors; a stale one is slow and never wrong.
        # With sums of its own: those of the exporter are a push's.
        exporter = replace(self._exporter(self.shape.trunk), merge_sums=None)
        tensors = held(exporter.full(), self.plan.quantization)
        hash_of, multiple = (hash_tensor, CPU_MULTIPLE) if self.plan.device == "cpu" else (hash_words, 1)
        whole_tower = bool(self.config.passthrough.sglang.get("mm_enable_dp_encoder"))
        return engine_checksums(tensors, self.shape, tp_size, hash_of, multiple, whole_tower)

    def merge_losses(self) -> MergeLosses:
        """Return what rounding has lost of merged weights since the last call; not a collective."""
        return self._merge_sums.take()

    @cached_property
    def _merge_sums(self) -> MergeSums:
        from fusionrl.weights.adapters import MergeSums

        return MergeSums()

    @property
    def _merged(self) -> AdapterSpec | None:
        """The adapters that a push adds to the weights."""
        return self.adapter_spec if self.plan.lora_push == "merged" else None

    @property
    def _engine_dtype(self) -> str:
        return "float32" if self.plan.rollout_dtype == "fp32" else "bfloat16"

    def _exporter(self, shape: ModelShape | None = None) -> Exporter:
        from fusionrl.weights.gather import Exporter

        return Exporter(
            self.trained.chunks,
            self.trained.transformer,
            shape or self.plan.pushed_shape,
            self.layout,
            self.rank,
            self._engine_dtype,
            self.device,
            reload=lambda: self.reload(only_weights=True),
            quantization=self.plan.quantization,
            merged=self._merged,
            merge_sums=self._merge_sums if self._merged is not None else None,
        )

    def _disk_writer(self) -> DiskWriter:
        """The writer, made at the first call."""
        if self._disk is not None:
            return self._disk
        import torch.distributed as dist

        from fusionrl.models.hf_save import as_stored, published_reader
        from fusionrl.weights.disk import DiskOptions, DiskWriter

        weights, world_size = self.config.weights, self.layout.world_size
        total = self.plan.pushed_shape.num_parameters * (4 if self.plan.rollout_dtype == "fp32" else 2)
        assert self.config.model.hf_checkpoint is not None
        options = DiskOptions(
            folder=weights.update_weight_disk_dir or str(Path(self.run_dir, "weights")),
            source=self.config.model.hf_checkpoint,
            keeps_base=weights.update_weight_mode == "delta",
            encoding=weights.update_weight_delta_encoding,
            checksum=weights.update_weight_delta_checksum,
            # A small model, too, is work for every rank.
            max_bytes=min(weights.update_weight_buffer_size, -(-total // world_size)),
        )
        group = dist.new_group(backend="gloo")
        whole, reader = self._exporter().whole, published_reader(options.source)
        export = whole if reader is None else lambda: as_stored(whole(), reader)
        self._disk = DiskWriter(options, rank=self.rank, world_size=world_size, export=export, group=group)
        return self._disk
