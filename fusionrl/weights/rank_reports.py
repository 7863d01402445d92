"""Reports of the ranks on their part of a push, as the driver gets them."""

from __future__ import annotations

import time
from typing import NotRequired, TypedDict


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
