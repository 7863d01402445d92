"""The values that pass between the stages of a training step.

    pull → score → advantages → pack → steps → report

    pull        TrainShard, of which this rank may change the fields
    score       Prepared: log-probs of before the first step, as far as loss and advantages need them
    advantages  Prepared: everything that the loss needs
    pack        PackedStep, one for each optimizer step
    steps       StepsTaken
    report      TrainReport

Hooks are called at the borders between the stages (`train_hooks.py`).
A critic and a process reward model have no advantages; their shards are prepared when they are pulled and scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.trainer.sample_columns import SampleColumns
from fusionrl.trainer.step_report import StepReport

if TYPE_CHECKING:
    from fusionrl.trainer.packed_batch import MicroBatch

# The experts that routers chose when they were recorded: samples of a micro-batch → [tokens, mixtures, topk].
Experts = dict[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Prepared:
    """A shard with columns that were added, the experts that were recorded, and metrics of its making (no prefix)."""

    shard: TrainShard
    experts: Experts = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedStep:
    """The micro-batches of one optimizer step.

    index       of the step in its rollout
    look_ahead  metrics of what the loss had to know of the whole step
    """

    index: int
    step: TrainStep
    shard: TrainShard
    batches: list[MicroBatch]
    look_ahead: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepsTaken:
    """The reports of a rollout's optimizer steps.

    token_scores  [2, response tokens] log-probs and entropies that the losses saw, NaN where they saw none; None: of a
                  loss that does not see them
    """

    reports: list[StepReport]
    token_scores: np.ndarray | None = None

    @property
    def num_skipped(self) -> int:
        """Optimizer steps that changed nothing."""
        return sum(int(report.numbers["skipped"]) for report in self.reports)


@dataclass(frozen=True)
class TrainReport:
    """The metrics of a rollout, the same on every rank, and values of this rank's single samples by their position."""

    metrics: dict[str, float]
    samples: SampleColumns = field(default_factory=dict)
