"""The trainer of the policy; in mode sft, of a model that learns given answers.

With --lora-adapters it has several adapters: each learns, is saved and restored as in a run of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fusionrl.config.run_parts import needs_reference
from fusionrl.observe.spans import phase, span
from fusionrl.plan.trained_parts import adapter_folders, has_several_adapters
from fusionrl.trainer.model_rank import Restored, SetupFacts
from fusionrl.trainer.push_source import PushSource
from fusionrl.trainer.shards import Handed, Prepared, SampleColumns, columns_of, pull

if TYPE_CHECKING:
    from ray import ObjectRef

    from fusionrl.data.train_batch import TrainShard
    from fusionrl.trainer.adapter_states import AdapterStates
    from fusionrl.trainer.shards import ColumnSource, ShardSource
    from fusionrl.trainer.snapshot import RankState
    from fusionrl.trainer.steps import Stepping
    from fusionrl.trainer.trainer_base import Learned

REPORTED = ("loss", "grad_norm", "lr", "skipped")
"""Metrics of a step that each of several adapters reports under its name."""


METRICS = """
adapter/<name>/loss | loss | As train/loss, of the optimizer steps of one adapter. | a rollout with samples of it
adapter/<name>/grad_norm | norm | As train/grad_norm, of the optimizer steps of one adapter. | a rollout with samples
    of it
adapter/<name>/lr | rate | As train/lr, by the optimizer steps that this adapter has taken. | a rollout with samples
    of it
adapter/<name>/skipped | steps | As train/skipped, of one adapter. | a rollout with samples of it
adapter/<name>/optimizer_steps | steps | Optimizer steps that one adapter took: --num-steps-per-rollout, or one for
    each group of samples where it has fewer. | a rollout with samples of it
"""


class AdapterTrainer(PushSource):
    """A rank with one adapter in the model; `adapter_states` has the others. None: the run has one, or none."""

    adapter_states: AdapterStates | None = None

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """As of `TrainerBase`; adapters without a folder begin as that of a run of its own does."""
        facts = super().setup(master_addr, master_port)
        assert self.role is None, "critics have no adapters"
        if not has_several_adapters(self.config):
            return facts
        from fusionrl.models.hf_io import load_peft
        from fusionrl.trainer.adapter_states import AdapterStates, Progress

        folders, spec = adapter_folders(self.config), self.adapter_spec
        assert spec is not None
        self.adapter_states = states = AdapterStates(self.trained, list(folders), Progress(self.counters, self._skips))
        for name, folder in folders.items():
            if folder is not None:
                states.switch(name)
                load_peft(folder, self.trained.chunks, self.shape, spec)
                self.trained.optimizer.reload_model_params()
        self.take_adapter(next(iter(folders)))
        return facts

    def take_adapter(self, name: str | None) -> None:
        """Bring one of several adapters into the model."""
        assert self.adapter_states is not None and name is not None
        self.adapter_states.switch(name)
        progress = self.adapter_states.progress
        self.counters, self._skips = progress.counters, progress.skips

    def lent_adapter(self, name: str | None) -> AbstractContextManager[None]:
        """Within it the model computes with an adapter's parameters, for a forward pass or an export."""
        states = self.adapter_states
        return nullcontext() if states is None or name is None else states.lent(name)

    def metrics_by_adapter(self, learned: Mapping[str | None, Learned]) -> dict[str, float]:
        """Return adapter/<name>/… of what each of several adapters learned."""
        metrics: dict[str, float] = {}
        for name, part in learned.items():
            own = self.metrics_of([part])
            metrics |= {f"adapter/{name}/{metric}": own[f"train/{metric}"] for metric in REPORTED}
            metrics[f"adapter/{name}/optimizer_steps"] = float(len(part.reports))
        return metrics

    # ------------------------------------------------------------------------------------------- checkpoints
    def _each(self) -> Iterator[str]:
        """Bring one adapter after the other into the model, and yield its name."""
        assert self.adapter_states is not None
        for name in self.adapter_states.order():
            self.take_adapter(name)
            yield name

    def begin_save(self, path: str, rollout_id: int) -> None:
        """As of `ModelRank`, with a folder for each adapter, PATH-NAME."""
        if self.adapter_states is None:
            return super().begin_save(path, rollout_id)
        self.reload()
        self.finish_save()
        for name in self._each():
            earlier, self._saving = self._saving, None
            try:
                super().begin_save(f"{path}-{name}", rollout_id)
            finally:  # the saves that have started are finished, even if the next one cannot start
                if self._saving is None:
                    self._saving = earlier
                else:
                    self._saving.earlier = earlier

    def load(self, path: str) -> Restored:
        """As of `ModelRank`; the facts are those of the last adapter, with the hashes of all."""
        if self.adapter_states is None:
            return super().load(path)
        self.reload()
        hashes: dict[str, str] = {}
        for name in self._each():
            restored = super().load(f"{path}-{name}")
            self.adapter_states.progress.counters = self.counters
            hashes |= _of_adapter(name, restored.get("hashes", {}))
        if hashes:
            restored["hashes"] = hashes
        return restored

    def snapshot(self) -> tuple[int, dict[str, RankState]]:
        """As of `TrainerBase`, with the state of each adapter by its name."""
        if self.adapter_states is None:
            return super().snapshot()
        total, states = 0, dict[str, RankState]()
        for name in self._each():
            num_bytes, taken = super().snapshot()
            total += num_bytes
            states[name] = copy.deepcopy(taken[""])  # the next adapter comes into the same memory
        return total, states

    def _put_states(self, states: Sequence[dict[str, RankState]]) -> None:
        if self.adapter_states is None:
            return super()._put_states(states)
        for name in self._each():
            super()._put_states([{"": state[name]} for state in states])
            self.adapter_states.progress.counters = self.counters

    def state_hashes(self) -> dict[str, str]:
        """As of `ModelRank`, of each adapter."""
        if self.adapter_states is None:
            return super().state_hashes()
        self.reload()
        hashes: dict[str, str] = {}
        for name in self._each():
            hashes |= _of_adapter(name, super().state_hashes())
        return hashes

    def save_hf(self, path: str) -> None:
        """As of `ModelRank`, with a folder for each adapter, PATH/NAME."""
        if self.adapter_states is None:
            return super().save_hf(path)
        self.reload()
        for name in self._each():
            super().save_hf(f"{path}/{name}")


def _of_adapter(name: str, hashes: dict[str, str]) -> dict[str, str]:
    return {f"{kind} of {name}": value for kind, value in hashes.items()}


class PolicyTrainer(AdapterTrainer):
    """A rank of the policy.

    _scored     with a critic or reward model: what `score_ahead` made for the `prepare` or `train` of this rollout
    _prepared   with a critic: what `prepare` made for the `train` of this rollout
    _samples    the number of the last rollout, and its samples' values
    """

    _scored: tuple[int, Prepared] | None = None
    _prepared: tuple[int, Prepared] | None = None
    _samples: tuple[int, SampleColumns] = (-1, {})

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """Set up the model, and the reference and the teacher that the flags ask for."""
        facts = super().setup(master_addr, master_port)
        algorithm = self.config.algorithm
        if self.config.run.mode != "rl":
            return facts
        if algorithm.use_routing_replay or algorithm.use_rollout_routing_replay:
            from fusionrl.trainer.routing import RoutingReplay

            assert self.shape.mixture is not None, "the validation of flags asks for experts"
            self.trained.routing = RoutingReplay(self.trained.chunks, self.shape.mixture.topk, self.device)
        if needs_reference(algorithm):
            self._read_reference()
        if algorithm.use_opd and algorithm.opd_type == "megatron":
            assert algorithm.opd_teacher_load is not None
            self.read_weights("teacher", algorithm.opd_teacher_load, "--opd-teacher-load")
        return facts

    def _read_reference(self) -> None:
        from fusionrl.trainer.host_memory import WeightSet

        model = self.config.model
        if self.adapter_spec is not None:  # the model's own weights, without the adapters
            self.weight_sets["ref"] = WeightSet(())
            return
        if (model.megatron_checkpoint is not None or model.debug_random_weights) and model.ref_load is None:
            self.keep_weights("ref")
            return
        folder = model.ref_load or model.hf_checkpoint
        assert folder is not None
        self.read_weights("ref", folder, "--ref-load" if model.ref_load else "--hf-checkpoint")

    @property
    def stepping(self) -> Stepping:
        """As of `TrainerBase`, with a user's functions in the loss, or in its place."""
        config, hooks, stepping = self.config, self.hooks, super().stepping
        if config.algorithm.custom_tis_function_path or config.algorithm.custom_pg_loss_reducer_function_path:
            from fusionrl.trainer.loss_hooks import LossHooks

            stepping = replace(stepping, loss_hooks=LossHooks(config, hooks.args()))
        if config.run.mode == "rl" and config.algorithm.loss_type == "custom_loss":
            from fusionrl.trainer.loss_hooks import CustomLoss

            stepping = replace(stepping, custom=partial(CustomLoss, config, hooks.args, self.shape.vocab_size))
        return stepping

    def train(
        self, rollout_id: int, shard: TrainShard | list[list[ObjectRef]], columns: Sequence[ColumnSource] = ()
    ) -> dict[str, float]:
        """Train on this rank's shard of a rollout: one optimizer step for each of its steps.

        shard    the shard, or references: a list of those that `pull` joins, for each of several adapters that has
                 samples, which learns from its own as in a run of its own
        columns  what a process reward model's `process_rewards` gave on each of its data-parallel ranks

        Returns `train/…` metrics, pooled over the optimizer steps (see `step_report.py`), and `adapter/…` of several
        adapters; the same on every rank. Raises ValueError for a shard that no loss can be computed from.
        """
        sources: list[ShardSource] = list(shard) if isinstance(shard, list) else [shard]
        learned: dict[str | None, Learned] = {}
        with phase("train", step=rollout_id + 1):
            for source in sources:
                with self._pulled(rollout_id, source, columns) as pulled:
                    if self.adapter_states is not None:
                        self.take_adapter(pulled.adapter)
                    learned[pulled.adapter] = self.learn(rollout_id, self._prepare(rollout_id, pulled))
                self.trained.is_amid = len(learned) < len(sources)
        self._samples = rollout_id, {k: v for part in learned.values() for k, v in part.samples.items()}
        metrics = self.metrics_of(list(learned.values()))
        if self.adapter_states is None:
            return metrics
        self.adapter_states.note(rollout_id)
        return metrics | self.metrics_by_adapter(learned)

    def score_ahead(self, rollout_id: int, shard: ShardSource) -> None:
        """Compute the log-probs that the `prepare` or `train` that follows needs, which do not need its columns.

        So the policy works while a critic, or a process reward model, makes them.
        """
        self._scored = None
        with phase("score ahead", step=rollout_id + 1), self._pulled(rollout_id, shard) as pulled:
            if self.loss.mode == "rl":
                self._scored = rollout_id, self._score(rollout_id, pulled)

    def prepare(self, rollout_id: int, shard: ShardSource, columns: Sequence[ColumnSource]) -> Handed:
        """With a critic: compute the advantages for the `train` that follows, and return the critic's targets.

        These are the columns values and returns; `train` reports the metrics.
        """
        self._prepared = None
        with phase("prepare", step=rollout_id + 1), self._pulled(rollout_id, shard, columns) as pulled:
            prepared = self._prepare(rollout_id, pulled)
        self._prepared = rollout_id, prepared
        return {}, columns_of(prepared.shard, ("values", "returns"))

    def _prepare(self, rollout_id: int, shard: TrainShard) -> Prepared:
        """The stages score and advantages, or what `prepare` made of this rollout.

        Given answers (mode sft) need neither.
        """
        from fusionrl.trainer.advantages import add_advantages

        earlier, self._prepared = self._prepared, None
        if earlier is not None and earlier[0] == rollout_id:
            return earlier[1]
        if self.loss.mode != "rl":
            return Prepared(shard)
        scored = self._score(rollout_id, shard)
        with span("advantages"):
            metrics = add_advantages(scored.shard, self.config, self.device)
        self.hooks.after_advantages(rollout_id, scored.shard, self.device)
        return replace(scored, metrics=metrics)

    def _score(self, rollout_id: int, shard: TrainShard) -> Prepared:
        """The stage score, or what `score_ahead` made of this rollout, with the shard's columns."""
        from fusionrl.trainer.score import needed_log_probs, score

        earlier, self._scored = self._scored, None
        if earlier is not None and earlier[0] == rollout_id:
            shard.fields = earlier[1].shard.fields | shard.fields
            return replace(earlier[1], shard=shard)
        if self.config.algorithm.use_rollout_routing_replay:
            from fusionrl.trainer.routing import check_rollout_routing

            check_rollout_routing(shard, self.shape)
        policy, records = needed_log_probs(self.config, self.loss, len(shard.steps))
        return score(shard, self.scorer, self.hooks, policy=policy, records=records)

    def sample_columns(self, rollout_id: int) -> SampleColumns:
        """Return `shards.trained_columns` of training on `rollout_id`, the last one. Not a collective.

        {} where it was not trained on; and of each replica only one rank answers: the first of the last pipeline stage.
        """
        number, samples = self._samples
        return samples if number == rollout_id else {}

    @phase("validate")
    def evaluate_loss(self, shard: ShardSource) -> dict[str, float]:
        """Return eval/loss, the mean of -log p over all ranks' tokens with a loss mask, and eval/num_tokens."""
        from fusionrl.trainer.micro_batches import build_micro_batches
        from fusionrl.trainer.steps import evaluate

        self.reload()
        pulled = pull(shard)
        options = replace(self.batch_options, replay_layers=None)
        batches = [batch for step in pulled.steps for batch in build_micro_batches(pulled, step, options, self.layout)]
        with self.lent_adapter(pulled.adapter):
            total, tokens = evaluate(self.trained, batches, self.device)
        return {"eval/loss": total / max(tokens, 1.0), "eval/num_tokens": tokens}
