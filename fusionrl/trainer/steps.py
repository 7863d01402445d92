"""Stage 5, steps: one optimizer step for each packed step, and its report."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.observe.spans import span
from fusionrl.trainer.custom_loss import CustomLoss
from fusionrl.trainer.loss import LossOptions, LossSums
from fusionrl.trainer.loss_hooks import LossHooks
from fusionrl.trainer.model import Trained
from fusionrl.trainer.stages import PackedStep, StepsTaken
from fusionrl.trainer.staleness_bound import Bound
from fusionrl.trainer.step import StepLoss, train_step
from fusionrl.trainer.step_report import StepReport
from fusionrl.trainer.train_hooks import TrainHooks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stepping:
    """The model, the loss and the hooks of a rank's optimizer steps.

    custom      makes the loss of a step of --loss-type custom_loss
    loss_hooks  a user's functions within the built-in loss
    bound       on the staleness of what is trained; None: there is none
    """

    trained: Trained
    device: torch.device
    loss: LossOptions
    hooks: TrainHooks
    skips: SkipWatch
    custom: Callable[[TrainShard, TrainStep], CustomLoss] | None = None
    loss_hooks: LossHooks | None = None
    bound: Bound | None = None


def take_steps(packed: Iterable[PackedStep], stepping: Stepping, rollout_id: int) -> StepsTaken:
    """Take the optimizer steps of a rollout; collective over all ranks.

    Raises:
        FloatingPointError: too many steps in a row were skipped.
        HookError: a token is older than --max-staleness.
    """
    reports: list[StepReport] = []
    scores: _TokenScores | None = None
    for batch in packed:
        fields = batch.shard.fields
        stepping.hooks.before_step(rollout_id, batch.index, stepping.trained)
        if stepping.bound is not None:
            stepping.bound.check(batch.shard, batch.step, rollout_id)
        loss = StepLoss(
            options=stepping.loss,
            # After the first step the weights are no longer those that the rollout was made with.
            compare=batch.index == 0 or "log_probs" in fields,
            custom=None if stepping.custom is None else stepping.custom(batch.shard, batch.step),
            hooks=stepping.loss_hooks,
        )
        with span("optimizer step", index=batch.index, micro_batches=len(batch.batches)):
            outcome = train_step(stepping.trained, batch.batches, loss, stepping.device)
        report, bad = outcome.report, [int(fields["sample_index"][i]) for i in outcome.bad_samples()]
        if stepping.loss.mode == "rl" and stepping.custom is None:
            scores = scores or _TokenScores(batch.shard.response_lengths, stepping.device)
            scores.add(outcome.parts)
        del outcome  # it holds the micro-batches, which would stay on the device during the next step
        stepping.skips.see(rollout_id, batch.index, report, bad)
        report.numbers.update(
            num_tokens=float(batch.step.num_tokens),
            num_samples=float(batch.step.num_samples),
            masked_samples=float(batch.step.num_samples - round(report.sequence_sums["sequences"])),
            **batch.look_ahead,
        )
        reports.append(report)
    return StepsTaken(reports, None if scores is None else scores.flat())


class _TokenScores:
    """[2, response tokens] log-probs and entropies of a rank's shard as the losses of its steps saw them.

    They stay on the device until `flat`, which is asked once a rollout.
    """

    def __init__(self, response_lengths: np.ndarray, device: torch.device) -> None:
        self._ends = np.cumsum(response_lengths)
        self._starts = self._ends - response_lengths
        # The third row says whether a token has values: each is on one context-parallel rank.
        self._values = torch.zeros(3, int(response_lengths.sum()), device=device)

    def add(self, parts: Iterable[LossSums]) -> None:
        """Add the micro-batches of an optimizer step; none but on the last pipeline stage."""
        for part in parts:
            if part.scores is None or part.batch is None or not part.batch.samples:
                continue
            # Places of the micro-batch's response tokens in the shard, one sample after the other.
            stretches = [np.arange(self._starts[sample], self._ends[sample]) for sample in part.batch.samples]
            places = torch.from_numpy(np.concatenate(stretches)).to(self._values.device)
            chosen = places[part.batch.responses.to(places.device)]
            self._values[:2, chosen] = part.scores[:2].to(self._values.dtype)
            self._values[2, chosen] = 1.0

    def flat(self) -> np.ndarray:
        """The values, NaN where a token has none. A collective of the context-parallel ranks."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(self._values, group=group)
        values = self._values.cpu().numpy()
        return np.where(values[2] > 0, values[:2], np.nan)


class SkipWatch:
    """Counts the skipped steps in a row; after `max_in_a_row` (--max-skipped-steps) it ends the run."""

    def __init__(self, max_in_a_row: int, rank: int, world_size: int) -> None:
        self.max_in_a_row, self.rank, self.world_size = max_in_a_row, rank, world_size
        self._in_a_row = 0

    def see(self, rollout_id: int, index: int, report: StepReport, bad: list[int]) -> None:
        """Look at the report of optimizer step `index`; of a skipped one say which samples made it. Then a collective.

        `bad`: indices of this rank's samples whose loss is not finite.

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
