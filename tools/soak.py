"""Train a tiny model for thousands of steps, and check that no process grows: memory, descriptors, threads, files.

    python tools/soak.py OUT [--steps 2000] [--interval 2] [--judge descriptors …] [-- FLAGS]

makes the quickstart's model and task in OUT, trains it (engine, router, Buffer and trainer are real), and looks at
every process of the run each `--interval` seconds. FLAGS are added to those of the run. One figure of one process is a
series over the steps; its first quarter, in which caches fill, is left out. The slope is that of a line through the
means of ten blocks, with a 95 % confidence interval. A figure grows if, over all that is left and also over its last
half alone, the interval lies above zero and the slope above the tolerance (TOLERANCES); and if the last block lies more
than the tolerance above the first: in a short run one new thread is a slope, too. Prints the table. Exits with 1, and
names the process and the figure, if one grows, if the run fails, or if it was looked at too seldom to say.
`OUT/samples.jsonl` has every sample. Resident memory is close to what is in use, as `_MALLOC` is set.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from make_quickstart import write_quickstart

from fusionrl.runtime.guard import TOKEN_VARIABLE, ProcessWatch

ROOT = Path(__file__).resolve().parents[1]
# Figure → the growth in 1,000 steps that is let pass.
TOLERANCES = {"pss_mib": 1.0, "rss_mib": 1.0, "descriptors": 1.0, "threads": 1.0, "connections": 1.0, "files": 1.0}
# The share of a process in pages that it has in common with others grows when those end: PSS is only shown.
_JUDGED = ["rss_mib", "descriptors", "threads", "connections", "files", "processes"]
EVERYTHING = "the run"  # whose files and processes are counted
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)  # Student's t for 1, 2, … degrees of freedom
_NUM_BLOCKS = len(_T95) + 2
_FEWEST_LOOKS = 4 * _NUM_BLOCKS  # with fewer, a block of the last half would be one look or none
_WATCHED = ("driver", "buffer", "trainer-0", "engine-0", "router")  # by their logs
_MIB = 2**20
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Let glibc give freed memory back at once. It keeps some for each thread, where free and used pieces come to alternate:
# resident memory grows for thousands of steps then, and what is in use does not.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
_NUM_PROMPTS = 400

Series = list[tuple[int, float]]  # (step, value), in order
Key = tuple[str, str]  # (process, figure)


# ---------------------------------------------------------------------------------------------------------- sampling
def look_at(pid: int) -> dict[str, float] | None:
    """Return the figures of a process; None if it has ended."""
    proc = Path(f"/proc/{pid}")
    try:
        links = [_link(entry) for entry in (proc / "fd").iterdir()]
        pages = int((proc / "statm").read_text().split()[1])
        pss = re.search(r"^Pss:\s+(\d+) kB", (proc / "smaps_rollup").read_text(), re.MULTILINE)
        threads = len(os.listdir(proc / "task"))
    except OSError:  # it has ended meanwhile
        return None
    if pss is None:  # a zombie
        return None
    return {
        "pss_mib": int(pss[1]) / 1024,
        "rss_mib": pages * _PAGE / _MIB,
        "descriptors": len(links),
        "threads": threads,
        "connections": sum(link.startswith("socket:") for link in links),
    }


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def name_of(pid: int) -> str:
    """Return the role of a process, by its log and its command line, and its number."""
    try:
        log = Path(os.readlink(f"/proc/{pid}/fd/2"))
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return f"{pid}"
    title = next((word for word in words[1:] if "fusionrl" in word), words[0] if words else "")
    title = title.rpartition("/")[2] if "/" in title else title
    role = re.sub(r"(\.a\d+)?\.log$", "", log.name) + " " if log.parent.name == "logs" and log.suffix == ".log" else ""
    return f"{role}{title[:40]} {pid}"


class Sampler:
    """Looks at the processes of a run again and again."""

    def __init__(self, root: int, token: str, folder: Path) -> None:
        """`root`: the process that started the others, which have the `token`. `folder`: whose files are counted."""
        self._watch, self._folder = ProcessWatch(token), folder
        self._root = root
        self._names: dict[int, str] = {}
        self.series: dict[Key, Series] = defaultdict(list)

    def sample(self, step: int) -> dict[str, dict[str, float]]:
        """Look at each process once; returns process → figures."""
        self._watch.look()
        values: dict[str, dict[str, float]] = {}
        children: set[int] = set()
        with suppress(psutil.Error):
            children = {child.pid for child in psutil.Process(self._root).children(recursive=True)}
        for pid in {self._root, *children, *self._watch.living()}:
            if (figures := look_at(pid)) is not None:
                name = self._names.setdefault(pid, "driver" if pid == self._root else name_of(pid))
                values[name] = figures
        # Not in eval/: it has a small file for each evaluation.
        num_files = sum(len(files) for place, _, files in os.walk(self._folder) if Path(place).name != "eval")
        values[EVERYTHING] = {"files": float(num_files), "processes": float(len(values))}
        for name, figures in values.items():
            for figure, value in figures.items():
                self.series[name, figure].append((step, value))
        return values


# ----------------------------------------------------------------------------------------------------------- judging
@dataclass(frozen=True)
class Trend:
    """A line through a series: its values at both ends, slope and half of the 95 % interval, in 1,000 steps."""

    first: float
    last: float
    slope: float
    error: float

    @property
    def is_growth(self) -> bool:
        return self.slope - self.error > 0

    def __str__(self) -> str:
        return f"{self.first:.4g} → {self.last:.4g}, {self.slope:+.3g} ± {self.error:.2g}"


def fit(series: Series) -> Trend:
    """Fit a line to the means of blocks of equal length: samples that follow each other are not independent."""
    steps, values = np.array([step for step, _ in series], float), np.array([value for _, value in series])
    num_blocks = min(_NUM_BLOCKS, len(series))
    x = np.array([block.mean() for block in np.array_split(steps, num_blocks)]) / 1000
    y = np.array([block.mean() for block in np.array_split(values, num_blocks)])
    spread = ((x - x.mean()) ** 2).sum()
    if num_blocks < 3 or not spread:
        return Trend(float(y[0]), float(y[-1]), 0.0, math.inf)
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    residual = y - y.mean() - slope * (x - x.mean())
    error = _T95[num_blocks - 3] * math.sqrt((residual**2).sum() / (num_blocks - 2) / spread)
    return Trend(float(y[0]), float(y[-1]), slope, float(error))


def judge(series: Series, tolerance: float) -> tuple[Trend, bool]:
    """Return the trend of a series without its first quarter, and whether it grows (see the module)."""
    settled = series[len(series) // 4 :]
    trend, late = fit(settled), fit(settled[len(settled) // 2 :])
    grows = all(part.is_growth and part.slope > tolerance for part in (trend, late))
    return trend, grows and trend.last - trend.first > tolerance


def report(
    series: dict[Key, Series], figures: Sequence[str], watched: Sequence[str] = _WATCHED
) -> tuple[str, list[str]]:
    """Return the table, and a sentence for each figure that grows. Processes that came and went are left out.

    Too few looks, and each of the processes `watched` that has no line of its own, get a sentence, too.
    """
    longest = max(len(values) for values in series.values())
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    growing = []
    if longest < _FEWEST_LOOKS:
        growing.append(f"{longest} looks at the run are too few to judge it, {_FEWEST_LOOKS} are needed: --interval")
    for (name, figure), values in sorted(series.items()):
        if len(values) < longest * 0.75:
            continue
        trend, grows = judge(values, TOLERANCES.get(figure, 1.0))
        rows[name][figure] = str(trend)
        if grows and figure in figures:
            growing.append(f"{name}: {figure} grows: {trend} in 1,000 steps")
    judged = {name.split()[0] for name in rows}
    growing += [f"{name}: no process of this name lasted long enough" for name in watched if name not in judged]
    columns = [*TOLERANCES, "processes"]
    lines = [f"| process | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |" for name, row in rows.items()]
    return "\n".join(lines), growing


# ----------------------------------------------------------------------------------------------------------- the run
def flags_of(out: Path, steps: int) -> list[str]:
    """Return the flags of the run: small steps, and all that a long run does now and then."""
    return [
        *("--mode", "rl", "--device", "cpu", "--hf-checkpoint", str(out / "model")),
        *("--prompt-data", str(out / "few.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--rollout-shuffle", "--custom-rm-path", "plugins.rewards.digits.reward"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--lr", "1e-5", "--num-rollout", str(steps), "--run-dir", str(out / "run")),
        *("--save-interval", "50", "--keep-checkpoints", "2", "--keep-rollouts", "20", "--max-log-mb", "1"),
        *("--max-restarts", "0"),  # a part that came back would hide what it grew to
        *("--eval-interval", "100", "--eval-prompt-data", "sums", str(out / "eval.jsonl")),
    ]


def start(out: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the run; its output goes to `OUT/output.txt`."""
    with (out / "output.txt").open("wb") as output:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-m", "fusionrl.cli", "train", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_MALLOC, **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )


def token_of(root: int) -> str | None:
    """Return the token that a run gives its processes; None until it has."""
    with suppress(psutil.Error):  # one of them has ended meanwhile
        for child in psutil.Process(root).children(recursive=True):
            if token := child.environ().get(TOKEN_VARIABLE):
                return str(token)
    return None


def last_step(metrics: Path) -> int:
    """Return the step of the last line of metrics.jsonl; 0 without one."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 65536))
            steps = re.findall(rb'^\{"step":(\d+)', file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def soak(out: Path, steps: int, interval_s: float, flags: Sequence[str]) -> tuple[int, dict[Key, Series]]:
    """Run, and look at the processes from the first step to the last. Returns the exit code and the series."""
    process, sampler = start(out, [*flags_of(out, steps), *flags]), None
    began = said = time.monotonic()
    try:
        with (out / "samples.jsonl").open("w") as samples:
            while process.poll() is None:
                step = last_step(out / "run" / "metrics.jsonl")
                if sampler is None and step > 0 and (token := token_of(process.pid)) is not None:
                    sampler = Sampler(process.pid, token, out / "run")
                if sampler is not None and step < steps:
                    samples.write(json.dumps({"step": step, "values": sampler.sample(step)}) + "\n")
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    print(f"step {step} after {said - began:.0f} s", file=sys.stderr, flush=True)
                time.sleep(interval_s)
    finally:
        if process.poll() is None:
            process.terminate()
        code = process.wait()
    return code, {} if sampler is None else sampler.series


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, and name what grows."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--judge", nargs="+", choices=[*TOLERANCES, "processes"], default=_JUDGED)
    options = parser.parse_args(words[:at])
    out: Path = options.out.resolve()
    write_quickstart(out, seed=1)
    rows = (out / "train.jsonl").read_text().splitlines(keepends=True)
    (out / "few.jsonl").write_text("".join(rows[:_NUM_PROMPTS]))  # the router keeps each prompt once
    (out / "eval.jsonl").write_text("".join(rows[-32:]))
    code, series = soak(out, options.steps, options.interval, words[at + 1 :])
    if code or not series:
        print((out / "output.txt").read_text(errors="replace")[-3000:], file=sys.stderr)
        print(f"the run failed with exit code {code}; see {out / 'output.txt'}", file=sys.stderr)
        return 1
    table, growing = report(series, options.judge)
    print(f"{options.steps} steps; at both ends of the last three quarters, and growth in 1,000 steps\n\n{table}")
    for text in growing:
        print(text, file=sys.stderr)
    return int(bool(growing))


if __name__ == "__main__":
    sys.exit(main())
