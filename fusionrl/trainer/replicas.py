"""Compare the weights of data-parallel replicas bit by bit, and name the rank whose memory or device errs.

With the distributed optimizer every rank holds another part of the reduced gradient, so there is none to compare. All
replicas hold the same weights: those that a gradient was computed with are compared before the optimizer uses it, and
once more before they are saved. A rank that errs spoils neither the weights of the others nor a checkpoint.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.trainer.process_groups import gathered

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_NUM_SHOWN = 3  # names of tensors in a message


class ReplicaMismatch(RuntimeError):
    """Data-parallel replicas hold different weights."""


@dataclass
class ReplicaCheck:
    """Compares before every `interval`-th optimizer step; `who` is the group's name in messages ("trainer")."""

    interval: int
    who: str = "trainer"
    _num_steps: int = 0

    def before_step(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """Count an optimizer step that is about to be taken, and compare if it is due; see `compare`."""
        self._num_steps += 1
        if self._num_steps % self.interval == 0:
            self.compare(chunks, "an optimizer step, which was not taken")

    @torch.no_grad()
    def compare(self, chunks: Sequence[DistributedDataParallel], before: str) -> None:
        """Compare all weights over the replicas; a collective of 32 bytes a rank over all ranks.

        Raises ReplicaMismatch on every rank. It names the ranks that differ from most of their replicas, or all where
        no majority says which are right, with their hosts and the tensors that differ.
        """
        sums = _checksums(chunks)
        rows = _all_rows(sums).tolist()
        # Experts have replicas of their own, in the second half of a row.
        found = [
            (half, sets) for half in (0, 1) for sets in disagreeing([row[2 * half : 2 * half + 2] for row in rows])
        ]
        if found:  # on all ranks
            own = [{name: int(x) for name, x in part.items()} for part in sums]
            hosts, everywhere = zip(*gathered((socket.gethostname(), own)), strict=True)
            clauses = "; ".join(
                self._clause(*sets, hosts, [parts[half] for parts in everywhere]) for half, sets in found
            )
            raise ReplicaMismatch(
                f"{clauses}. Found before {before}: memory or a device computes wrongly. Take its node out, or test it"
                " (`dmesg`, `nvidia-smi -q -d ECC`); --resume continues from the last checkpoint, which has none of it"
            )

    def _clause(
        self, suspects: Sequence[int], ranks: Sequence[int], hosts: Sequence[str], sums: Sequence[dict[str, int]]
    ) -> str:
        names = [name for name in sums[ranks[0]] if len({sums[rank][name] for rank in ranks}) > 1]
        more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        what = f" ({', '.join(names[:_NUM_SHOWN])}{more})"
        culprits = ", ".join(f"{self.who} rank {rank} on {hosts[rank]}" for rank in suspects)
        if len(suspects) == len(ranks):
            return f"the weights of data-parallel replicas differ{what}, of {culprits}: one of them is wrong"
        others = ", ".join(str(rank) for rank in ranks if rank not in suspects)
        return f"{culprits}: its weights{what} are not those of its data-parallel replicas, ranks {others}"


def disagreeing(rows: Sequence[Sequence[int]]) -> list[tuple[list[int], list[int]]]:
    """Return (suspects, all ranks) of each set of replicas that do not agree; pure.

    rows  of each rank: the first rank of its replicas, which names the set, and its checksum

    Suspects are the ranks that differ from a majority, or all ranks if there is none.
    """
    replicas: dict[int, dict[int, int]] = {}
    for rank, (first, value) in enumerate(rows):
        replicas.setdefault(first, {})[rank] = value
    found = []
    for values in replicas.values():
        most, count = Counter(values.values()).most_common(1)[0]
        if count < len(values):
            is_certain = 2 * count > len(values)
            found.append(([rank for rank, value in values.items() if value != most or not is_certain], list(values)))
    return found


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words modulo 2^64, int64 [], on its device: another one wherever one bit differs."""
    flat, size = tensor.detach().reshape(-1), tensor.element_size()
    if flat.numel() * size % 8:
        return flat.view(_WORDS[size]).sum(dtype=torch.int64)
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64).sum()


def _checksums(chunks: Sequence[DistributedDataParallel]) -> list[dict[str, Tensor]]:
    """Name → checksum of this rank's weights: of those that all its replicas have, and of experts."""
    sums: list[dict[str, Tensor]] = [{}, {}]
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            is_expert = not getattr(param, "allreduce", True)
            place = f"chunk {number}: " * (len(chunks) > 1) + name.replace("module.", "")
            sums[is_expert][place] = checksum(param)
    return sums


def _all_rows(sums: list[dict[str, Tensor]]) -> Tensor:
    """[ranks, 4] int64: of each rank, twice, the first rank of its replicas and one checksum of all tensors."""
    groups = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    device = next(iter((sums[0] | sums[1]).values())).device
    row = torch.zeros(4, dtype=torch.int64, device=device)
    for half, (group, values) in enumerate(zip(groups, sums, strict=True)):
        row[2 * half] = dist.get_process_group_ranks(group)[0]
        if values:
            each = torch.stack(list(values.values()))
            # An odd factor is invertible modulo 2^64: no change of one tensor vanishes in the sum.
            row[2 * half + 1] = (each * torch.arange(1, 2 * len(each), 2, device=device)).sum()
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)
