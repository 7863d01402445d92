"""A user's functions at the borders between the stages of a training step, and the rollout as they see it, slime's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.algorithms.policy_losses import PolicyLoss
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, call_hook, flag_of
from fusionrl.data.train_batch import FIELDS, TrainShard, TrainStep

if TYPE_CHECKING:
    # Not at run time: --custom-megatron-init-path may replace what this module takes from Megatron.
    from fusionrl.trainer.model import Trained

# Fields that slime names otherwise. A field with a value for each response token is a tensor [response_length].
NAMES = {"loss_mask": "loss_masks", "raw_rewards": "raw_reward", "sample_index": "sample_indices"}
_TENSOR_TYPES: dict[type, torch.dtype] = {np.int32: torch.int64, np.int16: torch.int16}
_FREE = ("log_probs", "ref_log_probs", "values", "advantages", "returns", "teacher_log_probs", "rollout_log_probs")


def as_rollout_data(shard: TrainShard) -> dict[str, Any]:
    """The shard as a dict of lists, one entry a sample: tensors of tokens, plain numbers else.

    tokens [total_length] int64; loss_masks and all log-probs, values, advantages, returns [response_length] fp32, 0
    where the mask is 0; total_lengths, response_lengths, rewards, raw_reward, sample_indices, group_index, truncated,
    metadata; and a user's own columns.
    """
    data: dict[str, Any] = {
        "total_lengths": shard.total_lengths.tolist(),
        "response_lengths": shard.response_lengths.tolist(),
        "metadata": shard.metadata or [{} for _ in range(shard.num_samples)],
        **shard.extra,
    }
    for name, array in shard.fields.items():
        if FIELDS[name].extent == "sample":
            data[NAMES.get(name, name)] = array.tolist()
        else:
            parts = shard.split(name)[: shard.num_samples]
            kind = _TENSOR_TYPES.get(FIELDS[name].dtype, torch.float32)
            data[NAMES.get(name, name)] = [torch.tensor(part, dtype=kind) for part in parts]
    return data


def take_back(shard: TrainShard, data: dict[str, Any], flag: str) -> None:
    """Put what a hook made of `as_rollout_data` into the shard.

    Masks and what the loss is made of may change; tokens and lengths, by which samples are shared out, may not. Raises
    ValueError, which names the hook, the field and the sample.
    """
    for name in ("loss_mask", *_FREE):
        values = data.get(NAMES.get(name, name))
        if values is None:
            shard.fields.pop(name, None)
            continue
        label = f"{flag}: {NAMES.get(name, name)!r}"
        if len(values) != shard.num_samples:
            raise ValueError(f"{label} has {len(values)} entries for {shard.num_samples} samples")
        parts = [np.asarray(torch.as_tensor(value).detach().cpu(), np.float32).reshape(-1) for value in values]
        for index, (part, length) in enumerate(zip(parts, shard.response_lengths, strict=True)):
            if part.size != length:
                which = int(shard.fields["sample_index"][index])
                raise ValueError(f"{label} has {part.size} values for {length} response tokens of sample {which}")
        column = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        if name == "loss_mask" and ((column > 0) & (shard.fields[name] == 0)).any():
            raise ValueError(f"{label} has a token that was masked: its log-probs are not known, it cannot be unmasked")
        shard.fields[name] = column
    replaced = {"total_lengths": shard.total_lengths, "response_lengths": shard.response_lengths}
    replaced |= {"rewards": shard.fields["rewards"], "tokens": shard.fields["tokens"]}
    for name, before in replaced.items():
        after = data[name] if name != "tokens" else [int(t) for part in data[name] for t in part]
        if len(after) != len(before) or not np.array_equal(np.asarray(after, before.dtype), before):
            raise ValueError(
                f"{flag}: {name!r} may not change here; set a token's loss mask to 0 to leave it out, or 'advantages'"
            )
    known = {"tokens", "metadata", "total_lengths", "response_lengths", *(NAMES.get(n, n) for n in FIELDS)}
    shard.extra = {
        name: list(value)
        for name, value in data.items()
        if name not in known and isinstance(value, list | tuple) and len(value) == shard.num_samples
    }


def recounted(shard: TrainShard, device: torch.device) -> list[TrainStep]:
    """The shard's steps with the number of tokens of the masks that it has now, over all data-parallel ranks."""
    sums = [float(mask.sum()) for mask in shard.split("loss_mask")]
    local = [[sums[i] for bins in step.micro_batches for i in bins] for step in shard.steps]
    counts = torch.tensor([sum(tokens) for tokens in local], dtype=torch.float64).to(device)
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    # The number of samples stays: also one without trained tokens counts.
    return [replace(step, num_tokens=round(tokens)) for step, tokens in zip(shard.steps, counts.tolist(), strict=True)]


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


def policy_loss_of(path: str) -> PolicyLoss:
    """Return --custom-policy-loss-path, which raises HookError where it returns something else than expected."""
    field = "custom_policy_loss_path"

    def loss(log_probs: Tensor, *args: object) -> tuple[Tensor, dict[str, Tensor]]:
        returned = call_hook(field, path, log_probs, *args)
        where, size = f"{flag_of(field)} {path}", tuple(log_probs.shape)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
            raise HookError(
                f"{where}: it returned {type(returned).__name__}; expected (losses of tokens, dict of metrics)"
            )
        losses, metrics = returned
        if not isinstance(losses, Tensor) or losses.shape != log_probs.shape:
            raise HookError(f"{where}: its losses must be a tensor of the shape {size}, a number for each token")
        tensors = {name: torch.as_tensor(value, device=losses.device) for name, value in metrics.items()}
        for name, value in tensors.items():
            if value.dim() and value.shape != log_probs.shape:
                raise HookError(f"{where}: its metric {name!r} must be a number, or one for each token {size}")
        return losses, {name: value.expand(size) for name, value in tensors.items()}

    return loss
