"""Stages 4 and 5, pack and steps: an optimizer step for each of a prepared shard's steps, and its report."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.observe.spans import span
from fusionrl.pipeline.knobs import Knobs
from fusionrl.trainer.custom_loss import CustomLoss
from fusionrl.trainer.loss import LossOptions, LossSums
from fusionrl.trainer.loss_hooks import LossHooks
from fusionrl.trainer.micro_batches import build_micro_batches
from fusionrl.trainer.process_groups import gathered
from fusionrl.trainer.score import Scorer
from fusionrl.trainer.selection import look_ahead
from fusionrl.trainer.stages import Prepared
from fusionrl.trainer.staleness_bound import check_staleness
from fusionrl.trainer.step import StepLoss, train_step
from fusionrl.trainer.step_report import StepReport
from fusionrl.trainer.train_hooks import TrainHooks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stepping:
    """The model, the loss and the hooks of a rank's optimizer steps.

    num_before  optimizer steps of the run so far, those that were skipped included
    custom      makes the loss of a step of --loss-type custom_loss
    loss_hooks  a user's functions within the built-in loss
    knobs       of a pipeline that runs ahead, with --max-staleness; None: one rollout after the other has no bound
    """

    config: Config
    model: Scorer
    loss: LossOptions
    hooks: TrainHooks
    skips: SkipWatch
    num_before: int
    custom: Callable[[TrainShard, TrainStep], CustomLoss] | None = None
    loss_hooks: LossHooks | None = None
    knobs: Knobs | None = None


def take_steps(prepared: Prepared, stepping: Stepping, rollout_id: int) -> tuple[list[StepReport], np.ndarray | None]:
    """Take the optimizer steps of a rollout; collective over all ranks.

    Returns (a report for each step; [2, response tokens] log-probs and entropies that the losses saw, NaN where they
    saw none, or None of a loss that does not see them). Raises FloatingPointError if too many steps in a row were
    skipped; HookError if a token is older than --max-staleness.
    """
    shard, experts, fields = prepared.shard, prepared.experts, prepared.shard.fields
    trained, options = stepping.model.trained, stepping.model.options
    sees_tokens = stepping.loss.mode == "rl" and stepping.custom is None
    scores = _TokenScores(shard.response_lengths, options.device) if sees_tokens else None
    reports: list[StepReport] = []
    for index, step in enumerate(shard.steps):
        # By the weights after the step before: a loss may have to know a whole step before any of its tokens.
        ahead = look_ahead(
            shard, index, experts, stepping.config, stepping.loss, stepping.model, stepping.num_before + index
        )
        with span("pack"):
            batches = build_micro_batches(shard, step, options, stepping.model.layout, experts)
        stepping.hooks.before_step(rollout_id, index, trained)
        if stepping.knobs is not None:
            check_staleness(shard, step, rollout_id, stepping.knobs)
        loss = StepLoss(
            options=stepping.loss,
            # After the first step the weights are no longer those that the rollout was made with.
            compare=index == 0 or "log_probs" in fields,
            custom=None if stepping.custom is None else stepping.custom(shard, step),
            hooks=stepping.loss_hooks,
        )
        with span("optimizer step", index=index, micro_batches=len(batches)):
            report, parts = train_step(trained, batches, loss, options.device)
        bad = {sample for part in parts for sample in part.bad_samples()} if report.numbers["skipped"] else set()
        if scores is not None:
            scores.add(parts)
        del batches, parts  # or the micro-batches would stay on the device while the next ones are packed
        stepping.skips.see(rollout_id, index, report, [int(fields["sample_index"][i]) for i in sorted(bad)])
        report.numbers.update(
            num_tokens=float(step.num_tokens),
            num_samples=float(step.num_samples),
            masked_samples=float(step.num_samples - round(report.sequence_sums["sequences"])),
            **ahead,
        )
        reports.append(report)
    return reports, None if scores is None else scores.flat()


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

    def __init__(self, max_in_a_row: int, rank: int) -> None:
        self.max_in_a_row, self.rank, self._in_a_row = max_in_a_row, rank, 0

    def see(self, rollout_id: int, index: int, report: StepReport, bad: list[int]) -> None:
        """Look at the report of optimizer step `index`; of a skipped one say which samples made it. Then a collective.

        `bad`: indices of this rank's samples whose loss is not finite. Raises FloatingPointError after too many steps
        in a row.
        """
        if not report.numbers["skipped"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        reason = _reason(report, sorted({sample for samples in gathered(bad) for sample in samples}))
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
