"""Calls of other processes or threads, and what the ranks report on their part of a push."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, TypeVar

from fusionrl.base.pending_calls import waiting

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Reference(Protocol[T]):
    """The answer of an actor that is under way: a Ray ObjectRef."""

    def future(self) -> Future[T]:
        """The same as a future."""


def stamp_of(version: int | None) -> dict[str, object]:
    """Return the other fields of a request with weights: the version, or None if more will come, and "flush"."""
    return {"version": None if version is None else str(version), "flush_cache": version is not None}


def future_of(call: Future[T] | Reference[T]) -> Future[T]:
    """The future of a started call: a Ray reference's, or the call itself."""
    return call if isinstance(call, Future) else call.future()


def wait_all(calls: Sequence[tuple[str, Future[T] | Reference[T]]], timeout_s: float) -> list[T]:
    """Results of all (what it is, started call), in order; raises once one has failed, as others may wait for it."""
    names = {future_of(call): name for name, call in calls}
    deadline = time.monotonic() + timeout_s
    pending = set(names)
    with waiting(lambda: [names[future] for future in pending]):
        while pending:
            done, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            if not done:
                waited = ", ".join(sorted(names[future] for future in pending))
                raise RuntimeError(f"{waited}: no end after {timeout_s:.0f} s (--update-weight-timeout-s)")
            for future in done:
                error = future.exception()
                if error is not None:
                    cause = getattr(error, "cause", None) or error  # of a Ray actor, whose text is its whole traceback
                    raise RuntimeError(f"{names[future]}: {cause}") from error
    return [future.result() for future in names]


# ------------------------------------------------------------------------------------ reports of the ranks
class SendReport(TypedDict):
    """Report of one rank that sends over the network. Clocks are the machine's; a rank that sent nothing has none."""

    bytes: int  # each once, however many engines received it
    buckets: int
    calls: int  # of engines
    first_s: NotRequired[float]  # when the first byte left
    last_s: NotRequired[float]  # when the last call ended


class WriteReport(TypedDict):
    """The files of one version that all ranks wrote together."""

    folder: str
    bytes: int
    files: int
    density: float  # the changed share of all elements


MergeLosses = tuple[float, float]
"""(lost, added) of `MergeSums`."""


@dataclass
class MergeSums:
    """Sums over the values of merged weights (`merge.py`), on their device: of (what rounding changed)², and of (what
    adapters add)²."""

    lost: Tensor | float = 0.0
    added: Tensor | float = 0.0

    def take(self) -> MergeLosses:
        """Return the sums, and begin anew."""
        sums = float(self.lost), float(self.added)
        self.lost = self.added = 0.0
        return sums


def merge_loss(losses: Iterable[MergeLosses]) -> float:
    """Return ‖round(W + s B A) - (W + s B A)‖ / ‖s B A‖ over the ranks' weights; 0 where adapters add nothing."""
    lost, added = (sum(sums) for sums in zip(*losses, strict=True))
    return sqrt(lost / added) if added else 0.0


def note_sent(report: SendReport, start: float, *, num_bytes: int, num_buckets: int = 1, num_calls: int = 0) -> None:
    """Add a bucket whose calls began at `start`, by the machine's clock, and have ended now."""
    report["bytes"] += num_bytes
    report["buckets"] += num_buckets
    report["calls"] += num_calls
    report.setdefault("first_s", start)
    report["last_s"] = time.time()


def new_send_report() -> SendReport:
    """The report of a rank that has sent nothing yet."""
    return {"bytes": 0, "buckets": 0, "calls": 0}
