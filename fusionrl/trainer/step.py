"""One optimizer step over micro-batches, and its sums over all ranks.

Gradients are summed, not averaged, over data- and context-parallel ranks, because the loss is already
divided by the global count (`loss.py`): Megatron's `calculate_per_token_loss` sets its scaling to 1, and its
own division by a token count is left out (`model.build_training`).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from fusionrl.config.hooks import HookError
from fusionrl.observe.spans import span
from fusionrl.trainer.custom_loss import CustomLoss
from fusionrl.trainer.forward import forward_log_probs, run_forward
from fusionrl.trainer.loss import LossOptions, LossSums, micro_batch_loss
from fusionrl.trainer.loss_hooks import LossHooks
from fusionrl.trainer.megatron_spans import settle
from fusionrl.trainer.model import Trained
from fusionrl.trainer.multi_token import further_loss
from fusionrl.trainer.packed_batch import MicroBatch
from fusionrl.trainer.process_groups import gathered
from fusionrl.trainer.step_report import StepReport

_LARGEST = "maxima"
_KINDS = ("sums", "token_sums", "sequence_sums", _LARGEST)


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
        added, largest = (
            [name for name in names if (name[0] == _LARGEST) is is_maximum] for is_maximum in (False, True)
        )
        values = torch.zeros(len(added), dtype=torch.float64, device=device)
        maxima = torch.zeros(len(largest), dtype=torch.float64, device=device)
        for part in parts:
            values += _stacked(part, added, values)
            maxima = torch.maximum(maxima, _stacked(part, largest, maxima))
        if group.size() > 1:
            dist.all_reduce(values, group=group)
            if largest:
                dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        total = dict(zip([*added, *largest], [*values.tolist(), *maxima.tolist()], strict=True))
        reports = [StepReport(**{kind: {n: v for (k, n), v in total.items() if k == kind} for kind in _KINDS})]
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(reports, src=last, group=group, device=device)
    return reports[0]


def _stacked(part: LossSums, names: list[tuple[str, str]], like: Tensor) -> Tensor:
    """Values of `names` [len(names)], 0 where the part has none."""
    values = [getattr(part, kind).get(name, like.new_zeros(())) for kind, name in names]
    return torch.stack(values) if values else like


@dataclass(frozen=True)
class StepLoss:
    """A loss function as Megatron calls it: (micro-batch, output of the model) → (loss, count, sums).

    options  choose the built-in loss
    compare  report how far the engine's log-probs are off: only while the weights are those of the rollout
    custom   replaces the built-in losses; it is given logits instead of log-probs
    hooks    a user's functions within them
    """

    options: LossOptions
    compare: bool = False
    custom: CustomLoss | None = None
    hooks: LossHooks | None = None

    @property
    def names_may_differ(self) -> bool:
        """Return whether ranks may report different metrics: a user's function decides by what it sees."""
        has_own_loss = self.options.custom_policy_loss_path is not None
        return self.custom is not None or self.hooks is not None or has_own_loss

    def __call__(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossSums]:
        """Return the micro-batch's loss; a HookError gets the samples of the micro-batch."""
        try:
            if self.custom is not None:
                value, sums = self.custom(batch, output)
            else:
                # A critic gives values alone.
                value, sums = micro_batch_loss(output[0], output[-1], batch, self.options, self.compare, self.hooks)
                if batch.selection.ahead:
                    further, total = further_loss(batch.selection.ahead)
                    value = value + self.options.mtp_factor * further
                    sums.token_sums["mtp_loss"] = total.double()
                if self.options.mode == "rl":
                    sums.scores = output.detach()
        except HookError as error:
            error.positions = list(batch.samples)
            raise
        # The loss is divided already (`step.py`), but without a count Megatron divides by the micro-batches.
        return value, torch.zeros((), dtype=torch.int, device=output.device), sums


def train_step(
    trained: Trained, batches: list[MicroBatch], loss: StepLoss, device: torch.device
) -> tuple[StepReport, list[LossSums]]:
    """Take one optimizer step over this rank's micro-batches.

    A loss or a gradient that is not finite skips the step on all ranks: weights, optimizer and schedule stay as they
    are, and the report's number `skipped` is 1. Returns (the report over all ranks, this rank's sums, [] but on the
    last pipeline stage).
    """
    for chunk in trained.chunks:
        chunk.zero_grad_buffer()
    trained.optimizer.zero_grad()
    parts = run_forward(trained, batches, loss, forward_only=False, logits=loss.custom is not None)
    with span("sums over ranks"):
        report = reduce_sums(parts, device, same_names=not loss.names_may_differ)
    lr = float(trained.optimizer.param_groups[0]["lr"])
    with span("optimizer"):
        found_inf = trained.optimizer.prepare_grads()
        norm = float(trained.optimizer.get_grad_norm())
        settle(trained)  # the norm has been waited for
        finite = not found_inf and math.isfinite(norm) and math.isfinite(report.sums["loss"])
        if finite and norm > 0 and trained.watch is not None:
            trained.watch.look(trained.chunks)
        if finite:
            _clip(trained.optimizer, norm)
            trained.is_amid = True
            trained.optimizer.step_with_ready_grads()
            trained.scheduler.step(1)
    report.numbers.update({"lr": lr, "grad_norm": norm, "skipped": 0.0 if finite else 1.0})
    return report, parts


def _clip(optimizer: ChainedOptimizer, norm: float) -> None:
    for inner in optimizer.chained_optimizers:
        limit = inner.config.clip_grad
        parameters = [] if getattr(inner, "is_stub_optimizer", False) else inner.get_parameters()
        if limit > 0 and parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=limit,
                total_norm=norm,
                use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )


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
