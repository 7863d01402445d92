"""Forward passes over micro-batches, with or without backward passes, through Megatron's pipeline schedule."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from fusionrl.trainer.model import Trained
from fusionrl.trainer.packed_batch import MicroBatch

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
