"""Megatron's own timers, recorded as spans: forward and backward of each micro-batch, sends, gathers, the optimizer.

Megatron calls `config.timers(name, log_level).start()` and `.stop()` around them. On a GPU the calls come when a kernel
is launched, so each is marked by an event in the GPU's stream as well; `settle` turns these into times where the GPU
has just been waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fusionrl.observe.spans import note, recorder

if TYPE_CHECKING:
    from fusionrl.trainer.model import Trained

_NUMBERED = {"forward-compute": "forward", "backward-compute": "backward"}
_ALL = "forward-backward"  # begins the micro-batches anew
_NOTHING_NS = 50_000  # a step that this layout does not have, but for its calls
LANE = "megatron"


class MegatronSpans:
    """Replaces Megatron's class `Timers`."""

    def __init__(self, make_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        """`make_event`: on a GPU, an event that takes times."""
        self._make_event = make_event
        self.timers: dict[str, _Timer] = {}
        self.marked: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Return the timer of a name; all levels are recorded."""
        return self.timers.setdefault(name, _Timer(self, name))

    def settle(self) -> None:
        """Turn the events so far into spans; on a GPU, waits for it. To be called where it has been waited for."""
        if self._make_event is None or not self.marked:
            return
        end = self._make_event()
        end.record()
        end.synchronize()
        now, marked, self.marked = time.monotonic_ns(), self.marked, []
        for name, number, begun, ended in marked:
            _note(name, number, now - int(1e6 * begun.elapsed_time(end)), now - int(1e6 * ended.elapsed_time(end)))

    def now(self) -> int | torch.cuda.Event:
        """Return the time, or on a GPU an event that marks it."""
        if self._make_event is None:
            return time.monotonic_ns()
        event = self._make_event()
        event.record()
        return event


@dataclass
class _Timer:
    """Spans of one name. Its methods never wait at a barrier, which would cost time."""

    spans: MegatronSpans
    name: str
    begun: int | torch.cuda.Event | None = None
    number: int = 0

    def start(self, barrier: bool = False) -> None:
        """Begin a span."""
        if recorder() is None:
            return
        if self.name == _ALL:
            for timer in self.spans.timers.values():
                timer.number = 0
        self.begun = self.spans.now()

    def stop(self, barrier: bool = False) -> None:
        """End it."""
        begun, self.begun = self.begun, None
        if begun is None:
            return
        number, self.number, now = self.number, self.number + 1, self.spans.now()
        if not isinstance(begun, int) and not isinstance(now, int):
            self.spans.marked.append((self.name, number, begun, now))
            return
        assert isinstance(begun, int) and isinstance(now, int)
        if self.name in _NUMBERED or self.name == _ALL or now - begun >= _NOTHING_NS:
            _note(self.name, number, begun, now)


def _note(name: str, number: int, start_ns: int, end_ns: int) -> None:
    if name in _NUMBERED:
        note(_NUMBERED[name], start_ns, end_ns, LANE, micro_batch=number)
    else:
        note(name, start_ns, end_ns, LANE)


def record_megatron(trained: Trained, device: torch.device) -> MegatronSpans:
    """Let Megatron's timers of a model and its optimizer be recorded."""
    spans = MegatronSpans(partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None)
    for config in (trained.transformer, *(inner.config for inner in trained.optimizer.chained_optimizers)):
        config.timers = spans
    return spans


def settle(trained: Trained) -> None:
    """See `MegatronSpans.settle`; nothing to do where they are not recorded."""
    spans = trained.transformer.timers
    if isinstance(spans, MegatronSpans):
        spans.settle()
