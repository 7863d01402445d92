"""Types of the request to the launcher and of its report. Type checkers alone read this file: `typing` loads slowly."""

from typing import Any, TypedDict


class Request(TypedDict):
    """One run; `limits` are the fields of `sandbox.Limits`, `number` is set by the launcher."""

    code: str
    stdin: str
    folder: str
    limits: dict[str, Any]
    allow_weak: bool
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
