"""Stage 2, score: log-probs of a shard's tokens by forward passes (of a critic: values); and the passes themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.spans import span
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.loss import LossOptions
from fusionrl.trainer.micro_batches import BatchOptions, MicroBatch, pack_groups, round_up
from fusionrl.trainer.model import Trained, forget_images
from fusionrl.trainer.shards import Experts, Prepared

if TYPE_CHECKING:
    from fusionrl.trainer.host_memory import WeightSet
    from fusionrl.trainer.train_hooks import TrainHooks

T = TypeVar("T")
LossFunction = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, T]]


def run_forward(
    trained: Trained,
    batches: list[MicroBatch],
    loss: LossFunction[T],
    forward_only: bool,
    logits: bool = False,
    record: bool = False,
) -> list[T]:
    """Return what `loss` returns last for each micro-batch, on the last pipeline stage; elsewhere an empty list.

    `logits`: it is given logits [1, T, V / tp] instead of what the selection asks for.
    `record`: routers write what they choose to the batches' experts.
    """
    routing = trained.routing

    def forward(
        iterator: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, T]]]:
        batch = next(iterator)
        labels = None if logits else batch.selection
        if routing is not None:
            routing.begin(batch.experts, record)
        output = model(batch.tokens, batch.position_ids, None, labels=labels, packed_seq_params=batch.layout)
        if not (forward_only or output.requires_grad):  # Megatron would skip the backward pass without a word
            raise RuntimeError(
                "the model's output requires no gradient: recomputed layers get none when their input requires none"
            )
        if routing is not None:
            routing.again_in_backward(output, batch.experts)
        return output, partial(loss, batch)

    chunks = trained.chunks
    iterators = [iter(batches) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=max(batch.tokens.size(1) for batch in batches) * trained.transformer.context_parallel_size,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if routing is not None:
        routing.begin(None)
    return results


@torch.no_grad()
def forward_log_probs(trained: Trained, batches: list[MicroBatch], record: bool = False) -> list[Tensor]:
    """[2, N] log-probs and entropies of each micro-batch's chosen tokens; [] but on the last stage.

    `record`: see `run_forward`.
    """

    def keep(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=output.device), output

    for chunk in trained.chunks:
        chunk.eval()
    try:
        return run_forward(trained, batches, keep, forward_only=True, record=record)
    finally:
        for chunk in trained.chunks:
            chunk.train()


def whole_responses(batch: MicroBatch, output: Tensor | None, device: torch.device) -> tuple[Tensor, ...]:
    """The scores of each sample of a micro-batch, from what each context-parallel rank of the last stage has of it."""
    flat = torch.zeros(sum(batch.response_lengths), device=device)
    if output is not None:
        flat[batch.responses.to(device)] = output[0]
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(flat, group=group)
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(flat, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return torch.split(flat.cpu(), batch.response_lengths)


# Free: routers choose experts by themselves. Fixed: they choose as in the update, if that is held fixed there.
# Recorded: they choose by themselves, and it is this choice that will be fixed.
Routing = Literal["free", "fixed", "recorded"]


@dataclass(frozen=True)
class Scorer:
    """The model of a rank as it scores; `options` are those of training."""

    trained: Trained
    layout: TrainerLayout
    options: BatchOptions
    weight_sets: Mapping[str, WeightSet] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """Scores of a shard: of each sample [response_length] fp32; and the experts that were recorded."""

    samples: list[np.ndarray]
    experts: Experts = field(default_factory=dict)

    @property
    def flat(self) -> np.ndarray:
        """[response tokens] as a column of the shard."""
        return np.concatenate(self.samples) if self.samples else np.zeros(0, np.float32)


def needed_log_probs(config: Config, loss: LossOptions, num_steps: int) -> tuple[bool, bool]:
    """(whether the policy's log-probs of before the first step are needed, whether the experts of that pass are fixed).

    A single step runs with the weights that the pass would run with: there is nothing to hold fixed.
    """
    algorithm = config.algorithm
    records = algorithm.use_routing_replay and not algorithm.use_rollout_routing_replay
    is_off_policy = num_steps > 1 and (records or not loss.use_rollout_log_probs)
    for_advantages = algorithm.kl_coef > 0 or algorithm.use_opd
    return is_off_policy or loss.needs_log_probs or for_advantages, records


def score(shard: TrainShard, scorer: Scorer, hooks: TrainHooks, *, policy: bool, records: bool) -> Prepared:
    """Add the columns ref_log_probs and teacher_log_probs where the scorer has their weights; with `policy`, log_probs.

    `records`: the experts of the policy's pass are fixed in the update.
    """
    chunks = scorer.trained.chunks
    for name in ("ref", "teacher"):
        if name in scorer.weight_sets:
            hooks.before_log_probs(chunks, f"{name}_")
            shard.fields[f"{name}_log_probs"] = score_samples(shard, scorer, weights=name).flat
    if not policy:
        return Prepared(shard)
    hooks.before_log_probs(chunks, "")
    scores = score_samples(shard, scorer, routing="recorded" if records else "fixed")
    shard.fields["log_probs"] = scores.flat
    return Prepared(shard, scores.experts)


def score_samples(
    shard: TrainShard,
    scorer: Scorer,
    *,
    weights: str | None = None,
    all_responses: bool = False,
    planned_only: bool = False,
    routing: Routing = "free",
    experts: Experts | None = None,
) -> Scores:
    """Score the tokens that are trained on; the others are 0. A collective of all ranks.

    shard, scorer     of this rank
    weights           a set of the scorer's `weight_sets`; None is what is trained
    all_responses     score every response token
    planned_only      leave samples of no step of the shard 0
    routing, experts  see `Routing`; for "fixed", the experts that an earlier pass recorded
    """
    with span("log-probs", weights=weights or "own"):
        groups = [group for step in shard.steps for group in step.micro_batches if group]
        if not planned_only:
            planned = {i for group in groups for i in group}
            groups += [[i] for i in range(shard.num_samples) if i not in planned]
        # Experts are exchanged, so all ranks run as many micro-batches as the busiest.
        most = torch.tensor(len(groups), device=scorer.options.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        groups += [[]] * (round_up(int(most), scorer.layout) - len(groups))
        # A pass with free routers needs neither experts nor whole sequences. One that replays what another recorded
        # needs the same packed tokens.
        replays = routing != "free" and scorer.trained.routing is not None
        options = replace(
            scorer.options,
            all_responses=all_responses,
            whole_sequences=scorer.options.whole_sequences and replays,
            replay_layers=scorer.options.replay_layers if replays else None,
        )
        batches = pack_groups(shard, groups, None, options, (experts or {}) if routing == "fixed" else {})
        if routing == "recorded":
            assert scorer.trained.routing is not None
            for batch in batches:
                own_tokens = batch.tokens.numel() // options.slicing.sequence_parallel_size
                batch.experts = scorer.trained.routing.new_record(own_tokens)
        with _lent(scorer, weights) if weights is not None else nullcontext():
            outputs = forward_log_probs(scorer.trained, batches, routing == "recorded") if batches else []
        samples = [np.zeros(n, dtype=np.float32) for n in shard.response_lengths]
        recorded = {}
        for index, batch in enumerate(batches):
            parts = whole_responses(batch, outputs[index] if outputs else None, options.device)
            for sample, part in zip(batch.samples, parts, strict=True):
                samples[sample] = part.numpy()
            if routing == "recorded" and batch.samples and batch.experts is not None:
                recorded[tuple(batch.samples)] = batch.experts.cpu()
        return Scores(samples, recorded)


@contextmanager
def _lent(scorer: Scorer, weights: str) -> Iterator[None]:
    """Within it the model computes with this set: of weights alone, without the adapters that are trained."""
    from fusionrl.trainer.lora import adapters_off

    try:
        with adapters_off(scorer.trained.chunks), scorer.weight_sets[weights].lent():
            forget_images(scorer.trained)
            yield
    finally:
        forget_images(scorer.trained)
