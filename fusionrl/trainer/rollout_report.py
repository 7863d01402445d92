"""Stage 6, report: the metrics of a rollout, and values of its single samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrl.trainer.sample_columns import add_token_values, sample_columns
from fusionrl.trainer.shared_columns import SampleColumns
from fusionrl.trainer.stages import Prepared, StepsTaken, TrainReport
from fusionrl.trainer.step_report import pooled_metrics

if TYPE_CHECKING:
    from fusionrl.trainer.loss import LossOptions


def report(
    prepared: Prepared, taken: StepsTaken, loss: LossOptions, *, prefix: str, with_samples: bool = False
) -> TrainReport:
    """Report the steps that were taken on `prepared`; no collective.

    Args:
        prepared: the shard, and the metrics of its making.
        taken: what its steps told.
        loss: the loss that was trained on.
        prefix: of the metrics' names, without a slash.
        with_samples: this rank answers for the samples of its replica.
    """
    # With the engine's log-probs as the old ones, the first step's ratios are not 1.
    metrics = pooled_metrics(taken.reports, first_is_old=not loss.use_rollout_log_probs) | prepared.metrics
    samples: SampleColumns = {}
    if with_samples and loss.mode == "rl":
        samples = sample_columns(prepared.shard, taken.mean_differences)
        if taken.token_scores is not None:
            add_token_values(samples, prepared.shard, taken.token_scores)
    return TrainReport({f"{prefix}/{name}": value for name, value in metrics.items()}, samples)
