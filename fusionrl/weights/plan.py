"""The plan of a weight push: which tensors travel together, and which trainer rank feeds which engine.

Pure: a function of the tensors, the trainers' places and the engines' places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusionrl.config.quantization import SCALE


@dataclass(frozen=True)
class EngineTarget:
    """An engine as the push sees it. `handle` is its actor; the plan itself never looks at it."""

    index: int
    handle: Any
    node_id: str
    bundles: tuple[int, ...]  # devices of its tensor parallel ranks
    num_restarts: int = 0  # by which the sender knows that this is another process

    @property
    def tp_size(self) -> int:
        return len(self.bundles)


@dataclass(frozen=True)
class Feed:
    """One engine of an IPC push: which trainer rank serves each of its ranks, and which one speaks to it."""

    engine: int
    senders: tuple[int, ...]  # engine tensor parallel rank → trainer rank whose memory it reads
    leader: int  # trainer rank that collects the payloads and calls the engine
    by_value: bool  # another node: the bytes travel in the request


def plan_feeds(
    targets: Sequence[EngineTarget], trainer_bundles: Sequence[int], trainer_nodes: Sequence[str], device: str
) -> list[Feed]:
    """Who feeds whom.

    On GPUs an engine rank reads the memory of the trainer rank on its own device. On a CPU any rank of the same
    node will do, so the engines are dealt out over the ranks there; an engine on a node without trainers gets its
    weights by value.

    Raises:
        ValueError: on GPUs, an engine device that no trainer shares.
    """
    feeds = []
    for target in targets:
        if device == "cuda":
            missing = [b for b in target.bundles if b not in trainer_bundles]
            if missing:
                raise ValueError(
                    f"--update-weight-transport ipc: engine {target.index} has devices {missing} without a trainer;"
                    " use broadcast, or --colocate"
                )
            senders = tuple(trainer_bundles.index(b) for b in target.bundles)
            feeds.append(Feed(target.index, senders, senders[0], by_value=False))
            continue
        near = [rank for rank, node in enumerate(trainer_nodes) if node == target.node_id]
        ranks = near or list(range(len(trainer_nodes)))
        sender = ranks[target.index % len(ranks)]
        feeds.append(Feed(target.index, (sender,) * target.tp_size, sender, by_value=not near))
    return feeds


# SGLang joins these two of latent attention, and drops one that comes without the other.
TOGETHER = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")


def buckets(tensors: Iterable[tuple[str, Any]], max_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Consecutive (name, tensor) pairs of at most `max_bytes` together; a larger tensor stands alone.

    Two that an engine joins while it loads them (`TOGETHER`), and a weight and its scales, come in one bucket, whatever
    its size. A tensor begins at a multiple of its values' size, as if one followed the other in memory: SGLang takes no
    other. Lazily: at most one bucket of gathered tensors is alive at a time.
    """
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        is_full = size + nbytes > max_bytes and not _are_together(bucket[-1][0] if bucket else "", name)
        if bucket and (is_full or size % tensor.element_size()):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


def _are_together(before: str, name: str) -> bool:
    before, name = before.removesuffix(SCALE), name.removesuffix(SCALE)
    return before == name or (before.endswith(TOGETHER[0]) and name.endswith(TOGETHER[1]))
