"""The rules of the Trace Event Format by which Perfetto shows a file as it was: fields, nesting, arrows.

From https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]
Spans = dict[tuple[int, int], list[tuple[float, float, str]]]  # (pid, tid) → (start, end, name)


def faults(events: list[Event]) -> list[str]:
    """Return what is wrong with the events of a trace."""
    if malformed := [f"event {number}: {event}" for number, event in enumerate(events) if not _is_event(event)]:
        return malformed
    spans: Spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return [*_of_nesting(spans), *_of_arrows(events, spans)]


def _is_event(event: Event) -> bool:
    args, name = event.get("args", {}), event["name"]
    if not (isinstance(name, str) and type(event["pid"]) is type(event["tid"]) is int and _is_number(event["ts"])):
        return False
    match event["ph"]:
        case "X":
            return _is_number(event.get("dur")) and event["dur"] >= 0
        case "C":
            return bool(args) and all(map(_is_number, args.values()))
        case "M":
            is_text = name in ("process_name", "thread_name")
            return isinstance(args["name"], str) if is_text else isinstance(args["sort_index"], int)
        case kind:
            return kind in ("s", "t", "f") and isinstance(event.get("id"), int | str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_nesting(tracks: Spans) -> Iterator[str]:
    for track, spans in tracks.items():
        open_ends: list[float] = []
        for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if open_ends and end > open_ends[-1]:
                yield f"{name} on {track} ends after the span in which it began"
            open_ends.append(end)


def _of_arrows(events: list[Event], tracks: Spans) -> Iterator[str]:
    """Each arrow has one start, then steps, then one end; each within a span of its track."""
    arrows: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            arrows[event["id"]].append(event)
            spans = tracks[event["pid"], event["tid"]]
            if not any(start <= event["ts"] <= end for start, end, _ in spans):
                yield f"no span at {event['ts']} for arrow {event['id']}"
    for number, stops in arrows.items():
        kinds, times = "".join(stop["ph"] for stop in stops), [stop["ts"] for stop in stops]
        if not re.fullmatch("st*f", kinds) or times != sorted(times):
            yield f"arrow {number} is {kinds} at {times}"
