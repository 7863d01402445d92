"""Samples of this process in flight: which are being generated, which are being scored, and since when.

For the progress line of a stalled run. Pure except for the clock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusionrl.data.sample import Sample

GENERATED, SCORED = "generated", "scored"


class SamplesInFlight:
    """Counts samples. Thread-safe: a stream and an evaluation may be at work at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._now: dict[object, tuple[str, int | None, float]] = {}
        self._num_scored = self._num_tokens = 0

    @contextmanager
    def note(self, stage: str, sample: Sample) -> Iterator[None]:
        """Note within the block that the sample is generated, or scored."""
        key = object()
        with self._lock:
            self._now[key] = (stage, sample.index, self._clock())
        try:
            yield
        finally:
            with self._lock:
                del self._now[key]

    def scored(self, sample: Sample) -> None:
        with self._lock:
            self._num_scored += 1
            self._num_tokens += sample.response_length

    def describe(self) -> str:
        """Return the counts in words; "" if no sample is in flight."""
        with self._lock:
            now, num_scored, num_tokens = list(self._now.values()), self._num_scored, self._num_tokens
        texts = []
        for stage in (GENERATED, SCORED):
            samples = [(since, index) for kind, index, since in now if kind == stage]
            if samples:
                since, index = min(samples, key=lambda entry: entry[0])
                oldest = f"{'one' if index is None else f'sample {index}'} for {self._clock() - since:.0f} s"
                noun = "samples are" if len(samples) > 1 else "sample is"
                texts.append(f"{len(samples)} {noun} being {stage} ({oldest})")
        ends = f"{num_scored} are finished since the start, with {num_tokens} tokens"
        return f"{', '.join(texts)}; {ends}" if texts else ""


samples_in_flight = SamplesInFlight()  # of this process
