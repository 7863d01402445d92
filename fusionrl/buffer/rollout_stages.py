"""One rollout, stage after stage: collect or replay → score → report → write → accept → choose → cut.

Each stage is a function of the stage before it, in a file of its own; users' functions are called at the borders
between them. The collection is the only stage that waits for engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusionrl.buffer.collect import Collector, limits_of
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.buffer.reject_sampling import AcceptedSamples
from fusionrl.buffer.rollout_report import mean_metrics, report
from fusionrl.buffer.sample_files import SampleFiles, TrainedSamples, load_samples, save_samples
from fusionrl.buffer.staleness import StepStaleness, training_version
from fusionrl.buffer.stream import Batch
from fusionrl.buffer.train_shards import cut
from fusionrl.buffer.training_samples import by_adapter, choose, pooled, score
from fusionrl.config.config import Config
from fusionrl.config.off_policy import corrects_by_default
from fusionrl.data.sample import Sample, is_trained_on
from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.spans import phase, span
from fusionrl.plan.adapters import adapter_names
from fusionrl.plan.flops import Work
from fusionrl.plan.plan import Plan
from fusionrl.rollout.weight_versions import warn_once


@dataclass
class Rollout:
    """A rollout as the driver gets it: references to one shard a rank, and numbers."""

    rollout_id: int
    shards: list[Any]  # object references, from which the trainers pull their shards; of several adapters, one by one
    metrics: dict[str, float] = field(default_factory=dict)
    num_accepted: int = 0
    auxiliary_shards: list[Any] = field(default_factory=list)  # the same samples, cut for the critic's or prm's ranks
    warnings: list[str] = field(default_factory=list, kw_only=True)  # for the console
    facts: RolloutFacts | None = field(default=None, kw_only=True)  # for warnings; not in --mode sft
    glimpses: list[Glimpse] = field(default_factory=list, kw_only=True)  # --log-samples of its samples
    work: Work = field(default_factory=Work, kw_only=True)  # of the samples that are trained on


class RolloutStages:
    """The stages of a rollout, and the files that they write."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        border: HookBorder,
        collector: Collector,
        writer: RolloutWriter,
        accepted: AcceptedSamples,
        attempt: int,
        put: Callable[[TrainShard], object],
    ) -> None:
        self._config, self._plan, self._border, self._collector = config, plan, border, collector
        self._accepted, self._put, self._adapters = accepted, put, adapter_names(config)
        self._files = SampleFiles(config, writer, attempt)
        self.trained = TrainedSamples(writer)

    def make(self, rollout_id: int, pushed_version: int | None, since: float) -> Rollout:
        """Make rollout `rollout_id`, which began at `since` (`time.monotonic`): collected, or read from a file."""
        if path := self._config.run.load_debug_rollout_data:
            pushed_version = None  # the versions in the file are those of another run
            return self._pass_on(rollout_id, load_samples(path, rollout_id, self._plan), {}, pushed_version, since)
        with phase("collect", lane="stages", step=rollout_id + 1):
            samples, metrics = self._collector.collect(rollout_id)
        return self._pass_on(rollout_id, samples, metrics, pushed_version, since)

    def make_of(self, rollout_id: int, batch: Batch, since: float) -> Rollout:
        """Make rollout `rollout_id` of what the stream gave."""
        samples = self._collector.finish(batch.groups, batch.refused)
        warn_without_log_probs(samples, self._config)
        return self._pass_on(rollout_id, samples, batch.metrics, batch.version, since, trains=rollout_id)

    def _pass_on(
        self,
        rollout_id: int,
        samples: list[Sample],
        metrics: dict[str, float],
        pushed_version: int | None,
        since: float,
        trains: int | None = None,
    ) -> Rollout:
        """Take the samples through the stages behind the collection.

        trains  version of the trainers' weights where they are ahead of the engines': they train several rollouts
                between two pushes, and log-probs of older weights are not compared with theirs
        """
        config, border, mode = self._config, self._border, self._config.run.mode
        if config.run.save_debug_rollout_data:
            save_samples(config.run.save_debug_rollout_data, rollout_id, samples)
        num_accepted, shards, auxiliary, work = 0, list[Any](), list[Any](), Work()
        with span("score and report", lane="stages"):
            divided = by_adapter(samples, self._adapters)
            parts = {name: score(members, config, border) for name, members in divided.items()}
            scored = pooled(list(parts.values()))
            metrics, facts, glimpses = report(rollout_id, scored, metrics, pushed_version, since, config, border)
            if len(self._adapters) > 1:
                for name, part in parts.items():
                    metrics |= mean_metrics(f"adapter/{name}", part.samples, part.raw)
        with span("write", lane="stages"):
            path = self._files.write(rollout_id, scored.samples)
        if mode == "reject-sampling":
            counts = self._accepted.add(rollout_id, scored.samples, scored.raw)
            num_accepted = counts["accepted"]
            metrics |= {f"rollout/{name}": float(count) for name, count in counts.items()}
        elif self._plan.balance is not None and self._plan.batch is not None and mode != "eval":
            num_steps, limits = self._plan.batch.num_steps, limits_of(self._plan)
            chosen = {name: choose(part, config, num_steps, limits, border) for name, part in parts.items()}
            trained = pooled(list(chosen.values()))
            if path is not None and mode == "rl":
                has_indices = all(part.has_indices for part in chosen.values())
                self.trained.gave(rollout_id, path, scored.samples, trained.samples, has_indices)
            images = {image.key: image.num_tokens for sample in trained.samples for _, image in sample.image_spans}
            work = Work.of((sample.num_tokens for sample in trained.samples), images.values())
            versions = {name: training_version(part.samples, pushed_version) for name, part in parts.items()}
            # `cut` takes the samples out of the last lists that hold them; some of these may be the same list.
            cut_lists = {id(part.samples) for part in chosen.values()}
            for held in (samples, scored.samples, trained.samples, *(part.samples for part in parts.values())):
                if id(held) not in cut_lists:
                    held.clear()
            # Without a push the versions belong to another run, whose steps are unknown.
            newest = pushed_version if trains is None else trains
            ages = None if newest is None else StepStaleness.of(newest, config)
            temperature, first = config.rollout.rollout_temperature, 0
            for name, part in chosen.items():
                version, count = versions[name] if trains is None else trains, len(part.samples)
                with phase("cut", lane="stages", step=rollout_id + 1):
                    refs = cut(part, self._plan, rollout_id, version, self._put, ages, temperature, name, first)
                shards, auxiliary, first = shards + refs[0], auxiliary + refs[1], first + count
            metrics |= {} if ages is None else ages.metrics()
        return Rollout(rollout_id, shards, metrics, num_accepted, auxiliary, facts=facts, glimpses=glimpses, work=work)


def warn_without_log_probs(samples: Sequence[Sample], config: Config) -> None:
    """Warn once if --use-tis is on by default, not by the user, and a function sets no rollout_log_probs.

    Such rollouts are trained uncorrected. Where the flag was given, they are an error of the loss.
    """
    if not corrects_by_default(config):
        return
    lacking = next((s for s in samples if is_trained_on(s) and s.rollout_log_probs is None), None)
    if lacking is not None:
        warn_once(
            "rollout_log_probs of --use-tis",
            f"sample {lacking.index} has no rollout_log_probs, so --use-tis, the default of --pipeline"
            f" {config.run.pipeline}, does nothing in such rollouts: tokens of older weights are taken for tokens of"
            " the newest. Let your function set them (docs/guides/agents.md), or give --no-use-tis",
        )
