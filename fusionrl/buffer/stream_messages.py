"""The Buffer's messages about its stream (`stream.py`), under a pipeline that has one."""

import asyncio
import threading
import time
from contextlib import AbstractContextManager

from fusionrl.buffer.collect import Collector, RolloutFunctions
from fusionrl.buffer.data_source import PromptSource
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.buffer.rollout_stages import Rollout, RolloutStages
from fusionrl.buffer.stream import Stream
from fusionrl.buffer.stream_batches import BatchStream
from fusionrl.plan.plan import Plan
from fusionrl.rollout.in_flight import samples_in_flight
from fusionrl.rollout.weight_versions import take_warnings


class StreamMessages:
    """The part of the Buffer actor that the driver's streamed loop talks to."""

    plan: Plan
    source: PromptSource
    _abort: threading.Event
    _border: HookBorder
    _functions: RolloutFunctions
    _collector: Collector
    _stages: RolloutStages
    _phase_since: float
    _last_metrics: dict[str, float]
    _stream: Stream | None = None
    _next_rollout = 0  # whose samples are under way

    @property
    def _running(self) -> Stream:
        assert self._stream is not None, "begin_stream comes first"
        return self._stream

    def _phase_of(self, phase: str, rollout_id: int, kind: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _rollout_phase(self, rollout_id: int) -> AbstractContextManager[None]:
        raise NotImplementedError

    async def begin_stream(self, num_trained: int) -> None:
        """Begin to generate without pause, after `num_trained` rollouts; the engines have their weights."""
        assert self.plan.knobs is not None
        self._border.begin()
        self._abort.clear()
        functions, begun = self._functions, (self.plan.knobs, self._border, self.source, num_trained)
        saved = self.source.take_stream()
        stream: Stream
        if functions.where is None:
            stream = Stream(*begun, saved)
        else:
            stream = BatchStream(*begun, saved, functions, self._collector.call, self._abort)
        await asyncio.to_thread(stream.start)
        self._stream = stream

    async def next_rollout(self, rollout_id: int) -> Rollout:
        """Wait for the groups of rollout `rollout_id`; returns their shards, or raises what ended the stream."""
        start = time.perf_counter()
        with self._rollout_phase(rollout_id):
            batch = await asyncio.to_thread(self._running.next_batch)
            rollout = await asyncio.to_thread(self._stages.make_of, rollout_id, batch, self._phase_since)
        waited = time.perf_counter() - start
        rollout.warnings += take_warnings()
        rollout.metrics |= {"perf/time_generate_s": waited, "perf/time_wait_rollout_s": waited}
        self._last_metrics, self._next_rollout = rollout.metrics, rollout_id + 1
        return rollout

    async def _remember(self, rollout_id: int | None) -> None:
        """Remember what a checkpoint after rollout `rollout_id`, the newest that is trained, holds of the stream."""
        if self._stream is not None and rollout_id is not None and not self.source.keeps(rollout_id):
            self.source.keep_with(rollout_id, *await asyncio.to_thread(self._stream.snapshot, rollout_id))

    async def waits_for(self) -> str:
        """Return which groups the trainers wait for and why; "" if they do not wait, or without a stream."""
        return "" if self._stream is None else await asyncio.to_thread(self._stream.waits_for)

    async def progress(self) -> str:
        """Return in words what is under way: samples, and what holds them up; "" where it is nothing."""
        return "; ".join(text for text in (samples_in_flight.describe(), await self.waits_for()) if text)

    async def rollout_trained(self) -> bool:
        """Note that the last rollout is trained. Return whether a push is due; if so, wait until it may begin."""
        with self._phase_of("waiting for samples in flight", self._next_rollout, "failed"):
            return await asyncio.to_thread(self._running.trained)

    async def weights_pushed(self, version: int) -> None:
        with self._phase_of("going on after a push", self._next_rollout, "failed"):
            await asyncio.to_thread(self._running.pushed, version)

    async def end_stream(self) -> None:
        await asyncio.to_thread(self._running.stop)
