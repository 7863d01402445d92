"""Stage 5, steps: one optimizer step for each packed step, and its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fusionrl.observe.spans import span
from fusionrl.trainer.custom_loss import CustomLoss, CustomLossOptions
from fusionrl.trainer.loss import LossOptions, LossSums
from fusionrl.trainer.loss_hooks import LossHooks
from fusionrl.trainer.model import Trained
from fusionrl.trainer.skipped_steps import SkipWatch
from fusionrl.trainer.stages import PackedStep, StepsTaken
from fusionrl.trainer.staleness_bound import Bound
from fusionrl.trainer.step import train_step
from fusionrl.trainer.step_loss import StepLoss
from fusionrl.trainer.step_report import StepReport
from fusionrl.trainer.token_scores import TokenScores
from fusionrl.trainer.train_hooks import TrainHooks


@dataclass(frozen=True)
class Stepping:
    """The model, the loss and the hooks of a rank's optimizer steps.

    custom      of --loss-type custom_loss
    loss_hooks  a user's functions within the built-in loss
    bound       on the staleness of what is trained; None: there is none
    keeps_scores  log-probs and entropies of tokens are kept (--save-token-values)
    """

    trained: Trained
    device: torch.device
    loss: LossOptions
    hooks: TrainHooks
    skips: SkipWatch
    custom: CustomLossOptions | None = None
    loss_hooks: LossHooks | None = None
    bound: Bound | None = None
    keeps_scores: bool = False


def take_steps(packed: Iterable[PackedStep], stepping: Stepping, rollout_id: int) -> StepsTaken:
    """Take the optimizer steps of a rollout; collective over all ranks.

    Raises:
        FloatingPointError: too many steps in a row were skipped.
        HookError: a token is older than --max-staleness.
    """
    reports: list[StepReport] = []
    differences: _Differences | None = None
    scores: TokenScores | None = None
    for batch in packed:
        fields = batch.shard.fields
        if batch.index == 0 and stepping.loss.mode == "rl" and "rollout_log_probs" in fields:
            # Where the shard has the trainers' log-probs, it has itself what is compared.
            differences = None if "log_probs" in fields else _Differences(batch.shard.num_samples, stepping.device)
        stepping.hooks.before_step(rollout_id, batch.index, stepping.trained)
        if stepping.bound is not None:
            stepping.bound.check(batch.shard, batch.step, rollout_id)
        loss = StepLoss(
            options=stepping.loss,
            # After the first step the weights are no longer those that the rollout was made with.
            compare=batch.index == 0 or "log_probs" in fields,
            custom=None if stepping.custom is None else CustomLoss(stepping.custom, batch.shard, batch.step),
            hooks=stepping.loss_hooks,
            keeps_scores=stepping.keeps_scores,
        )
        with span("optimizer step", index=batch.index, micro_batches=len(batch.batches)):
            outcome = train_step(stepping.trained, batch.batches, loss, stepping.device)
        report, bad = outcome.report, [int(fields["sample_index"][i]) for i in outcome.bad_samples()]
        if differences is not None:
            differences.add(outcome.parts)
        if stepping.keeps_scores:
            scores = scores or TokenScores(batch.shard.response_lengths, stepping.device)
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
    means = None if differences is None else differences.means()
    return StepsTaken(reports, means, None if scores is None else scores.flat())


class _Differences:
    """Sums over each sample's tokens of |trainer - engine|, as losses see them: this rank's part of the tokens."""

    def __init__(self, num_samples: int, device: torch.device) -> None:
        self._sums = torch.zeros(num_samples, 2, dtype=torch.float64, device=device)

    def add(self, parts: Iterable[LossSums]) -> None:
        """Add the micro-batches of an optimizer step; none but on the last pipeline stage."""
        for part in parts:
            if part.differences is not None and part.batch is not None and part.batch.samples:
                places = torch.tensor(part.batch.samples, device=self._sums.device)
                self._sums.index_add_(0, places, part.differences)

    def means(self) -> np.ndarray:
        """[num_samples] mean over the compared tokens, NaN without any. A collective of the context-parallel ranks."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(self._sums, group=group)
        total, count = self._sums.cpu().numpy().T
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)
