"""What training changes on a rank, as arrays: a snapshot, which is put back into ranks that were started again.

A rank's state is its part of the distributed optimizer (fp32 weights and moments of a range of each parameter), the
model's buffers, RNG states, counters and the position in the schedule. The weights follow from it, as they do after
each optimizer step. Data-parallel ranks divide the ranges, so ranks of a smaller data-parallel size take theirs out of
several states.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.model import Trained, unwrap
from fusionrl.trainer.process_groups import rng_state, set_rng_state
from fusionrl.trainer.snapshot import Piece, RankState

if TYPE_CHECKING:
    from megatron.core.optimizer import DistributedOptimizer


def take_state(trained: Trained, counters: dict[str, int], layout: TrainerLayout, rank: int) -> RankState:
    """Return the rank's state; on a CPU its arrays are views of the memory that is trained, to be copied at once."""
    pieces = {}
    for inner, name, param in _parameters(trained):
        values = inner._get_main_param_and_optimizer_states(param)
        first = inner._get_model_param_range_map(param)["param"].start
        pieces[name] = Piece(first, {key: _array(value) for key, value in values.items()})
    return RankState(
        layout.holders(rank),
        dict(counters),
        trained.scheduler.num_steps,
        [group.get("step", 0) for group in trained.optimizer.param_groups],
        pickle.dumps(rng_state()),
        [_array(buffer.reshape(-1).view(torch.uint8)) for buffer in _buffers(trained)],
        pieces,
    )


@torch.no_grad()
def put_state(trained: Trained, states: Sequence[RankState], layout: TrainerLayout, rank: int) -> dict[str, int]:
    """Put a rank's state back into a model that was built anew, and return its counters; collective.

    `states`: of the rank that had its place, and in a smaller layout of all that have a range of its parameters.
    """
    own = states[0]
    for inner, name, param in _parameters(trained):
        kind = 0 if getattr(param, "allreduce", True) else 1  # Megatron's mark of experts
        holders = layout.holders(rank)[kind]
        pieces = [state.pieces[name] for state in states if state.holders[kind] == holders and name in state.pieces]
        bounds = inner._get_model_param_range_map(param)["param"]
        tensors = {
            key: _range(bounds.start, bounds.end, pieces, key).view_as(value).to(value.device)
            for key, value in inner._get_main_param_and_optimizer_states(param).items()
        }
        inner._set_main_param_and_optimizer_states(param, tensors)
        param.view(-1)[bounds.start : bounds.end].copy_(tensors["param"])
    for chunk in trained.chunks:
        chunk.start_param_sync(force_sync=True)
    for buffer, array in zip(_buffers(trained), own.buffers, strict=True):
        buffer.copy_(torch.tensor(array).view(buffer.dtype).view_as(buffer))
    for group, step in zip(trained.optimizer.param_groups, own.steps, strict=True):
        group["step"] = step
    trained.scheduler.num_steps = own.scheduled
    trained.scheduler.step(0)  # the rates of this position
    set_rng_state(pickle.loads(own.rng))
    return dict(own.counters)


def _range(start: int, end: int, pieces: Sequence[Piece], key: str) -> torch.Tensor:
    """Return elements `start` to `end` of a parameter's tensor; of a single number (Adam's step count), the number."""
    first = pieces[0].values[key]
    if first.size == 1 and any(piece.values["param"].size > 1 for piece in pieces):
        return torch.tensor(first)
    values, num_found = np.empty(end - start, first.dtype), 0
    for piece in pieces:
        array = piece.values[key]
        low, high = max(start, piece.first), min(end, piece.first + array.size)
        if low < high:
            values[low - start : high - start] = array[low - piece.first : high - piece.first]
            num_found += high - low
    assert num_found >= end - start, f"snapshots lack elements {start} to {end} of a parameter"
    return torch.from_numpy(values)


def _parameters(trained: Trained) -> Iterator[tuple[DistributedOptimizer, str, torch.nn.Parameter]]:
    """Yield each parameter of which this rank has a range, with its optimizer and its name."""
    names = {p: f"{number}.{name}" for number, c in enumerate(trained.chunks) for name, p in c.named_parameters()}
    for inner in trained.optimizer.chained_optimizers:
        if not getattr(inner, "is_stub_optimizer", False):
            for param in inner.model_param_gbuf_map:
                yield inner, names[param], param


def _buffers(trained: Trained) -> list[torch.Tensor]:
    """List what is neither trained nor computed of the shape alone: a router's bias, for example."""
    return [buffer for chunk in trained.chunks for buffer in unwrap(chunk).buffers()]


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).cpu().numpy()
