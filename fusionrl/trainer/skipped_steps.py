"""Optimizer steps that were skipped because a loss or a gradient was not finite: which samples, and how many."""

from __future__ import annotations

import logging
import math

import torch.distributed as dist

from fusionrl.trainer.step_report import StepReport

logger = logging.getLogger(__name__)


class SkipWatch:
    """Counts the skipped steps in a row; after `max_in_a_row` (--max-skipped-steps) it ends the run."""

    def __init__(self, max_in_a_row: int, rank: int, world_size: int) -> None:
        self.max_in_a_row, self.rank, self.world_size = max_in_a_row, rank, world_size
        self._in_a_row = 0

    def see(self, rollout_id: int, index: int, report: StepReport, bad: list[int]) -> None:
        """Look at the report of optimizer step `index`; of a skipped one say which samples made it. Then a collective.

        Args:
            rollout_id: of the step.
            index: of the step in the rollout.
            report: of the step.
            bad: indices of this rank's samples whose loss is not finite.

        Raises:
            FloatingPointError: too many steps in a row.
        """
        if not report.numbers["skipped"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        everyone: list[list[int]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everyone, bad)
        reason = _reason(report, sorted({sample for samples in everyone for sample in samples}))
        message = f"step {rollout_id + 1}, optimizer step {index + 1} of this rollout: skipped, {reason}"
        if self._in_a_row >= self.max_in_a_row:
            raise FloatingPointError(
                f"{message}; that makes {self._in_a_row} in a row (--max-skipped-steps), so the run ends; "
                f"lower --lr, or look at the samples in rollouts/step_{rollout_id + 1:06d}.train.a….jsonl of the run"
            )
        if self.rank == 0:
            logger.warning("%s", message)


def _reason(report: StepReport, samples: list[int]) -> str:
    if samples:
        listing = ", ".join(map(str, samples[:10])) + (f" and {len(samples) - 10} more" if len(samples) > 10 else "")
        return f"the loss of sample{'s' * (len(samples) > 1)} {listing} is not finite"
    if not math.isfinite(report.sums["loss"]):
        return "the loss is not finite"
    return f"the loss is finite, the gradient is not (norm {report.numbers['grad_norm']})"
