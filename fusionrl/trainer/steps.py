"""Stages 4 and 5, pack and steps: an optimizer step for each of a prepared shard's steps, and its report.

Gradients are summed, not averaged, over data- and context-parallel ranks, because the loss is already divided by the
global count (`loss.py`): Megatron's `calculate_per_token_loss` sets its scaling to 1, and its own division by a token
count is left out (`model.build_training`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.data.sample_fields import UNKNOWN_VERSION
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.observe.spans import span
from fusionrl.pipeline.knobs import Knobs
from fusionrl.trainer.advantages import look_ahead
from fusionrl.trainer.loss import LossOptions, LossSums, micro_batch_loss
from fusionrl.trainer.megatron_core import settle
from fusionrl.trainer.micro_batches import MicroBatch, build_micro_batches
from fusionrl.trainer.model import Trained
from fusionrl.trainer.process_groups import gathered
from fusionrl.trainer.score import Scorer, forward_log_probs, run_forward
from fusionrl.trainer.shards import Prepared
from fusionrl.trainer.step_report import StepReport

if TYPE_CHECKING:
    from fusionrl.trainer.loss_hooks import CustomLoss, LossHooks
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


METRICS = """
train/mtp_loss | nats | Mean of -log p over trained tokens and layers of multi-token prediction: how well drafts
    foresee what the policy writes. Without --mtp-loss-scaling-factor, and no part of train/loss; train/grad_norm
    counts the gradients of these layers. | --enable-mtp-training
{train,critic,prm}/lr | rate | Learning rate, mean over the optimizer steps.
{train,critic,prm}/grad_norm | norm | L2 norm of the whole gradient before --clip-grad, mean over the optimizer steps.
{train,critic,prm}/skipped | steps | Optimizer steps that were skipped because a loss or a gradient was not finite.
{train,critic,prm}/num_tokens | tokens | Tokens that were trained on, all steps together.
{train,critic,prm}/num_samples | samples | Attempts of the optimizer steps: what the loss divides by with
    --loss-aggregation sequence_mean and constant. Attempts without a trained token count; several samples that share a
    rollout_id are one.
{train,critic,prm}/masked_samples | samples | Of these, attempts without a trained token: removed by a filter, failed,
    or masked throughout.
"""


def take_steps(prepared: Prepared, stepping: Stepping, rollout_id: int) -> tuple[list[StepReport], np.ndarray | None]:
    """Take the optimizer steps of a rollout; collective over all ranks.

    Returns (a report for each step; [2, response tokens] log-probs and entropies that the losses saw, NaN where they
    saw none, or None of a loss that does not see them). Raises FloatingPointError if too many steps in a row were
    skipped; HookError if a token is older than --max-staleness.
    """
    shard, experts, fields = prepared.shard, prepared.experts, prepared.shard.fields
    trained, options = stepping.model.trained, stepping.model.options
    scores: torch.Tensor | None = None
    if stepping.loss.mode == "rl" and stepping.custom is None:
        # Log-probs and entropies as the losses saw them, and whether a token has them, which stay on the device.
        scores = torch.zeros(3, int(shard.response_lengths.sum()), device=options.device)
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
            check=partial(check_equal, shard, f"step {rollout_id + 1}, optimizer step {index + 1}", index == 0)
            if stepping.config.run.bitwise and stepping.loss.mode == "rl" and options.device.type == "cpu"
            else None,
        )
        with span("optimizer step", index=index, micro_batches=len(batches)):
            report, parts = train_step(trained, batches, loss, options.device)
        bad = {sample for part in parts for sample in part.bad_samples()} if report.numbers["skipped"] else set()
        if scores is not None:
            _keep_scores(scores, shard.response_lengths, parts)
        del batches, parts  # or the micro-batches would stay on the device while the next ones are packed
        stepping.skips.see(rollout_id, index, report, [int(fields["sample_index"][i]) for i in sorted(bad)])
        report.numbers.update(
            num_tokens=float(step.num_tokens),
            num_samples=float(step.num_samples),
            masked_samples=float(step.num_samples - round(report.sequence_sums["sequences"])),
            **ahead,
        )
        reports.append(report)
    if scores is None:
        return reports, None
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:  # each token is on one of its ranks
        dist.all_reduce(scores, group=group)
    values = scores.cpu().numpy()
    return reports, np.where(values[2] > 0, values[:2], np.nan)


def _keep_scores(scores: torch.Tensor, response_lengths: np.ndarray, parts: Iterable[LossSums]) -> None:
    """Put what the losses of an optimizer step saw into [3, response tokens]; only the last pipeline stage saw any."""
    ends = np.cumsum(response_lengths)
    for part in parts:
        if part.scores is None or part.batch is None or not part.batch.samples:
            continue
        # Places of the micro-batch's response tokens in the shard, one sample after the other.
        stretches = [np.arange(ends[sample] - response_lengths[sample], ends[sample]) for sample in part.batch.samples]
        places = torch.from_numpy(np.concatenate(stretches)).to(scores.device)
        chosen = places[part.batch.responses.to(places.device)]
        scores[:2, chosen] = part.scores[:2].to(scores.dtype)
        scores[2, chosen] = 1.0


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
        if samples := sorted({sample for samples in gathered(bad) for sample in samples}):
            more = f" and {len(samples) - 10} more" if len(samples) > 10 else ""
            listing = ", ".join(map(str, samples[:10])) + more
            reason = f"the loss of sample{'s' * (len(samples) > 1)} {listing} is not finite"
        elif not math.isfinite(report.sums["loss"]):
            reason = "the loss is not finite"
        else:
            reason = f"the loss is finite, the gradient is not (norm {report.numbers['grad_norm']})"
        message = f"step {rollout_id + 1}, optimizer step {index + 1} of this rollout: skipped, {reason}"
        if self._in_a_row >= self.max_in_a_row:
            raise FloatingPointError(
                f"{message}; that makes {self._in_a_row} in a row (--max-skipped-steps), so the run ends; "
                f"lower --lr, or look at the samples in rollouts/step_{rollout_id + 1:06d}.train.a….jsonl of the run"
            )
        if self.rank == 0:
            logger.warning("%s", message)


def check_staleness(shard: TrainShard, step: TrainStep, rollout_id: int, knobs: Knobs) -> None:
    """Hold the trained tokens of an optimizer step of rollout `rollout_id` to --max-staleness.

    Tokens of an unknown version pass; the Buffer counts them (`rollout/staleness/unknown`). Raises HookError, which
    names the first sample that is too old, its prompt, the token and its version.
    """
    if "weight_versions" not in shard.fields:
        return
    versions, masks = shard.split("weight_versions"), shard.split("loss_mask")
    for place in sorted(i for group in step.micro_batches for i in group):
        trained = np.flatnonzero((masks[place] > 0) & (versions[place] != UNKNOWN_VERSION))
        if not trained.size:
            continue
        token = int(trained[versions[place][trained].argmin()])
        sample, prompt = (int(shard.fields[name][place]) for name in ("sample_index", "group_index"))
        what = f"sample {sample} of prompt {prompt} has token {token} of its response"
        if (reason := knobs.staleness_error(what, int(versions[place][token]), rollout_id)) is not None:
            error = HookError(
                f"{reason}; a function that runs after the batch was taken must not bring older tokens, nor change"
                " weight_versions"
            )
            error.positions = [place]
            raise error


def check_equal(shard: TrainShard, when: str, is_first: bool, batch: MicroBatch, log_probs: Tensor | None) -> None:
    """Hold the log-probs of a micro-batch to those of the engine that sampled it, bit by bit (--bitwise).

    Those from before the steps, if there are some, and in the first step `log_probs` [N], of the pass with gradients:
    then every ratio is exactly 1. Tokens of older weights are left out. Raises RuntimeError, which names the token.
    """
    if "rollout_log_probs" not in batch.fields:
        raise RuntimeError(f"--bitwise: {when}: the rollout has no log-probs of the engine to compare with")
    engine = batch.fields["rollout_log_probs"]
    counts = batch.fields["loss_mask"] * batch.fields.get("current", 1.0) > 0
    for name, values in (("", log_probs if is_first else None), (" before the steps", batch.fields.get("log_probs"))):
        wrong = [] if values is None else (counts & (values != engine)).nonzero()[:, 0].tolist()
        if values is not None and wrong:
            first, number = wrong[0], int(batch.sequences[wrong[0]])
            token = int(batch.responses[first]) - sum(batch.response_lengths[:number])
            sample = int(shard.fields["sample_index"][batch.samples[number]])
            raise RuntimeError(
                f"--bitwise: {when}: sample {sample}, token {token} of its response: the trainer's log-prob{name} is"
                f" {float(values[first])!r}, the engine's {float(engine[first])!r} ({len(wrong)} of"
                f" {int(counts.sum())} tokens of the micro-batch differ). Both compute the same bits, so a weight, a"
                " mask, a position or what a user's function returns differs; `fusionrl diff` compares runs"
            )


_KINDS = ("sums", "token_sums", "sequence_sums", "maxima")


def reduce_sums(parts: list[LossSums], device: torch.device, same_names: bool = True) -> StepReport:
    """The sums and maxima over micro-batches and ranks, on every rank; `parts` is [] but on the last stage.

    same_names: every rank is known to report the same.
    """
    reports: list[Any] = [None]
    if parallel_state.is_pipeline_last_stage():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        names = sorted({(kind, name) for part in parts for kind in _KINDS for name in getattr(part, kind)})
        if not same_names:
            names = sorted({name for reported in gathered(names, group) for name in reported})
        zero = torch.zeros((), dtype=torch.float64, device=device)
        report = StepReport({}, {})
        for is_maximum, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            chosen = [name for name in names if (name[0] == "maxima") is is_maximum]
            values = zero.new_zeros(len(chosen))
            for part in parts if chosen else ():
                more = torch.stack([getattr(part, kind).get(name, zero) for kind, name in chosen])
                values = torch.maximum(values, more) if is_maximum else values + more
            if group.size() > 1 and (chosen or not is_maximum):
                dist.all_reduce(values, op=operation, group=group)
            for (kind, name), value in zip(chosen, values.tolist(), strict=True):
                getattr(report, kind)[name] = value
        reports = [report]
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(reports, src=last, group=group, device=device)
    return reports[0]


@dataclass(frozen=True)
class StepLoss:
    """A loss function as Megatron calls it: (micro-batch, output of the model) → (loss, count, sums).

    options  choose the built-in loss
    compare  report how far the engine's log-probs are off: only while the weights are those of the rollout
    custom   replaces the built-in losses; it is given logits instead of log-probs
    hooks    a user's functions within them
    check    raises where log-probs are not those that they have to be (--bitwise)
    """

    options: LossOptions
    compare: bool = False
    custom: CustomLoss | None = None
    hooks: LossHooks | None = None
    check: Callable[[MicroBatch, Tensor | None], None] | None = None

    def __call__(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossSums]:
        """Return the micro-batch's loss; a HookError gets the samples of the micro-batch."""
        if self.check is not None:
            self.check(batch, None if self.custom is not None else output[0].detach())
        try:
            if self.custom is not None:
                value, sums = self.custom(batch, output)
            else:
                # A critic gives values alone.
                value, sums = micro_batch_loss(output[0], output[-1], batch, self.options, self.compare, self.hooks)
                if batch.selection.ahead:
                    from fusionrl.trainer.multi_token import further_loss

                    further, total = further_loss(batch.selection.ahead)
                    value = value + self.options.mtp_factor * further
                    sums.token_sums["mtp_loss"] = total.double()
                if self.options.mode == "rl":
                    sums.scores = output.detach()
        except HookError as error:
            error.positions = list(batch.samples)
            raise
        # The loss is divided already (see above), but without a count Megatron divides by the micro-batches.
        return value, torch.zeros((), dtype=torch.int, device=output.device), sums


def train_step(
    trained: Trained, batches: list[MicroBatch], loss: StepLoss, device: torch.device
) -> tuple[StepReport, list[LossSums]]:
    """Take one optimizer step over this rank's micro-batches.

    A loss or a gradient that is not finite skips the step on all ranks: weights, optimizer and schedule stay as they
    are, and the report's number `skipped` is 1. Raises ReplicaMismatch where replicas are
    compared and differ. Returns (the report over all ranks, this rank's sums, [] but on the last pipeline stage).
    """
    for chunk in trained.chunks:
        chunk.zero_grad_buffer()
    trained.optimizer.zero_grad()
    parts = run_forward(trained, batches, loss, forward_only=False, logits=loss.custom is not None)
    with span("sums over ranks"):
        # A user's function decides by what it sees which metrics it reports, on each rank.
        users = loss.custom, loss.hooks, loss.options.custom_policy_loss_path
        report = reduce_sums(parts, device, same_names=users == (None, None, None))
    if trained.replicas is not None:
        with span("compare replicas"):
            trained.replicas.before_step(trained.chunks)
    lr = float(trained.optimizer.param_groups[0]["lr"])
    with span("optimizer"):
        found_inf = trained.optimizer.prepare_grads()
        norm = float(trained.optimizer.get_grad_norm())
        settle(trained)  # the norm has been waited for
        finite = not found_inf and math.isfinite(norm) and math.isfinite(report.sums["loss"])
        if finite and norm > 0 and trained.watch is not None:
            trained.watch.look(trained.chunks)
        if finite:
            for inner in trained.optimizer.chained_optimizers:
                limit, is_stub = inner.config.clip_grad, getattr(inner, "is_stub_optimizer", False)
                if limit > 0 and not is_stub and (parameters := inner.get_parameters()):
                    decoupled = inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    clip_grad_by_total_norm_fp32(parameters, limit, norm, use_decoupled_grad=decoupled)
            trained.is_amid = True
            trained.optimizer.step_with_ready_grads()
            trained.scheduler.step(1)
    report.numbers.update({"lr": lr, "grad_norm": norm, "skipped": 0.0 if finite else 1.0})
    return report, parts


@torch.no_grad()
def evaluate(trained: Trained, batches: list[MicroBatch], device: torch.device) -> tuple[float, float]:
    """(sum over trained-on tokens of -log p, number of such tokens), over all ranks."""
    parts = []
    for batch, output in zip(batches, forward_log_probs(trained, batches), strict=False):
        mask = batch.fields["loss_mask"]
        loss = -(output[0] * mask).sum()
        parts.append(LossSums({"loss": loss.double()}, {"tokens": mask.sum().double()}))
    report = reduce_sums(parts, device)
    return report.sums["loss"], report.token_sums["tokens"]
