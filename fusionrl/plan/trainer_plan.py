"""The plan for the ranks of one group of trainers: the policy's, a critic's, or a process reward model's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fusionrl.config.config import Config
from fusionrl.config.run_parts import is_streamed
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.defaults import Precision, trainer_precision, trainer_threads
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.pipeline_knobs import knobs_of


@dataclass(frozen=True)
class TrainerPlan:
    """The plan's answers for a group of trainers. A tool or a test without a run makes one with `trainer_plan`.

    layout       parallel sizes; its dp is the number of shards of a rollout
    num_threads  CPU threads of a rank
    num_steps    optimizer steps of the whole run, over which the learning rate decays; None: not known
    answers      values for hooks of the flags that `auto` or nothing left open, by the flags' names
    knobs        of a pipeline that runs ahead; None: one rollout after the other
    """

    layout: TrainerLayout
    device: Literal["cpu", "cuda"]
    precision: Precision
    num_threads: int
    num_steps: int | None = None
    answers: Mapping[str, object] = field(default_factory=dict)
    knobs: Knobs | None = None


def trainer_plan(
    config: Config, layout: TrainerLayout, device: Literal["cpu", "cuda"] = "cpu", num_cores: int = 1
) -> TrainerPlan:
    """Return the plan of trainers that no run has: `num_cores` are shared out to the ranks, as on one node."""
    has_batches = config.rollout.rollout_batch_size is not None
    return TrainerPlan(
        layout,
        device,
        trainer_precision(config.model.precision, device),
        trainer_threads(config.cluster.train_num_threads, num_cores, layout.world_size),
        knobs=knobs_of(config, None, num_engines=1) if is_streamed(config) and has_batches else None,
    )
