"""Types of the request to the launcher and of its report. Type checkers alone read this file: `typing` loads slowly."""

from __future__ import annotations

from typing import TypedDict


class LimitsOfRun(TypedDict):
    """Fields of `sandbox.Limits` that the launcher reads."""

    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    disk_bytes: int
    num_files: int
    open_files: int
    num_processes: int


class Request(TypedDict):
    """One run; `number` is set by the launcher."""

    code: str
    stdin: str
    folder: str
    limits: LimitsOfRun
    allow_weak: bool
    namespaces: bool
    oom_events: str | None
    number: int


class Report(TypedDict):
    """The end of a run that started."""

    exit_code: int | None
    over: str | None
    isolated: bool
    landlock: int


class Failure(TypedDict):
    """The reason why a run could not start."""

    error: str
