"""The metrics of a run: `metrics.jsonl`, one JSON line a call, appended and never rewritten; TensorBoard on top.

Names are slime's: `rollout/…`, `train/…`, `eval/…`, `perf/…`, `sync/…`. Each line carries its attempt, so a
resumed run appends to the same file: `read_metrics` merges what two attempts wrote of one step.

    {"step": 3, "attempt": 1, "time": 1760000000.123, "train/loss": 0.02, "rollout/raw_reward": 0.4}
    {"step": 4, "attempt": 1, "time": 1760000009.456, "train/loss": null, "nonfinite": ["train/loss"]}
"""

import math
import os
import re
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fusionrl.base.wording import install_hint
from fusionrl.observe.formats import Scalar, json_line, parse_object, to_scalar

METRICS_FILE = "metrics.jsonl"
STEP_TIME = "perf/step_time_s"  # in the line of a finished step; the lines of a resume and an evaluation lack it
RESERVED_KEYS = frozenset({"step", "attempt", "time", "nonfinite"})

_ATTEMPT_IN_NAME = re.compile(r"\.a(\d+)\.[a-z]+$")


class MetricsSink:
    """Appends to `run_dir/metrics.jsonl`; with `tensorboard`, also to `run_dir/tensorboard/a<attempt>/`.

    One process of a run (the driver) owns the sink; the run folder's lock keeps a second run away.
    """

    def __init__(self, run_dir: Path, attempt: int, tensorboard: bool = False) -> None:
        """Open the file for appending. ValueError if TensorBoard is wanted and missing."""
        self.attempt = attempt
        self.path = run_dir / METRICS_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        self._tensorboard = _TensorBoard(run_dir, attempt) if tensorboard else None
        # Unbuffered and in append mode: a line is one write, and is with the kernel when `log` returns.
        self._file = self.path.open("a+b", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            # The attempt before was killed while it wrote: its half line must not swallow our first one.
            self._file.write(b"\n")

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Append the metrics of `step`; may be called several times for one step (training, then evaluation).

        numpy and torch scalars are accepted. NaN and infinities are written as null and named under
        "nonfinite". Raises ValueError for a value that is not a scalar and for a reserved name (step, attempt,
        time, nonfinite).
        """
        if taken := RESERVED_KEYS.intersection(values):
            raise ValueError(f"metric names {sorted(taken)} are reserved; use e.g. 'train/step'")
        scalars = {key: to_scalar(key, value) for key, value in values.items()}
        nonfinite = [key for key, value in scalars.items() if isinstance(value, float) and not math.isfinite(value)]
        line: dict[str, Any] = {"step": int(step), "attempt": self.attempt, "time": round(time.time(), 3), **scalars}
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._append(json_line(line))
        if self._tensorboard is not None:
            self._tensorboard.log(int(step), scalars)

    def _append(self, line: bytes) -> None:
        """Append a whole line or none of it: a disk that fills takes a part first, and refuses the rest."""
        size, num_written = os.fstat(self._file.fileno()).st_size, 0
        try:
            while num_written < len(line):
                num_written += self._file.write(line[num_written:])
        except OSError:
            if num_written:
                self._file.truncate(size)  # or the next line would continue this one
            raise

    def close(self) -> None:
        """Close the file and TensorBoard's; safe to call twice."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _TensorBoard:
    """Numbers as scalars, strings as text; a folder an attempt, so that a resume overwrites no event file."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"TensorBoard is enabled but cannot be imported ({error}): "
                f"{install_hint('tensorboard')}, or leave it off; metrics.jsonl is written either way"
            ) from error
        self._writer = SummaryWriter(log_dir=str(run_dir / "tensorboard" / f"a{attempt}"))

    def log(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        for key, value in scalars.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            elif value is not None:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path, of_rows_with: str | None = None) -> list[dict[str, Any]]:
    """The metrics of a run (its folder or its `metrics.jsonl`), one dictionary a step, in the order of steps.

    Lines of one step are merged, the later value winning: a resume adds its first push to the step of its
    checkpoint. Where a later attempt did the step again, lines of earlier ones do not count (`made_by`). Steps that
    only an earlier attempt reached are kept. A line torn by a kill (the last one, or the last of an attempt) is
    passed over; any other unreadable line raises ValueError with its number.

    of_rows_with  a name: only lines that have it count
    """
    path = Path(path)
    lines = list(_lines(path / METRICS_FILE if path.is_dir() else path))
    makers = made_by(lines)
    steps: dict[int, dict[str, object]] = {}
    for step, attempt, line in lines:
        if attempt >= makers.get(step, 0) and (of_rows_with is None or of_rows_with in line):
            steps[step] = _merged(steps[step], line) if step in steps else line
    return [steps[step] for step in sorted(steps)]


def made_by(lines: Iterable[tuple[int, int, Container[str]]]) -> dict[int, int]:
    """Return the last attempt that did each step, from (step, attempt, names) of lines.

    Earlier attempts wrote their lines with other weights.
    """
    makers: dict[int, int] = {}
    for step, attempt, names in lines:
        if STEP_TIME in names:
            makers[step] = max(makers.get(step, 0), attempt)
    return makers


def _merged(earlier: dict[str, object], later: dict[str, object]) -> dict[str, object]:
    nonfinite = [key for key in nonfinite_names(earlier) if key not in later] + nonfinite_names(later)
    merged = {key: value for key, value in {**earlier, **later}.items() if key != "nonfinite"}
    return {**merged, "nonfinite": nonfinite} if nonfinite else merged


def nonfinite_names(line: Mapping[str, object]) -> list[object]:
    """Return the metrics of a line that were NaN or infinite."""
    names = line.get("nonfinite")
    return names if isinstance(names, list) else []


def _lines(path: Path) -> Iterator[tuple[int, int, dict[str, object]]]:
    """(step, attempt, line) of each line."""
    torn: int | None = None
    attempt = 0
    for number, _, line in _parsed(path):
        if torn is not None and (line is None or line["attempt"] <= attempt):
            raise ValueError(
                f"{path}, line {torn}, is not a metrics line, and no kill explains it (the same attempt "
                "continues after it); repair or delete that line"
            )
        if line is None:
            torn = number
            continue
        torn, attempt = None, line["attempt"]
        yield line["step"], attempt, line


def _parsed(path: Path, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """(number from 1, end in bytes, content) of each line from byte `start` on; content None: not a metrics line."""
    with path.open("rb") as file:
        file.seek(start)
        for number, text in enumerate(file, start=1):
            start += len(text)
            if text.strip():
                line = parse_object(text)
                is_whole = line is not None and all(type(line.get(key)) is int for key in ("step", "attempt"))
                yield number, start, line if is_whole else None


@dataclass(frozen=True)
class Line:
    """One line as a tracker gets it: `time_s` since 1970, `values` its finite numbers, `end` its end in the file."""

    step: int
    time_s: float
    values: dict[str, float]
    attempt: int
    end: int


def read_lines(run: Path, start: int = 0) -> list[Line]:
    """The lines from byte `start` on. A line that is not whole (yet), or that a kill tore, is passed over.

    Lines of a step that a later attempt did again do not count, as far as the lines are there by now. So a step that
    was done again after a resume comes once, unless it was sent before the resume.
    """
    lines = []
    for _, end, line in _parsed(run / METRICS_FILE, start) if (run / METRICS_FILE).is_file() else ():
        if line is not None and isinstance(line.get("time"), int | float):
            numbers = {n: v for n, v in line.items() if n not in RESERVED_KEYS and isinstance(v, bool | int | float)}
            values = {name: float(value) for name, value in numbers.items() if abs(value) <= sys.float_info.max}
            lines.append(Line(line["step"], line["time"], values, line["attempt"], end))
    makers = made_by((line.step, line.attempt, line.values) for line in lines)
    return [line for line in lines if line.attempt >= makers.get(line.step, 0)]


def next_attempt(run_dir: Path) -> int:
    """The number of the attempt that starts now: one more than any attempt left a trace of.

    Traces are metrics lines, rollout files and config files, since an attempt may die between any two of them.
    """
    seen = [int((run_dir / "config.json").exists())]
    for folder in filter(Path.is_dir, (run_dir, run_dir / "rollouts")):
        matches = (_ATTEMPT_IN_NAME.search(entry.name) for entry in folder.iterdir())
        seen += [int(match[1]) for match in matches if match]
    if (run_dir / METRICS_FILE).exists():
        seen += [attempt for _, attempt, _ in _lines(run_dir / METRICS_FILE)]
    return max(seen) + 1
