"""One rank of the trainer, as a plain class: the cluster room makes a Ray actor of it, a test a process.

Every method is a collective: the driver calls it on all ranks at once. Megatron-core is
imported by `setup`, after the CPU layer is in place.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from fusionrl.algorithms.aggregation import token_weights
from fusionrl.base.stores import join_group_store
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, call_hook, flag_of, register_hooks, user_code
from fusionrl.config.parts import needs_reference
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.models.shape import read_model_shape
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.plan.auxiliary import Role
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer import adam, settings
from fusionrl.trainer.columns import Columns, columns_of, pull, take_columns
from fusionrl.trainer.settings import aggregation_of, hook_args, loss_length
from fusionrl.upstream import cpu_megatron, megatron_versions

if TYPE_CHECKING:
    from fusionrl.trainer.batch import BatchOptions, MicroBatch
    from fusionrl.trainer.checkpoint import Saving
    from fusionrl.trainer.checkpoint_io import WriterProcess
    from fusionrl.trainer.custom_loss import CustomLoss
    from fusionrl.trainer.loss import LossOptions
    from fusionrl.trainer.model import Trained
    from fusionrl.trainer.offload import Offload
    from fusionrl.trainer.step_report import StepReport
    from fusionrl.trainer.weight_sets import WeightSet

logger = logging.getLogger(__name__)

MAX_NAMED = 16  # samples in a message


class TrainerActor:
    """Trainer rank `rank` of `layout`.

    Args:
        config: the run's configuration.
        layout: parallel sizes; its dp is the number of shards of a rollout.
        rank: global rank, 0 … layout.world_size - 1.
        run_dir: the run's folder.
        device_id: GPU of this rank on its node, as the placement says; without one, ranks go round the node's GPUs.
        role: None for the policy. A critic has a value head in place of the output layer; zeros, where --hf-checkpoint
            has none. A prm, PRIME's reward model, is measured against the weights that it starts with.
    """

    def __init__(
        self,
        config: Config,
        layout: TrainerLayout,
        rank: int,
        run_dir: str,
        device_id: int | None = None,
        role: Role | None = None,
    ) -> None:
        self.config, self.layout, self.rank, self.run_dir = config, layout, rank, run_dir
        self.role = role
        self._device_id = device_id
        self.trained: Trained
        self.device = torch.device("cpu")
        self._weight_sets: dict[str, WeightSet] = {}
        self._offload: Offload | None = None
        self._writer: WriterProcess | None = None
        self._saving: Saving | None = None
        self._prepared: tuple[int, TrainShard, dict[str, float]] | None = None
        self._sample_columns: tuple[int, Columns] | None = None
        self._recorded: dict[tuple[int, ...], torch.Tensor] = {}  # experts of a micro-batch, by its samples
        self._skipped_in_a_row = 0
        self._counters = {"rollout_id": -1, "optimizer_steps": 0, "skipped": 0}
        register_hooks(vars(config.to_args()))  # shards may hold objects of classes in hooks' files

    def setup(self, master_addr: str, master_port: int) -> dict[str, Any]:
        """Join the other ranks, build the model from --hf-checkpoint, its optimizer and its schedule.

        The ranks meet in the store at this address, which `create_group_store` made.

        Returns:
            num_parameters (of the whole model), device, impl ("local" or "transformer_engine"), precision.

        Raises:
            ValueError: a checkpoint or a flag that does not fit; names it.
        """
        config = self.config
        if config.checkpoint.async_save and not config.checkpoint.no_save:
            from fusionrl.trainer.checkpoint_io import WriterProcess

            self._writer = WriterProcess()
        modules, transformer = self.setup_model(master_addr, master_port)
        from fusionrl.trainer import model

        self.trained = model.build_training(config, modules, transformer, self.device)
        a, is_policy = config.algorithm, config.run.mode == "rl" and self.role is None
        if is_policy and (a.use_routing_replay or a.use_rollout_routing_replay):
            assert self.shape.moe is not None, "the validation of flags asks for experts"
            self.trained.routing = model.RoutingReplay(modules, self.shape.moe.topk, self.device)
        if is_policy and needs_reference(a):
            self._read_reference()
        if self.role == "prm":
            self.keep_weights("ref")
        if is_policy and a.use_opd and a.opd_type == "megatron":
            assert a.opd_teacher_load is not None
            self.read_weights("teacher", a.opd_teacher_load, "--opd-teacher-load")
        return {
            "num_parameters": self.shape.num_parameters,
            "device": str(self.device),
            "impl": settings.resolve_impl(config, self.device),
            "precision": settings.resolve_precision(config, self.device),
        }

    def setup_model(self, master_addr: str, master_port: int) -> tuple[list[torch.nn.Module], Any]:
        """Join the other ranks and read this rank's part of the model: what conversion needs, and training first.

        Returns:
            The model's pipeline chunks, and Megatron's TransformerConfig.

        Raises:
            ValueError: see `setup`.
        """
        config = self.config
        if config.model.hf_checkpoint is None:
            raise ValueError("--hf-checkpoint is not given; the trainer reads the model's shape and weights from it")
        self.shape = read_model_shape(config.model.hf_checkpoint)
        if self.role == "critic":
            self.shape = self.shape.with_value_head()
        self.device = settings.resolve_device(config, self.rank if self._device_id is None else self._device_id)
        local_ranks = min(self.layout.world_size, config.cluster.actor_num_gpus_per_node)
        torch.set_num_threads(settings.resolve_num_threads(config, local_ranks))
        self._join(master_addr, master_port)

        from fusionrl.models.hf_io import load_hf
        from fusionrl.trainer import checkpoint, model

        modules, transformer = model.build_model(config, self.shape, self.layout, self.device)
        if config.model.debug_random_weights:
            model.randomize(modules)
        elif config.model.megatron_checkpoint is not None:
            checkpoint.load_weights(config.model.megatron_checkpoint, modules)
        else:
            load_hf(config.model.hf_checkpoint, modules, self.shape)
        return modules, transformer

    def _join(self, master_addr: str, master_port: int) -> None:
        if master_addr.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        cpu_megatron.install()
        from megatron.core import parallel_state, tensor_parallel

        cpu_megatron.patch()
        megatron_versions.without_te()
        adam.patch()
        torch.cuda.set_device(self.device)
        layout = self.layout
        timeout = timedelta(minutes=self.config.cluster.distributed_timeout_minutes)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=join_group_store(master_addr, master_port, timeout.total_seconds()),
            rank=self.rank,
            world_size=layout.world_size,
            timeout=timeout,
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=self.config.cluster.distributed_timeout_minutes,
            create_gloo_process_groups=False,
        )
        coordinates = layout.coordinates(self.rank)
        assert parallel_state.get_data_parallel_rank() == coordinates.dp, "TrainerLayout disagrees with Megatron"
        seed = self.config.run.seed + 100 * coordinates.pp
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self._call_hook("custom_megatron_init_path")

    def _read_reference(self) -> None:
        model = self.config.model
        if (model.megatron_checkpoint is not None or model.debug_random_weights) and model.ref_load is None:
            self.keep_weights("ref")
            return
        folder = model.ref_load or model.hf_checkpoint
        assert folder is not None
        self.read_weights("ref", folder, "--ref-load" if model.ref_load else "--hf-checkpoint")

    def read_weights(self, name: str, folder: str, flag: str) -> None:
        """Keep the weights of a Hugging Face folder in host memory as the set `name`, for `score`.

        Raises:
            ValueError: they are not of this model's shape; names `flag`.
        """
        from fusionrl.trainer.weight_sets import WeightSet

        shape = read_model_shape(folder, flag)
        if (shape.with_value_head() if self.shape.value_head else shape) != self.shape:
            raise ValueError(f"{flag} {folder}: its config.json describes another shape than --hf-checkpoint's")
        self.reload()
        self._weight_sets[name] = WeightSet(folder, self.trained.chunks, self.shape, flag)

    def keep_weights(self, name: str) -> None:
        """Keep the weights that the model has now in host memory as the set `name`, for `score`."""
        from fusionrl.trainer.model import gather_params
        from fusionrl.trainer.weight_sets import WeightSet

        self.reload()
        gather_params(self.trained.chunks)
        if name in self._weight_sets:
            self._weight_sets[name].update()
        else:
            self._weight_sets[name] = WeightSet.of_model(self.trained.chunks, self.shape)

    def offload(self, keep_weights: bool = False) -> int:
        """Give this rank's memory of weights, gradients and optimizer away until it is needed again. Returns bytes.

        Every other method takes back what it needs by itself.
        """
        from fusionrl.trainer.offload import Offload

        if self._offload is None:
            self._offload = Offload(self.trained, self.device, folder=self.config.cluster.offload_folder)
        return self._offload.offload(keep_weights=keep_weights)

    def reload(self, only_weights: bool = False) -> None:
        """Take the memory back that `offload` gave away; nothing to do if it is there."""
        if self._offload is not None:
            self._offload.reload(only_weights=only_weights)

    def values(self, shard: TrainShard | list[Any]) -> Columns:
        """A critic's values before each response token that is trained on, of this rank's shard."""
        self.reload()
        shard = pull(shard)
        return columns_of(replace(shard, fields=shard.fields | {"values": self._scored(shard)}), ("values",))

    def process_rewards(self, rollout_id: int, shard: TrainShard | list[Any]) -> tuple[dict[str, float], Columns]:
        """Of a prm: train it on the outcomes of this rank's shard, and then reward each token that is trained on.

        The outcome is 1 where the raw reward is above 0, else 0. Arguments as of `train`.

        Returns:
            Its metrics, as of `train`, and the columns process_rewards.
        """
        from fusionrl.algorithms.prime import implicit_rewards
        from fusionrl.trainer.batch import check_shard

        self.reload()
        pulled = pull(shard)
        check_shard(pulled)
        outcomes = np.repeat((pulled.fields["raw_rewards"] > 0).astype(np.float32), pulled.response_lengths)
        shard = replace(pulled, fields=pulled.fields | {"outcomes": outcomes})
        shard.fields["ref_log_probs"] = self._scored(shard, "ref")
        metrics = self.train(rollout_id, shard)
        given = (self._scored(shard), shard.fields["ref_log_probs"], shard.fields["loss_mask"])
        rewards, _ = implicit_rewards(*map(torch.from_numpy, given), self.config.prm.prm_beta)
        shard.fields["process_rewards"] = rewards.numpy()
        return metrics, columns_of(shard, ("process_rewards",))

    def prepare(self, rollout_id: int, shard: TrainShard | list[Any], columns: Sequence[Any]) -> Columns:
        """With a critic: the advantages of this rank's shard, for the `train` that follows, and the critic's targets.

        Args:
            rollout_id: as of `train`.
            shard: as of `train`.
            columns: what the critic's `values` returned on each of its data-parallel ranks, or references to it.

        Returns:
            values and returns.
        """
        from fusionrl.trainer.batch import check_shard
        from fusionrl.trainer.loss import LossOptions

        self.reload()
        pulled = pull(shard)
        shard = replace(pulled, fields=dict(pulled.fields))
        check_shard(shard)
        take_columns(shard, columns)
        with self._naming_samples(rollout_id, shard):
            metrics = self._prepare(rollout_id, shard, LossOptions.from_config(self.config))
        self._prepared = (rollout_id, shard, metrics)
        return columns_of(shard, ("values", "returns"))

    def train(self, rollout_id: int, shard: TrainShard | list[Any], columns: Sequence[Any] = ()) -> dict[str, float]:
        """Train on this rank's shard of a rollout: one optimizer step for each of its steps.

        Args:
            rollout_id: kept with the checkpoint.
            shard: the shard, or `[ref]` with a Ray reference to it.
            columns: of a critic, what the actor's `prepare` returned on each data-parallel rank; of an actor, what the
                prm's `process_rewards` returned.

        Returns:
            `train/…` metrics (of the others `critic/…`, `prm/…`) over all ranks, pooled over the optimizer steps (see
            `step_report.py`); the same on every rank.

        Raises:
            ValueError: a shard that no loss can be computed from.
        """
        self.reload()
        pulled = pull(shard)
        with self._naming_samples(rollout_id, pulled):
            return self._train(rollout_id, pulled, columns)

    def _train(self, rollout_id: int, pulled: TrainShard, columns: Sequence[Any]) -> dict[str, float]:
        from fusionrl.trainer.batch import build_micro_batches, check_shard
        from fusionrl.trainer.loss import LossOptions
        from fusionrl.trainer.loss_hooks import LossHooks
        from fusionrl.trainer.sample_columns import Differences, sample_columns
        from fusionrl.trainer.step import train_step
        from fusionrl.trainer.step_report import pooled_metrics

        # What the trainers find out is added to the fields, and in one process these may be somebody else's.
        shard = replace(pulled, fields=dict(pulled.fields))
        check_shard(shard)
        loss = LossOptions.from_config(self.config, self.role)
        if columns:
            take_columns(shard, columns)
        prepared: dict[str, float] = {}
        if self._prepared is not None and self._prepared[0] == rollout_id:
            _, shard, prepared = self._prepared
            self._prepared = None
        elif loss.mode == "rl":
            prepared = self._prepare(rollout_id, shard, loss)
        options = self._batch_options()
        per_token = aggregation_of(self.config) == "token_mean"
        hooks = LossHooks.of(self.config, hook_args(self.config, self.rank, self.run_dir), per_token)
        history: list[StepReport] = []
        is_compared = loss.mode == "rl" and "log_probs" not in shard.fields and "rollout_log_probs" in shard.fields
        differences = Differences(shard.num_samples, self.device) if is_compared else None
        for index, step in enumerate(shard.steps):
            looked = self._look_ahead(shard, index, loss) if loss.mode == "rl" else {}
            batches = build_micro_batches(shard, step, options, self.layout)
            self._give_recorded(batches)
            self._call_hook("custom_megatron_before_train_step_hook_path", rollout_id, index, *self._megatron())
            # After the first step the weights are no longer those that the rollout was made with.
            compare = index == 0 or "log_probs" in shard.fields
            custom = self._custom_loss(shard, step) if loss.is_custom else None
            report, bad = train_step(self.trained, batches, loss, compare, self.device, custom, hooks, differences)
            self._watch_skipped(rollout_id, index, report, [int(shard.fields["sample_index"][i]) for i in bad])
            report.numbers.update(
                num_tokens=float(step.num_tokens),
                num_samples=float(step.num_samples),
                masked_samples=float(step.num_samples - round(report.sequence_sums["sequences"])),
                **looked,
            )
            history.append(report)
            self._counters["skipped"] += int(report.numbers["skipped"])
            self._counters["optimizer_steps"] += int(not report.numbers["skipped"])
        self._counters["rollout_id"] = rollout_id
        self._recorded = {}
        if loss.mode == "rl":
            means = None if differences is None else differences.means()
            at = self.layout.coordinates(self.rank)
            if (at.tp, at.cp, at.pp) == (0, 0, self.layout.pp - 1):
                self._sample_columns = (rollout_id, sample_columns(shard, means))
        # With the engine's log-probs as the old ones, the first step's ratios are not 1.
        metrics = pooled_metrics(history, first_is_old=not loss.use_rollout_log_probs) | prepared
        return {f"{self.role or 'train'}/{name}": value for name, value in metrics.items()}

    def sample_columns(self, rollout_id: int) -> Columns:
        """What training on `rollout_id`, the last rollout, found out about this rank's samples. Not a collective.

        {} where it was not trained on; and of each replica only one rank answers: the first of the last pipeline stage.

        Returns:
            Position in the rollout -> name -> value, see `sample_columns.sample_columns`.
        """
        trained, columns = self._sample_columns or (-1, {})
        return columns if trained == rollout_id else {}

    def _prepare(self, rollout_id: int, shard: TrainShard, loss: LossOptions) -> dict[str, float]:
        """Add to the shard what its loss needs besides the rollout: log-probs of before the first step, advantages.

        Returns:
            Metrics of these.
        """
        from fusionrl.trainer.advantages import AdvantageOptions, add_advantages
        from fusionrl.trainer.rollout_data import as_rollout_data, take_back
        from fusionrl.trainer.routing import check_rollout_routing

        algorithm = self.config.algorithm
        if algorithm.use_rollout_routing_replay:
            check_rollout_routing(shard, self.shape)
        records = algorithm.use_routing_replay and not algorithm.use_rollout_routing_replay
        if "ref" in self._weight_sets:
            self._call_hook("custom_megatron_before_log_prob_hook_path", self.trained.chunks, "ref_")
            shard.fields["ref_log_probs"] = self._scored(shard, "ref")
        if "teacher" in self._weight_sets:
            self._call_hook("custom_megatron_before_log_prob_hook_path", self.trained.chunks, "teacher_")
            shard.fields["teacher_log_probs"] = self._scored(shard, "teacher")
        options = AdvantageOptions.from_config(self.config)
        is_off_policy = len(shard.steps) > 1 and not loss.use_rollout_log_probs
        # A single step runs with the weights that this pass would run with: there is nothing to hold fixed.
        if is_off_policy or loss.needs_log_probs or options.needs_log_probs or (records and len(shard.steps) > 1):
            self._call_hook("custom_megatron_before_log_prob_hook_path", self.trained.chunks, "")
            shard.fields["log_probs"] = self._scored(shard, replays=True, record=records)
        metrics = add_advantages(shard, options, self.device)
        for field, first in (("custom_advantage_function_path", ()), ("rollout_data_postprocess_path", (rollout_id,))):
            path = getattr(self.config.train, field)
            if path is None:
                continue
            data = as_rollout_data(shard)
            try:
                self._call_hook(field, *first, data)
            except HookError as error:
                error.positions = list(range(shard.num_samples))
                raise
            take_back(shard, data, told := f"{flag_of(field)} {path}")
            if "advantages" not in shard.fields:
                raise ValueError(f"{told}: it left no 'advantages'; set a list of one tensor a sample")
            shard.steps = self._counted(shard)
        return metrics

    def _look_ahead(self, shard: TrainShard, index: int, loss: LossOptions) -> dict[str, float]:
        """What a loss has to know of the whole of an optimizer step, as a column of the shard; metrics of it."""
        from fusionrl.trainer.selection import pair_advantages, select_tokens

        if loss.policy_loss not in ("clip_cov", "kl_cov", "dpo"):
            return {}
        step, algorithm = shard.steps[index], self.config.algorithm
        if index == 0 and "log_probs" in shard.fields:
            log_probs = shard.fields["log_probs"]
        else:
            log_probs = self._scored(replace(shard, steps=[step]), planned_only=True, replays=True)
        if loss.policy_loss == "dpo":
            return pair_advantages(shard, step, log_probs, algorithm.dpo_beta, algorithm.dpo_label_smoothing)
        seed = self.config.run.seed + self._counters["optimizer_steps"] + self._counters["skipped"]
        select_tokens(shard, step, log_probs, loss, seed)
        return {}

    def _counted(self, shard: TrainShard) -> list[TrainStep]:
        """The shard's steps with the number of tokens of the masks that it has now, over all data-parallel ranks."""
        from megatron.core import parallel_state

        masks = shard.split("loss_mask")
        sums = [float(mask.sum()) for mask in masks]
        local = [[sums[i] for bins in step.micro_batches for i in bins] for step in shard.steps]
        counts = torch.tensor([sum(tokens) for tokens in local], dtype=torch.float64).to(self.device)
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        # The number of samples stays: also one without trained tokens counts.
        return [
            replace(step, num_tokens=round(tokens)) for step, tokens in zip(shard.steps, counts.tolist(), strict=True)
        ]

    def _custom_loss(self, shard: TrainShard, step: TrainStep) -> CustomLoss:
        from fusionrl.trainer.custom_loss import CustomLoss

        path = self.config.algorithm.custom_loss_function_path
        assert path is not None
        return CustomLoss(
            path,
            lambda: hook_args(self.config, self.rank, self.run_dir),
            shard,
            step,
            weigh=partial(token_weights, kind=aggregation_of(self.config), constant=loss_length(self.config)),
            vocab_size=self.shape.vocab_size,
        )

    def _scored(
        self,
        shard: TrainShard,
        weights: str | None = None,
        planned_only: bool = False,
        replays: bool = False,
        record: bool = False,
    ) -> np.ndarray:
        """[response tokens] fp32 log-probs of the tokens that are trained on, 0 elsewhere.

        planned_only: 0 also for samples of no step of the shard.
        replays: routers choose what they choose in the update, if that is held fixed.
        record: it is what they choose in this pass that will be.
        """
        parts = self._score(shard, weights, False, planned_only, replays, record)
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _call_hook(self, field: str, *args: Any) -> None:
        """Call the function of a flag of the training group, if there is one, with a fresh copy of the flags first."""
        path = getattr(self.config.train, field)
        if path is not None:
            call_hook(field, path, hook_args(self.config, self.rank, self.run_dir), *args)

    @contextmanager
    def _naming_samples(self, rollout_id: int, shard: TrainShard) -> Iterator[None]:
        """Name the samples at which a user's function raised, and the file of the run that has them.

        Also what the user's code raises where nobody calls it as a hook, in the forward pass of a model, say.
        """
        try:
            with user_code("a user's code in a trainer", None, only_theirs=True):
                yield
        except HookError as error:
            if error.positions is not None:
                indices = [str(int(shard.fields["sample_index"][position])) for position in error.positions]
                files = [one.path for one in list_rollouts(Path(self.run_dir), "train") if one.rollout_id == rollout_id]
                shown = ", ".join(indices[:MAX_NAMED]) + (", …" if len(indices) > MAX_NAMED else "")
                error.add(f"the samples that it was at: {shown}" + (f", in {files[-1]}" if files else ""))
            raise

    def _megatron(self) -> tuple[Any, Any, Any]:
        """Model chunks, optimizer and schedule, as Megatron has them."""
        return self.trained.chunks, self.trained.optimizer, self.trained.scheduler

    def _watch_skipped(self, rollout_id: int, step: int, report: StepReport, bad: list[int]) -> None:
        """Say which samples made a step that was skipped; end the run after --max-skipped-steps in a row."""
        if not report.numbers["skipped"]:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        everyone: list[list[int]] = [[] for _ in range(self.layout.world_size)]
        dist.all_gather_object(everyone, bad)
        named = sorted({sample for samples in everyone for sample in samples})
        if named:
            shown = ", ".join(map(str, named[:10])) + (f" and {len(named) - 10} more" if len(named) > 10 else "")
            what = f"the loss of sample{'s' * (len(named) > 1)} {shown} is not finite"
        elif not math.isfinite(report.sums["loss"]):
            what = "the loss is not finite"
        else:
            what = f"the loss is finite, the gradient is not (norm {report.numbers['grad_norm']})"
        message = f"step {rollout_id + 1}, optimizer step {step + 1} of this rollout: skipped, {what}"
        if self._skipped_in_a_row >= self.config.train.max_skipped_steps:
            raise FloatingPointError(
                f"{message}; that makes {self._skipped_in_a_row} in a row (--max-skipped-steps), so the run ends; "
                f"lower --lr, or look at the samples in rollouts/step_{rollout_id + 1:06d}.train.a….jsonl of the run"
            )
        if self.rank == 0:
            logger.warning("%s", message)

    def _give_recorded(self, batches: list[MicroBatch]) -> None:
        for batch in batches:
            batch.experts = self._recorded.get(tuple(batch.samples), batch.experts)

    def _batch_options(self, all_responses: bool = False, replays: bool = True) -> BatchOptions:
        from megatron.core import parallel_state

        from fusionrl.trainer.batch import BatchOptions, Slicing

        config, sft, is_prm = self.config, self.config.run.mode == "sft", self.role == "prm"
        routing = self.trained.routing if replays else None
        return BatchOptions(
            slicing=Slicing(
                cp_size=self.layout.cp,
                cp_rank=parallel_state.get_context_parallel_rank(),
                sequence_parallel_size=self.layout.tp if self.trained.transformer.sequence_parallel else 1,
                sequence_parallel_rank=parallel_state.get_tensor_model_parallel_rank()
                if self.trained.transformer.sequence_parallel
                else 0,
            ),
            device=self.device,
            # What was not sampled has no temperature.
            temperature=1.0 if sft or is_prm else config.rollout.rollout_temperature,
            chunk_size=config.train.log_probs_chunk_size,
            local_attention=settings.resolve_impl(config, self.device) == "local",
            share_prompts=self.shape.mla is None,
            aggregation="sequence_mean" if is_prm else aggregation_of(config),
            constant=loss_length(config),
            entropy_grad=not sft and self.role is None and config.algorithm.entropy_coef > 0,
            all_responses=all_responses,
            # What is recorded in one pass is replayed in another: the packed tokens must be the same.
            whole_sequences=not (sft or self.role is not None or (all_responses and routing is None))
            and config.algorithm.loss_type == "custom_loss",
            replay_layers=routing.layers if routing and config.algorithm.use_rollout_routing_replay else None,
        )

    def score(self, shard: TrainShard | list[Any], weights: str | None = None) -> list[np.ndarray]:
        """Log-probs of all response tokens; nothing is trained. Of a critic: the value before each of them.

        Args:
            shard: as `train` takes it.
            weights: a set of `read_weights` or `keep_weights`; None is what is trained.

        Returns:
            For each sample of the shard, in its order, [response_length] fp32; the same on all ranks of the
            shard.

        Raises:
            ValueError: see `train`.
        """
        from fusionrl.trainer.batch import check_shard

        self.reload()
        shard = pull(shard)
        check_shard(shard)
        return self._score(shard, weights, all_responses=True)

    def _score(
        self,
        shard: TrainShard,
        weights: str | None,
        all_responses: bool,
        planned_only: bool = False,
        replays: bool = False,
        record: bool = False,
    ) -> list[np.ndarray]:
        from megatron.core import parallel_state

        from fusionrl.trainer.batch import build_micro_batch
        from fusionrl.trainer.step import broadcast_from_last_stage, forward_log_probs

        groups = [group for step in shard.steps for group in step.micro_batches if group]
        planned = {i for group in groups for i in group}
        if not planned_only:
            groups += [[i] for i in range(shard.num_samples) if i not in planned]
        groups += [[]] * (self._common_count(len(groups)) - len(groups))
        options = replace(self._batch_options(all_responses=True, replays=replays), all_responses=all_responses)
        batches = [build_micro_batch(shard, group, None, options) for group in groups]
        if record:
            assert self.trained.routing is not None
            for batch in batches:
                own_tokens = batch.tokens.numel() // options.slicing.sequence_parallel_size
                batch.experts = self.trained.routing.new_record(own_tokens)
        elif replays:
            self._give_recorded(batches)
        with self._weight_sets[weights].lent() if weights is not None else nullcontext():
            outputs = forward_log_probs(self.trained, batches, record) if batches else []
        if record:
            self._recorded = {tuple(batch.samples): batch.experts.cpu() for batch in batches if batch.samples}
        cp_group = parallel_state.get_context_parallel_group()
        scores: list[np.ndarray] = [np.zeros(n, dtype=np.float32) for n in shard.response_lengths]
        for index, batch in enumerate(batches):
            flat = torch.zeros(sum(batch.response_lengths), device=self.device)
            if outputs:
                flat[batch.responses.to(self.device)] = outputs[index][0]
                if cp_group.size() > 1:
                    dist.all_reduce(flat, group=cp_group)
            parts = broadcast_from_last_stage(flat).cpu().split(batch.response_lengths)
            for sample, part in zip(batch.samples, parts, strict=True):
                scores[sample] = part.numpy()
        return scores

    def _common_count(self, count: int) -> int:
        """Micro-batches that every rank runs: experts are exchanged, so all must run as many as the busiest."""
        from fusionrl.trainer.batch import round_up

        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return round_up(int(most), self.layout)

    def evaluate_loss(self, shard: TrainShard | list[Any]) -> dict[str, float]:
        """Validation loss: mean of -log p over all tokens with a loss mask, over all ranks; nothing is
        trained.

        Returns:
            eval/loss and eval/num_tokens.
        """
        from fusionrl.trainer.batch import build_micro_batches, check_shard
        from fusionrl.trainer.step import evaluate

        self.reload()
        shard = pull(shard)
        check_shard(shard)
        options = self._batch_options(replays=False)
        batches = [batch for step in shard.steps for batch in build_micro_batches(shard, step, options, self.layout)]
        total, tokens = evaluate(self.trained, batches, self.device)
        return {"eval/loss": total / max(tokens, 1.0), "eval/num_tokens": tokens}

    def begin_save(self, path: str, rollout_id: int) -> None:
        """Settle what a checkpoint at `path` holds; with --async-save a process of this rank writes it from now on.

        A save that is under way is finished first.
        """
        from fusionrl.trainer import checkpoint

        self.finish_save()
        self.reload()
        counters = self._counters | {"rollout_id": rollout_id}
        self._saving = checkpoint.begin_save(
            path, self.trained, self.layout, self.shape, self.rank, counters, self._writer
        )

    def is_saved(self) -> bool:
        """Whether `finish_save` would return at once, as far as this rank goes. Not a collective."""
        return self._saving is None or self._saving.is_done()

    def finish_save(self) -> None:
        """Publish the checkpoint that `begin_save` began, complete or not at all; nothing to do without one.

        Raises:
            OSError: a rank could not write its files.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def save(self, path: str, rollout_id: int) -> None:
        """Write a checkpoint at `path`, complete or not at all (see `checkpoint.py`)."""
        self.begin_save(path, rollout_id)
        self.finish_save()

    def load(self, path: str) -> dict[str, Any]:
        """Restore weights, optimizer, schedule, RNG and counters.

        Returns:
            rollout_id, optimizer_steps, skipped, and rng_restored (False where the layout is another one).

        Raises:
            ValueError: no complete checkpoint of this model is at `path`.
        """
        from fusionrl.trainer import checkpoint

        self.reload()
        restored = checkpoint.load(path, self.trained, self.layout, self.shape, self.rank)
        self._counters = {name: int(restored[name]) for name in self._counters}
        return restored

    def save_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face folder, with the other files of --hf-checkpoint.

        Raises:
            ValueError: `path` is there already.
        """
        from fusionrl.models.hf_io import iter_hf_tensors, save_hf

        self.reload()
        source = self.config.model.hf_checkpoint
        assert source is not None
        tensors = iter_hf_tensors(self.trained.chunks, self.trained.transformer, self.shape)
        save_hf(path, source, tensors, write=self.rank == 0)
        dist.barrier()

    def state_hashes(self) -> dict[str, str]:
        """SHA-256 of this rank's weights, optimizer state and RNG states (`state_hashes.py`)."""
        from fusionrl.trainer.state_hashes import state_hashes

        self.reload()
        return state_hashes(self.trained)

    def shutdown(self) -> None:
        """Leave the process groups. A save that was not finished is not published."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if hasattr(self, "trained"):
            # Autograd keeps the hooks of every parameter, and the hooks keep the wrapper of the model, so that no
            # collector finds it unused: with it would stay the weights, and threads and descriptors of each group.
            for chunk in self.trained.chunks:
                for param in chunk.parameters():
                    param.data, param.main_grad = torch.empty(0, device=param.device, dtype=param.dtype), None
                vars(chunk).clear()
            del self.trained
            self._weight_sets, self._offload, self._saving = {}, None, None
            gc.collect()
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # which it forgets
            dist.destroy_process_group()
