"""Trainers by role: the stages that all have (see `shards.py`); the critic, the process reward model; profiles."""

from __future__ import annotations

import gzip
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fusionrl.algorithms.estimators import Role
from fusionrl.config.hooks import HookError, user_code
from fusionrl.models.shape import ModelShape
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.observe.spans import phase
from fusionrl.trainer.model_rank import ModelRank, SetupFacts
from fusionrl.trainer.shards import Handed, Prepared, add_token_values, columns_of, pull, trained_columns
from fusionrl.weights.remote_calls import get

if TYPE_CHECKING:
    import numpy as np
    import torch
    from ray import ObjectRef

    from fusionrl.data.train_batch import TrainShard
    from fusionrl.trainer.loss import LossOptions
    from fusionrl.trainer.micro_batches import BatchOptions
    from fusionrl.trainer.score import Scorer
    from fusionrl.trainer.shards import ColumnSource, SampleColumns, ShardSource
    from fusionrl.trainer.snapshot import RankState
    from fusionrl.trainer.step_report import StepReport
    from fusionrl.trainer.steps import SkipWatch, Stepping

MAX_NAMED = 16  # samples in a message
_MAX_MEMORY_EVENTS = 1_000_000


@dataclass(frozen=True)
class Learned:
    """A report for each optimizer step on a shard, metrics of its preparation, and values of its single samples."""

    reports: list[StepReport]
    metrics: dict[str, float]
    samples: SampleColumns


def _pooled(parts: Sequence[Learned]) -> dict[str, float]:
    """Return means over the tokens of several shards, and sums of the numbers of tokens that were left out."""
    pooled: dict[str, float] = {}
    counts = [sum(report.numbers["num_tokens"] for report in part.reports) for part in parts]
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        values = [(part.metrics[name], n) for part, n in zip(parts, counts, strict=True) if name in part.metrics]
        if name.endswith("_excluded"):
            pooled[name] = sum(value for value, _ in values)
        else:
            pooled[name] = sum(v * n for v, n in values) / max(sum(n for _, n in values), 1.0)
    return pooled


class TrainerBase(ModelRank):
    """A rank that scores and trains."""

    @cached_property
    def _skips(self) -> SkipWatch:
        from fusionrl.trainer.steps import SkipWatch

        return SkipWatch(self.config.train.max_skipped_steps, self.rank)

    @cached_property
    def loss(self) -> LossOptions:
        """The loss of this role."""
        from fusionrl.trainer.loss import LossOptions

        return LossOptions.from_config(self.config, self.role)

    @property
    def batch_options(self) -> BatchOptions:
        """Options of packing micro-batches for training."""
        from fusionrl.trainer.micro_batches import BatchOptions

        return BatchOptions.of(self.config, self.layout, self.shape, self.trained, self.device, self.role)

    @property
    def scorer(self) -> Scorer:
        """The model as it scores."""
        from fusionrl.trainer.score import Scorer

        return Scorer(self.trained, self.layout, self.batch_options, self.weight_sets)

    @property
    def stepping(self) -> Stepping:
        """The model, the loss and the hooks of this role's optimizer steps."""
        from fusionrl.trainer.steps import Stepping

        return Stepping(
            config=self.config,
            model=self.scorer,
            loss=self.loss,
            hooks=self.hooks,
            skips=self._skips,
            num_before=self.counters["optimizer_steps"] + self.counters["skipped"],
            knobs=self.trainer_plan.knobs,
        )

    def lent_adapter(self, name: str | None) -> AbstractContextManager[None]:
        """Within it the model computes with this one of several adapters, for a forward pass or an export."""
        return nullcontext()

    @phase("score")
    def score(self, shard: ShardSource, weights: str | None = None, only_weights: bool = False) -> list[np.ndarray]:
        """Log-probs of all response tokens; nothing is trained. Of a critic: the value before each of them.

        shard         the shard, or `[ref]` with a Ray reference to it
        weights       a set of `read_weights` or `keep_weights`; None is what is trained
        only_weights  gradients and optimizer stay offloaded, as another process uses the device

        Returns [response_length] fp32 for each sample of the shard, in its order; the same on all ranks of the shard.
        """
        from fusionrl.trainer.model import forget_images
        from fusionrl.trainer.score import score_samples

        pulled = pull(shard)
        self.reload(only_weights)
        try:
            with self.lent_adapter(pulled.adapter):
                return score_samples(pulled, self.scorer, weights=weights, all_responses=True).samples
        finally:
            forget_images(self.trained)

    @contextmanager
    def _pulled(
        self, rollout_id: int, source: ShardSource, columns: Sequence[ColumnSource] = ()
    ) -> Iterator[TrainShard]:
        """Pull this rank's shard, with everything in memory.

        An error of a user's code within it, also of code that is not called as a hook, such as a model's forward pass,
        names the samples that it was at, and the file of the run that has them.
        """
        from fusionrl.trainer.model import forget_images

        self.reload()
        shard = pull(source, columns)
        try:
            with user_code("a user's code in a trainer", None, only_theirs=True):
                yield shard
        except HookError as error:
            if error.positions is not None:
                indices = [str(int(shard.fields["sample_index"][position])) for position in error.positions]
                listing = ", ".join(indices[:MAX_NAMED]) + (", …" if len(indices) > MAX_NAMED else "")
                rollouts = list_rollouts(Path(self.run_dir), "train")
                files = [f", in {rollout.path}" for rollout in rollouts if rollout.rollout_id == rollout_id]
                error.add(f"the samples that it was at: {listing}{''.join(files[-1:])}")
            raise
        finally:
            forget_images(self.trained)

    def metrics_of(self, parts: Sequence[Learned]) -> dict[str, float]:
        """Return the metrics of a rollout, pooled over the adapters that learned from it."""
        from fusionrl.trainer.step_report import pooled_metrics

        # With the engine's log-probs as the old ones, the first step's ratios are not 1.
        first_is_old = not self.loss.use_rollout_log_probs
        reports = [report for part in parts for report in part.reports]
        firsts = list(itertools.accumulate((len(part.reports) for part in parts[:-1]), initial=0))
        metrics = pooled_metrics(reports, first_is_old, firsts)
        metrics |= parts[0].metrics if len(parts) == 1 else _pooled(parts)
        return {f"{self.role or 'train'}/{name}": value for name, value in metrics.items()}

    def learn(self, rollout_id: int, prepared: Prepared) -> Learned:
        """Train on a prepared shard: the stages pack and steps."""
        from fusionrl.trainer.steps import take_steps

        counters = self.counters
        reports, token_scores = take_steps(prepared, self.stepping, rollout_id)
        num_skipped = sum(int(report.numbers["skipped"]) for report in reports)
        counters["skipped"] += num_skipped
        counters["optimizer_steps"] += len(reports) - num_skipped
        counters["rollout_id"] = rollout_id
        self.trained.is_amid = False
        samples: SampleColumns = {}
        at = self.layout.coordinates(self.rank)
        if self.loss.mode == "rl" and (at.tp, at.cp, at.pp) == (0, 0, self.layout.pp - 1):
            samples = trained_columns(prepared.shard, token_scores)
            if self.config.run.save_token_values:
                add_token_values(samples, prepared.shard, token_scores)
        return Learned(reports, prepared.metrics, samples)

    def snapshot(self) -> tuple[int, dict[str, RankState]]:
        """Return the bytes of this rank's state, and the state. Not a collective."""
        from fusionrl.trainer.rank_state import take_state

        self.reload()
        state = take_state(self.trained, self.counters, self.layout, self.rank)
        return state.num_bytes, {"": state}

    @phase("restore")
    def restore(self, states: Sequence[ObjectRef]) -> None:
        """Put back what `snapshot` gave; collective. `states`: references, as of `rank_state.put_state`."""
        self.reload()
        self._put_states([get(reference) for reference in states])

    def _put_states(self, states: Sequence[dict[str, RankState]]) -> None:
        from fusionrl.trainer.rank_state import put_state

        self.counters = put_state(self.trained, [state[""] for state in states], self.layout, self.rank)


class CriticTrainer(TrainerBase):
    """A rank of the critic, whose value head in place of the output layer is zeros where the checkpoint has none."""

    role: ClassVar[Role | None] = "critic"

    def read_shape(self) -> ModelShape:
        """The shape of --critic-load, with a value head."""
        return super().read_shape().with_value_head()

    @phase("values")
    def values(self, shard: ShardSource) -> Handed:
        """Return the column values: the value before each response token of this rank's shard that is trained on."""
        from fusionrl.trainer.score import score_samples

        self.reload()
        pulled = pull(shard)
        pulled.fields["values"] = score_samples(pulled, self.scorer).flat
        return {}, columns_of(pulled, ("values",))

    def train(self, rollout_id: int, shard: ShardSource, columns: Sequence[ColumnSource] = ()) -> dict[str, float]:
        """Learn the returns of this rank's shard: as of `PolicyTrainer`, with `critic/…` metrics.

        `columns`: what the policy's `prepare` gave on each of its data-parallel ranks: values and returns.
        """
        with phase("train", step=rollout_id + 1), self._pulled(rollout_id, shard, columns) as pulled:
            return self.metrics_of([self.learn(rollout_id, Prepared(pulled))])


class ProcessRewardTrainer(TrainerBase):
    """A rank of the process reward model, which is measured against the weights that it starts with."""

    role: ClassVar[Role | None] = "prm"

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """Set up the model, and keep its weights."""
        facts = super().setup(master_addr, master_port)
        self.keep_weights("ref")
        return facts

    @phase("process rewards")
    def process_rewards(self, rollout_id: int, shard: ShardSource) -> Handed:
        """Train on the outcomes of this rank's shard, and then reward each token that is trained on.

        The outcome is 1 where the raw reward is above 0, else 0. Returns `prm/…` metrics over all ranks, the same on
        every rank; and the column process_rewards.
        """
        import numpy as np
        import torch

        from fusionrl.algorithms.token_advantages import implicit_rewards
        from fusionrl.trainer.score import score_samples

        with self._pulled(rollout_id, shard) as pulled:
            fields, scorer = pulled.fields, self.scorer
            fields["outcomes"] = np.repeat((fields["raw_rewards"] > 0).astype(np.float32), pulled.response_lengths)
            fields["ref_log_probs"] = score_samples(pulled, scorer, weights="ref").flat
            metrics = self.metrics_of([self.learn(rollout_id, Prepared(pulled))])
        log_probs, before, mask = score_samples(pulled, scorer).flat, fields["ref_log_probs"], fields["loss_mask"]
        tensors = (torch.from_numpy(log_probs), torch.from_numpy(before), torch.from_numpy(mask))
        fields["process_rewards"] = implicit_rewards(*tensors, self.config.prm.prm_beta)[0].numpy()
        return metrics, columns_of(pulled, ("process_rewards",))


class Profiled:
    """A process that can be profiled: from `start_profile` to `stop_profile`."""

    _profile: torch.profiler.profile | None = None

    def start_profile(self, tool: str) -> None:
        """Begin; `tool`: torch, memory or nsys."""
        import torch

        if tool == "torch":
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
        elif tool == "memory":
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        else:
            torch.cuda.profiler.start()

    def stop_profile(self, tool: str, path: str) -> None:
        """End, and write what was recorded: `path` with .trace.json.gz or .pickle; nsys writes its own file."""
        import torch

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if tool == "torch" and self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
            plain = f"{path}.tmp.json"
            profile.export_chrome_trace(plain)
            with open(plain, "rb") as source, gzip.open(f"{path}.part", "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target)
            os.replace(f"{path}.part", f"{path}.trace.json.gz")  # under its name it is complete
            os.unlink(plain)
        elif tool == "memory":
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        elif tool == "nsys":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
