"""A user's functions at the borders between the stages of a training step, and the samples named where one raised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, call_hook, flag_of, user_code
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.trainer.model import Trained
from fusionrl.trainer.rollout_data import as_rollout_data, take_back

MAX_NAMED = 16  # samples in a message


@dataclass(frozen=True)
class TrainHooks:
    """The functions of the training group's flags; each gets a fresh copy of the flags first."""

    config: Config
    rank: int
    run_dir: str

    def args(self) -> Any:
        """A fresh copy of the flags for one call of a hook."""
        return self.config.to_args(rank=self.rank, run_dir=self.run_dir, save=f"{self.run_dir}/checkpoints")

    def initialized(self) -> None:
        """--custom-megatron-init-path: the ranks have met, the model is not built yet."""
        self._call("custom_megatron_init_path")

    def before_log_probs(self, chunks: Sequence[torch.nn.Module], prefix: str) -> None:
        """--custom-megatron-before-log-prob-hook-path, before each pass of the stage `score`."""
        self._call("custom_megatron_before_log_prob_hook_path", chunks, prefix)

    def after_advantages(self, rollout_id: int, shard: TrainShard, device: torch.device) -> None:
        """--custom-advantage-function-path, then --rollout-data-postprocess-path: they change the shard.

        Raises:
            HookError: a function raised.
            ValueError: what it left does not fit.
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
        shard.steps = _recounted(shard, device)

    def _call(self, field: str, *args: Any) -> None:
        path = getattr(self.config.train, field)
        if path is not None:
            call_hook(field, path, self.args(), *args)


def _recounted(shard: TrainShard, device: torch.device) -> list[TrainStep]:
    """The shard's steps with the number of tokens of the masks that it has now, over all data-parallel ranks."""
    sums = [float(mask.sum()) for mask in shard.split("loss_mask")]
    local = [[sums[i] for bins in step.micro_batches for i in bins] for step in shard.steps]
    counts = torch.tensor([sum(tokens) for tokens in local], dtype=torch.float64).to(device)
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    # The number of samples stays: also one without trained tokens counts.
    return [replace(step, num_tokens=round(tokens)) for step, tokens in zip(shard.steps, counts.tolist(), strict=True)]


@contextmanager
def naming_samples(run_dir: str, shard: TrainShard, rollout_id: int) -> Iterator[None]:
    """Name the samples at which a user's function raised, and the file of the run that has them.

    Also of errors of the user's code that nobody calls as a hook, in the forward pass of a model, say.
    """
    try:
        with user_code("a user's code in a trainer", None, only_theirs=True):
            yield
    except HookError as error:
        if error.positions is not None:
            indices = [str(int(shard.fields["sample_index"][position])) for position in error.positions]
            files = [one.path for one in list_rollouts(Path(run_dir), "train") if one.rollout_id == rollout_id]
            shown = ", ".join(indices[:MAX_NAMED]) + (", …" if len(indices) > MAX_NAMED else "")
            error.add(f"the samples that it was at: {shown}" + (f", in {files[-1]}" if files else ""))
        raise
