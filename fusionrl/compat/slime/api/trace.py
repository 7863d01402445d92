"""Names of `slime.observability.trace_utils`: spans are accepted, and nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
# Fields of an engine's answer that help a person to understand one request.
_META = ("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time", "weight_version")


class TraceSpanContext:
    """A span; what is set on it is kept in `end_attrs`, for the block that opened it."""

    def __init__(self, target: object = None) -> None:
        self.target = target
        self.end_attrs: dict[str, Any] = {}

    def update(self, attrs: Mapping[str, Any] | None) -> TraceSpanContext:
        """Set several attributes."""
        self.end_attrs |= dict(attrs or {})
        return self

    def set(self, key: str, value: Any) -> TraceSpanContext:
        """Set one attribute."""
        return self.update({key: value})

    set_attr = set
    update_attrs = update


@contextmanager
def trace_span(target: object, name: str, *, attrs: Mapping[str, Any] | None = None) -> Iterator[TraceSpanContext]:
    """Open a span for the block."""
    yield TraceSpanContext(target).update(attrs)


def trace_function(name: str, **options: object) -> Callable[[F], F]:
    """Return a decorator that leaves the function as it is."""
    return lambda function: function


def trace_event(target: object, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Note an event: nothing is recorded."""


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts and times from one /generate response of SGLang."""
    return {name: meta[name] for name in _META if meta.get(name) is not None}
