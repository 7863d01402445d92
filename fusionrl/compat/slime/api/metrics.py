"""Names of `slime.observability`: numbers over samples, timers, a log that a hook writes to, and spans.

Spans are accepted, and nothing is recorded.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np

from fusionrl.algorithms.evaluation import pass_at_k
from fusionrl.compat.slime.api.misc import SingletonMeta

_REPEATED_TAIL = 10_000  # characters at the end of a text in which repetition is looked for
_REPEATED_RATIO = 10.0
# Fields of an engine's answer that help a person to understand one request.
_META = ("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time", "weight_version")
F = TypeVar("F", bound=Callable[..., Any])


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the dict with `prefix` before each key."""
    return {prefix + key: value for key, value in d.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, max and min."""
    array = np.asarray(values, np.float64)
    return {"mean": array.mean(), "median": float(np.median(array)), "max": array.max(), "min": array.min()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Return `pass@k` for each power of 2 up to the size of a group; right is a reward of 1."""
    if group_size == 1:
        return {}
    rewards = np.asarray(flat_rewards).reshape(num_groups or -1, group_size)
    num_right = (rewards == 1).sum(axis=1)
    sizes = [2**i for i in range(int(math.log2(group_size)) + 1)]
    return {f"pass@{k}": float(np.mean([pass_at_k(group_size, int(c), k) for c in num_right])) for k in sizes}


def compression_ratio(
    data: str | bytes, *, encoding: str = "utf-8", algorithm: str = "zlib", level: int = 9
) -> tuple[float, float]:
    """Return how many times smaller the data is when it is compressed, and the percentage saved.

    Raises:
        ValueError: an unknown algorithm.
    """
    if algorithm not in ("zlib", "gzip", "bz2", "lzma"):
        raise ValueError(f"algorithm={algorithm!r}: choose zlib, gzip, bz2 or lzma")
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return math.inf, 0.0
    module = importlib.import_module(algorithm)
    size = len(module.compress(raw, preset=level) if algorithm == "lzma" else module.compress(raw, level))
    return len(raw) / size, 100.0 * (1.0 - size / len(raw))


def has_repetition(text: str) -> bool:
    """Return whether a long text ends in repetition: its last 10,000 characters shrink to less than a tenth."""
    return len(text) > _REPEATED_TAIL and compression_ratio(text[-_REPEATED_TAIL:])[0] > _REPEATED_RATIO


def compute_rollout_step(args: Namespace, rollout_id: int) -> int:
    """Return the step under which a rollout is logged."""
    if not getattr(args, "wandb_always_use_train_step", False):
        return rollout_id
    return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)


def log(args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
    """Send metrics to Weights & Biases where the run uses it, and to TensorBoard where a folder is named."""
    if getattr(args, "use_wandb", False):
        importlib.import_module("wandb").log(dict(metrics))
    if getattr(args, "use_tensorboard", False):
        values = {name: value for name, value in metrics.items() if name != step_key}
        TensorboardAdapter(args).log(data=values, step=metrics[step_key])


class TensorboardAdapter(metaclass=SingletonMeta):
    """Writes to TensorBoard: the folder of the run, or of the variable TENSORBOARD_DIR."""

    def __init__(self, args: Namespace) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.environ.get("TENSORBOARD_DIR") or f"{args.run_dir}/tensorboard/hooks")

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Write numbers of one step."""
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Close the files."""
        self._writer.close()


def configure_logger(prefix: str = "") -> None:
    """Do nothing: the run has set up its log."""


class Timer(metaclass=SingletonMeta):
    """Seconds by name, added up over a process."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
        self.start_time: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Start a timer that is not running."""
        assert name not in self.start_time, f"the timer {name} runs already"
        self.start_time[name] = time.monotonic()

    def end(self, name: str) -> None:
        """Stop a timer that runs, and add its seconds."""
        assert name in self.start_time, f"the timer {name} does not run"
        self.add(name, time.monotonic() - self.start_time.pop(name))

    def add(self, name: str, elapsed_time: float) -> None:
        """Add seconds."""
        self.timers[name] = self.timers.get(name, 0.0) + elapsed_time

    def reset(self, name: str | None = None) -> None:
        """Forget one timer, or all."""
        self.timers = {} if name is None else {key: value for key, value in self.timers.items() if key != name}

    def log_dict(self) -> dict[str, float]:
        """Return the seconds by name."""
        return self.timers

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Measure the block."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


def timer(name_or_func: str | Callable[..., Any]) -> AbstractContextManager[None] | Callable[..., Any]:
    """Measure a block (`with timer("name"):`) or, as a decorator, every call of a function."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func)
    function = name_or_func

    @functools.wraps(function)
    def measured(*args: object, **kwargs: object) -> object:
        with Timer().context(function.__name__):
            return function(*args, **kwargs)

    return measured


# ------------------------------------------------------------------------------------------------ traces
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
