"""The rules of the Trace Event Format that a timeline must keep, so that Perfetto shows it as it was.

From the format's description: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

Event = Mapping[str, object]
_PHASES = "XCMstf"
_META = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}
_ARGUMENT = {name: "name" if name.endswith("_name") else "sort_index" for name in _META}


def faults(document: object, limit: int = 20) -> list[str]:
    """Return what is wrong with a trace, one line each; [] if it keeps the rules."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        return ["no list traceEvents"]
    messages = [f"event {number}: {fault}" for number, event in enumerate(events) for fault in _of_event(event)]
    if not messages:
        messages = [*_of_nesting(events), *_of_flows(events)]
    return messages[:limit]


def _of_event(event: object) -> list[str]:
    if not isinstance(event, dict):
        return ["no object"]
    phase, messages = event.get("ph"), []
    if not isinstance(phase, str) or len(phase) != 1 or phase not in _PHASES:
        return [f"ph {phase!r}"]
    if not isinstance(event.get("name"), str):
        messages.append(f"name {event.get('name')!r}")
    messages += [f"{key} {event.get(key)!r} is not an integer" for key in ("pid", "tid") if not _is_int(event.get(key))]
    if not _is_number(event.get("ts")):
        messages.append(f"ts {event.get('ts')!r}")
    args = event.get("args", {})
    if not isinstance(args, dict):
        return [*messages, "args is no object"]
    if phase == "X" and (not _is_number(event.get("dur")) or event["dur"] < 0):
        messages.append(f"dur {event.get('dur')!r}")
    if phase == "C" and (not args or not all(_is_number(value) for value in args.values())):
        messages.append(f"a counter's args {args!r}")
    if phase == "M":
        kind = _META.get(str(event["name"]))
        if kind is None or not isinstance(args.get(_ARGUMENT[str(event["name"])]), kind):
            messages.append(f"metadata {event['name']!r} with {args!r}")
    if phase in "stf" and not isinstance(event.get("id"), int | str):
        messages.append(f"a flow's id {event.get('id')!r}")
    return messages


def _of_nesting(events: Sequence[Event]) -> list[str]:
    messages = []
    for (pid, tid), spans in _by_track(events).items():
        open_spans: list[tuple[float, object]] = []
        for start, negative_end, name in sorted(spans):
            end = -negative_end
            while open_spans and open_spans[-1][0] <= start:
                open_spans.pop()
            if open_spans and end > open_spans[-1][0]:
                messages.append(f"pid {pid}, tid {tid}: {name} ends after {open_spans[-1][1]}, in which it began")
            open_spans.append((end, name))
    return messages


def _of_flows(events: Sequence[Event]) -> list[str]:
    """Each arrow has one start, then steps, then one end; each within a span of its track."""
    messages, tracks = [], {track: _Cover(spans) for track, spans in _by_track(events).items()}
    flows: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            flows[event["id"]].append(event)
            time = _number(event["ts"])
            track = tracks.get((event["pid"], event["tid"]))
            if track is None or not track.has(time):
                messages.append(f"flow {event['id']}: no span at {event['ts']} on tid {event['tid']}")
    for number, stops in flows.items():
        kinds = "".join(str(stop["ph"]) for stop in stops)
        if len(kinds) < 2 or kinds != "s" + "t" * (len(kinds) - 2) + "f":
            messages.append(f"flow {number} is {kinds}, not s, t…, f")
        times = [_number(stop["ts"]) for stop in stops]
        if times != sorted(times):
            messages.append(f"flow {number} goes back in time: {times}")
    return messages


class _Cover:
    """The times at which a track has a span."""

    def __init__(self, spans: Sequence[tuple[float, float, str]]) -> None:
        ordered = sorted(spans)
        self._starts = [start for start, _, _ in ordered]
        self._ends = list(itertools.accumulate((-end for _, end, _ in ordered), max))

    def has(self, time: float) -> bool:
        """Return whether a span is there at a time, its ends included."""
        before = bisect.bisect_right(self._starts, time)
        return before > 0 and self._ends[before - 1] >= time


def _by_track(events: Sequence[Event]) -> dict[tuple[object, object], list[tuple[float, float, str]]]:
    """(pid, tid) → (start, -end, name) of its spans."""
    spans: dict[tuple[object, object], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = _number(event["ts"])
            spans[event["pid"], event["tid"]].append((start, -start - _number(event["dur"]), str(event["name"])))
    return spans


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
