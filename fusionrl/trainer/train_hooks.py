"""A user's functions at the borders between the stages of a training step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, call_hook, flag_of
from fusionrl.data.train_batch import TrainShard
from fusionrl.trainer.hook_rollout_data import as_rollout_data, recounted, take_back

if TYPE_CHECKING:
    # Not at run time: --custom-megatron-init-path may replace what this module takes from Megatron.
    from fusionrl.trainer.model import Trained


@dataclass(frozen=True)
class TrainHooks:
    """The functions of the training group's flags; each gets a fresh copy of the flags first."""

    config: Config
    rank: int
    run_dir: str
    answers: Mapping[str, object]  # the plan's, for flags that were left open

    def args(self) -> Namespace:
        """A fresh copy of the flags for one call of a hook."""
        return self.config.to_args(
            **self.answers, rank=self.rank, run_dir=self.run_dir, save=f"{self.run_dir}/checkpoints"
        )

    def initialized(self) -> None:
        """--custom-megatron-init-path: the ranks have met, the model is not built yet."""
        self._call("custom_megatron_init_path")

    def before_log_probs(self, chunks: Sequence[torch.nn.Module], prefix: str) -> None:
        """--custom-megatron-before-log-prob-hook-path, before each pass of the stage `score`."""
        self._call("custom_megatron_before_log_prob_hook_path", chunks, prefix)

    def after_advantages(self, rollout_id: int, shard: TrainShard, device: torch.device) -> None:
        """--custom-advantage-function-path, then --rollout-data-postprocess-path: they change the shard.

        Raises HookError if a function raised; ValueError if what it left does not fit.
        """
        self._change("custom_advantage_function_path", shard, device)
        self._change("rollout_data_postprocess_path", shard, device, rollout_id)

    def before_step(self, rollout_id: int, index: int, trained: Trained) -> None:
        """--custom-megatron-before-train-step-hook-path, before each optimizer step."""
        parts = (trained.chunks, trained.optimizer, trained.scheduler)
        self._call("custom_megatron_before_train_step_hook_path", rollout_id, index, *parts)

    def _change(self, field: str, shard: TrainShard, device: torch.device, *first: int) -> None:
        path = getattr(self.config.train, field)
        if path is None:
            return
        data = as_rollout_data(shard)
        try:
            self._call(field, *first, data)
        except HookError as error:
            error.positions = list(range(shard.num_samples))
            raise
        flag = f"{flag_of(field)} {path}"
        take_back(shard, data, flag)
        if "advantages" not in shard.fields:
            raise ValueError(f"{flag}: it left no 'advantages'; set a list of one tensor a sample")
        shard.steps = recounted(shard, device)

    def _call(self, field: str, *args: object) -> None:
        path = getattr(self.config.train, field)
        if path is not None:
            call_hook(field, path, self.args(), *args)
