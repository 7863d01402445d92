"""Functions that tests run in a trainer rank, and the configurations and samples that they hand to it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionrl.config.config import Config, PassThrough
from fusionrl.data.train_batch import TrainShard, TrainStep
from tests.trainer.local_ranks import Failed, LocalRanks

if TYPE_CHECKING:
    from torch import Tensor

    from fusionrl.models.quantization import BlockFp8
    from fusionrl.trainer.model import Trained

__all__ = ["Failed", "LocalRanks", "Samples", "config_of"]

# --- functions that run in a worker ---


@contextmanager
def _summed(trained: Trained) -> Iterator[None]:
    """Within it every rank's gradient buffers hold the sums over the data-parallel ranks, not its own shard of them."""
    import torch.distributed as dist

    saved: list[tuple[Tensor, Tensor]] = []
    groups = [group for x in trained.chunks for group in (*x.bucket_groups, *x.expert_parallel_bucket_groups)]
    for group in groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            saved.append((bucket.grad_data, bucket.grad_data.clone()))
            shard = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=ranks)
    try:
        yield
    finally:
        for data, before in saved:
            data.copy_(before)


def gradients(actor: Any) -> dict[str, np.ndarray]:
    """Hugging Face name -> whole gradient of the last step, fp32, on every rank; as the optimizer saw it: clipped."""
    import torch

    from fusionrl.models import families
    from fusionrl.models.hf_io import iter_hf_tensors

    trained, shape = actor.trained, actor.shape
    buffers = {hf for rule in families.model_rules(shape).values() if rule.buffer for hf in rule.hf}
    with torch.no_grad(), _summed(trained):
        tensors = iter_hf_tensors(
            trained.chunks,
            trained.transformer,
            shape,
            lambda _, param: param.main_grad,
            dtype=torch.float32,
            adapters=actor.adapter_spec,
        )
        return {name: tensor.float().cpu().numpy().copy() for name, tensor in tensors if name not in buffers}


def advantages(actor: Any, shard: TrainShard, columns: Sequence[Any] = ()) -> tuple[dict, np.ndarray, dict]:
    """The shard's advantages as the trainer prepares them, by position and one after the other; and its metrics."""
    from fusionrl.trainer.shards import columns_of, pull

    prepared = actor._prepare(1, pull(shard, columns))
    by_position = {i: found["advantages"] for i, found in columns_of(prepared.shard, ("advantages",)).items()}
    return by_position, prepared.shard.fields["advantages"], prepared.metrics


def weights(actor: Any) -> dict[str, np.ndarray]:
    """The model's weights by the collective export."""
    from fusionrl.models.hf_io import iter_hf_tensors

    tensors = iter_hf_tensors(actor.trained.chunks, actor.trained.transformer, actor.shape)
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors}


def draw_adapters(actor: Any) -> None:
    """Give adapters the values of `adapter_value`, of which no B is zero."""
    import torch

    from fusionrl.models import convert
    from fusionrl.models.hf_io import fill_adapters

    def part_of(rule: Any, rank: int, size: int) -> Tensor:
        ((name, sizes),) = rule.hf.items()
        return convert.split(rule, convert.join(rule, [torch.from_numpy(adapter_value(name, sizes))]), rank, size)

    fill_adapters(actor.trained.chunks, actor.shape, actor.adapter_spec, part_of)
    actor.trained.optimizer.reload_model_params()


def adapters(actor: Any) -> dict[str, np.ndarray]:
    """PEFT's name -> whole matrix."""
    from fusionrl.models.hf_io import iter_hf_tensors

    trained = actor.trained
    tensors = iter_hf_tensors(trained.chunks, trained.transformer, actor.shape, adapters=actor.adapter_spec)
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors}


def num_packed_tokens(actor: Any, shard: TrainShard) -> list[int]:
    """Tokens that the model runs over for each micro-batch of the first step."""
    from fusionrl.trainer.micro_batches import build_micro_batches

    return [batch.tokens.numel() for batch in build_micro_batches(shard, shard.steps[0], actor.batch_options)]


def limit_files(actor: Any, rank: int, size: int, writer: bool = False) -> None:
    """No files over `size` bytes: what a full disk does, but to one process of this rank alone."""
    if actor.rank == rank:
        pid = actor._writer._process.pid if writer else os.getpid()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def poison_gradient(actor: Any) -> None:
    """Make the next backward pass give a NaN gradient in one parameter, with a loss that is finite."""
    param = next(iter(actor.trained.chunks[0].parameters()))
    handle = param.register_hook(lambda grad: (handle.remove(), grad * float("nan"))[1])


def train_on_squares(actor: Any, shard: TrainShard) -> float:
    """One backward pass of the sum of squared values; a stand-in for a critic's loss that needs nothing else."""
    import torch

    from fusionrl.trainer.micro_batches import build_micro_batches
    from fusionrl.trainer.score import run_forward

    def squares(batch: Any, output: Any) -> Any:
        loss = (output[0] ** 2).sum()
        return loss, torch.zeros((), dtype=torch.int), loss.detach()

    for chunk in actor.trained.chunks:
        chunk.zero_grad_buffer()
    options, (step,) = replace(actor.batch_options, all_responses=True), shard.steps
    batches = build_micro_batches(shard, step, options, actor.layout)
    return float(sum(run_forward(actor.trained, batches, squares, forward_only=False)))


def set_head(actor: Any, value: float) -> None:
    """Fill a critic's head with one value."""
    for chunk in actor.trained.chunks:
        for name, param in chunk.named_parameters():
            if name.endswith("value_head.weight"):
                param.data.fill_(value)
    actor.trained.optimizer.reload_model_params()


def gathered(
    actor: Any, dtype: str, quantization: BlockFp8 | None = None, is_merged: bool = False
) -> tuple[dict[str, Tensor], list[str], dict[str, Tensor]]:
    """A push's tensors that this rank is the source of; each tensor's name, stage and size; and the whole export."""
    import torch
    import torch.distributed as dist

    from fusionrl.plan.push_plan import plan_push
    from fusionrl.weights.gather import Exporter, quantize_in_place, views_of

    trained = actor.trained
    place = actor.shape, actor.layout, actor.rank, dtype, actor.device
    merged = actor.adapter_spec if is_merged else None
    exporter = Exporter(trained.chunks, trained.transformer, *place, quantization=quantization, merged=merged)
    exporter.refresh()
    tensors = exporter.tensors(dist.group.WORLD)
    plan = plan_push(tensors, actor.layout, 1, 3_000, actor.shape.num_experts)
    gatherer, found = exporter.gatherer(plan, {}), {}
    flat = torch.full((plan.buffer_bytes(actor.rank)[0],), 255, dtype=torch.uint8)  # what is not written is a NaN
    early, late = plan.gathers(actor.rank)
    for bucket in early + late:
        gatherer.gather(bucket, flat if bucket.source == actor.rank else None)
        if bucket.source == actor.rank:
            parts = views_of(bucket, flat)
            if bucket.is_quantised:
                parts = quantize_in_place(parts, flat, quantization)
            assert sum(view.nbytes for _, _, view in parts) == bucket.sent_bytes
            found |= {name: view.clone() for _, name, view in parts}
    return found, [f"{t.name} {t.stage} {t.nbytes}" for t in tensors], dict(exporter.whole())


# --- what both tests and workers are given ---


def adapter_value(name: str, sizes: Sequence[int]) -> np.ndarray:
    """Return an adapter's matrix that depends on its name alone: A as PEFT begins, B small."""
    random = np.random.default_rng(list(name.encode()))
    if name.endswith(".lora_A.weight"):
        return random.uniform(-1, 1, sizes).astype(np.float32) / np.float32(sizes[1]) ** 0.5
    return random.normal(0, 0.02, sizes).astype(np.float32)


def merge_drawn(folder: Path, config: Config, out: Path) -> Path:
    """Write the model in `folder` with the adapters of `draw_adapters` added, as `fusionrl export --merge` does."""
    import torch

    from fusionrl.models.hf_io import HFReader
    from fusionrl.models.hf_save import save_hf
    from fusionrl.models.shape import read_model_shape
    from fusionrl.plan.trained_parts import adapters_of
    from fusionrl.weights.adapters import merged_tensors

    shape = read_model_shape(folder)
    spec = adapters_of(config, shape)
    assert spec is not None
    reader = HFReader(folder)
    tensors = merged_tensors(reader, shape, spec, lambda name, sizes: torch.from_numpy(adapter_value(name, sizes)))
    save_hf(out, folder, tensors, write=True)
    return out


def config_of(
    folder: str | Path, mode: str = "rl", passthrough: dict[str, dict] | None = None, **values: Any
) -> Config:
    """A trainer's configuration with one CPU thread a rank and no clipping."""
    defaults = {"mode": mode, "hf_checkpoint": str(folder), "train_num_threads": 1, "lr": 1e-3, "clip_grad": 0.0}
    return Config.from_flat(defaults | values, PassThrough(**(passthrough or {})))


class Samples:
    """Random samples of a rollout, and their division into shards."""

    def __init__(
        self, count: int = 8, seed: int = 0, low: int = 4, high: int = 40, vocab: int = 120, share: int = 1
    ) -> None:
        """`count` samples of `low` to `high` tokens; every `share` of them are a group of one prompt."""
        self.share, random = share, np.random.default_rng(seed)
        prompts = [random.integers(0, vocab, n) for n in random.integers(1, high // 2, -(-count // share))]
        self.tokens: list[np.ndarray] = []
        self.response = np.zeros(count, dtype=np.int32)
        for i in range(count):
            prompt = prompts[i // share]
            self.response[i] = max(random.integers(low, high) - prompt.size, 1)
            response = random.integers(0, vocab, self.response[i])
            self.tokens.append(np.concatenate([prompt, response]).astype(np.int32))
        self.total = np.array([tokens.size for tokens in self.tokens], dtype=np.int32)
        self.mask = [(random.random(n) < 0.8).astype(np.float32) for n in self.response]
        self.mask[0][:] = 1.0
        self.log_probs = [(-5.0 * random.random(n)).astype(np.float32) for n in self.response]
        self.rewards = random.normal(size=count).astype(np.float32)

    def __len__(self) -> int:
        return len(self.total)

    def shard(self, steps: Sequence[Sequence[Sequence[int]]], counts: Sequence[tuple[int, int]]) -> TrainShard:
        """A shard of the samples in `steps`, a list of micro-batches each, with the steps' global counts."""
        ids = sorted({i for step in steps for micro in step for i in micro})
        local = {i: k for k, i in enumerate(ids)}

        def flat(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
            return np.concatenate([np.zeros(0, dtype), *(parts[i] for i in ids)]).astype(dtype)

        return TrainShard(
            rollout_id=0,
            total_lengths=self.total[ids],
            response_lengths=self.response[ids],
            fields={
                "tokens": flat(self.tokens, np.int32),
                "loss_mask": flat(self.mask, np.float32),
                "rollout_log_probs": flat(self.log_probs, np.float32),
                "rewards": self.rewards[ids],
                "raw_rewards": self.rewards[ids],
                "sample_index": np.array(ids, dtype=np.int64),
                "position": np.array(ids, dtype=np.int64),
                "group_index": np.array(ids, dtype=np.int64) // self.share,
                "truncated": np.zeros(len(ids), dtype=np.bool_),
            },
            steps=[
                TrainStep([[local[i] for i in micro] for micro in step], num_tokens, num_samples)
                for step, (num_tokens, num_samples) in zip(steps, counts, strict=True)
            ],
        )

    def count(self, ids: Sequence[int]) -> tuple[int, int]:
        """(tokens that are trained on, samples): what `buffer.build` counts of a step."""
        return int(sum(self.mask[i].sum() for i in ids)), len(ids)

    def shards(self, dp: int = 1, steps: int = 1, micro: int = 3) -> list[TrainShard]:
        """All samples, dealt out in order over steps and then ranks, in micro-batches of `micro`."""
        per_step = [list(part) for part in np.array_split(np.arange(len(self)), steps)]
        counts = [self.count(ids) for ids in per_step]
        shards = []
        for rank in range(dp):
            own = [ids[rank::dp] for ids in per_step]
            shards.append(self.shard([[ids[i : i + micro] for i in range(0, len(ids), micro)] for ids in own], counts))
        return shards
