"""The load of an engine over time, from the lines that SGLang's scheduler logs anyway: at each prefill, and every
40 decode steps (`--sglang-decode-log-interval`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

_LINE = re.compile(
    rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{3}))?(?P<rank>[^\]]*)\] (?P<kind>Decode|Prefill) batch"
    rb"(?P<rest>[^\n]*)"
)
_FIELDS = {
    "running": re.compile(rb"#running-req: (\d+)"),
    "queued": re.compile(rb"#queue-req: (\d+)"),
    "kv_used": re.compile(rb"token usage: ([\d.]+)"),
}
_SPEED = {
    b"Decode": ("decoded_tokens_per_s", re.compile(rb"gen throughput \(token/s\): ([\d.]+)")),
    b"Prefill": ("prefilled_tokens_per_s", re.compile(rb"input throughput \(token/s\): ([\d.]+)")),
}


def read_load(path: Path, utc_offset_s: int) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield (rank of the engine, "" where it has one, wall clock in µs, values) of each line.

    running, queued         requests
    kv_used                 share of the cache, 0 … 1
    decoded_tokens_per_s    of a decode line
    prefilled_tokens_per_s  of a prefill line
    """
    for match in _LINE.finditer(path.read_bytes()):
        at = datetime.strptime(match[1].decode(), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        micros = int(at.timestamp() - utc_offset_s) * 1_000_000 + int(match[2] or 0) * 1000
        name, speed = _SPEED[match["kind"]]
        values = {
            field: number for field, pattern in _FIELDS.items() if (number := _value(pattern, match["rest"])) >= 0
        }
        if (number := _value(speed, match["rest"])) >= 0:
            values[name] = number
        yield match["rank"].decode().strip(), micros, values


def _value(pattern: re.Pattern[bytes], text: bytes) -> float:
    match = pattern.search(text)
    return float(match[1]) if match else -1.0
