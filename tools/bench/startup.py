"""Time from a command to its first step, and from its last step to the end, alternating with another checkout.

    git worktree add ../before COMMIT
    python tools/bench/startup.py --against ../before [--rounds 3] [--modes rl eval sft] [--data DIR] [--json FILE]

The commands are those of scripts/quickstart.sh, with fewer steps, on its untrained model. Each round runs each mode
once with each checkout, in an order that changes from round to round. Printed are the medians, and the median over the
rounds of the ratio, this checkout to the other one:

    first step   from the start of the command to the start of the first step, or of the evaluation
    end          from the last step's record to the end of the command
    CPU          seconds of all processes, but for those between first and last step

and for each checkout the CPU seconds of each kind of process until the first step. A process is looked at every 50 ms;
what it does after the last look is not counted.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
MARK = "FUSIONRL_BENCH_MARK"
LOOK_S = 0.05
TICKS = os.sysconf("SC_CLK_TCK")
# The first pattern that a command line matches names the process.
KINDS = (
    (r"base\.nursery", "nursery"),
    (r"runtime/guard", "guard"),
    (r"minder", "minders"),
    (
        r"^ray::RuntimeEnvAgent|runtime_env/agent|^ray::DashboardAgent|dashboard/agent|ray_programs.py agent",
        "Ray: agents",
    ),
    (r"gcs_server|raylet/raylet|log_monitor|dashboard|autoscaler|monitor\.py", "Ray: GCS, raylet, others"),
    (r"BufferWorker|BufferActor", "Buffer"),
    (r"EngineWorker|EngineActor", "engine's actor"),
    (r"PolicyWorker|TrainerWorker|TrainerActor", "trainer"),
    (r"^ray::|setup_worker|default_worker|ray_programs", "Ray: workers before they are actors"),
    (r"sglang::scheduler", "engine: scheduler"),
    (r"sglang::detokenizer", "engine: detokenizer"),
    (r"sglang::router|launch_router", "router"),
    (r"launch_server|spawn_main|resource_tracker", "engine: server"),
    (r"fusionrl\.cli|fusionrl train", "command"),
)


@dataclass
class Measured:
    """Seconds of one command; `start_cpu` by kind of process."""

    first_step: float
    end: float
    start_cpu: dict[str, float]
    end_cpu: float
    total_cpu: float = field(init=False)

    def __post_init__(self) -> None:
        self.total_cpu = sum(self.start_cpu.values()) + self.end_cpu


class Watch:
    """CPU seconds of the processes that carry a mark, as they were at each look."""

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()
        self._strangers: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._seconds: dict[tuple[int, str], float] = {}  # process and kind → seconds under this kind
        self._last: dict[int, float] = {}
        self.looks: list[tuple[float, dict[str, float]]] = []

    def look(self) -> None:
        """Look once. A process that changes its command line is two kinds, one after the other."""
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in self._strangers:
                self._look_at(int(name))
        cpu_by_kind: Counter[str] = Counter()
        for (_, kind), seconds in self._seconds.items():
            cpu_by_kind[kind] += seconds
        self.looks.append((time.time(), dict(cpu_by_kind)))

    def _look_at(self, pid: int) -> None:
        try:
            if pid not in self._kinds and self._needle not in Path(f"/proc/{pid}/environ").read_bytes():
                self._strangers.add(pid)
                return
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return
        seconds = (int(fields[11]) + int(fields[12])) / TICKS
        kind = next((kind for pattern, kind in KINDS if re.search(pattern, command)), self._kinds.get(pid, "others"))
        self._kinds[pid] = kind
        new = seconds - self._last.get(pid, 0.0)
        self._last[pid] = seconds
        self._seconds[pid, kind] = self._seconds.get((pid, kind), 0.0) + max(new, 0.0)

    def at(self, moment: float) -> dict[str, float]:
        """CPU seconds by kind at the last look before a moment."""
        return next((look for when, look in reversed(self.looks) if when <= moment), {})


def flags_of(mode: str, data: Path) -> list[str]:
    """The command line of scripts/quickstart.sh, with few steps, on the untrained model."""
    model = ["--hf-checkpoint", str(data / "model")]
    task = ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-max-response-len", "5"]
    task += ["--custom-rm-path", "plugins.rewards.digits.reward"]
    task += ["--eval-prompt-data", "held-out", str(data / "eval.jsonl"), "--eval-temperature", "0"]
    if mode == "eval":
        return ["--mode", "eval", *model, *task]
    if mode == "sft":
        flags = ["--prompt-data", str(data / "sft.jsonl"), "--input-key", "messages", "--rollout-shuffle"]
        flags += ["--rollout-batch-size", "128", "--num-rollout", "3", "--lr", "1e-3", "--lr-warmup-iters", "1"]
        return ["--mode", "sft", *model, *flags, "--no-save"]
    flags = ["--prompt-data", str(data / "train.jsonl"), "--rollout-shuffle", "--rollout-batch-size", "32"]
    flags += ["--n-samples-per-prompt", "16", "--num-steps-per-rollout", "2", "--num-rollout", "2", "--lr", "1.2e-4"]
    flags += ["--colocate", "--sglang-max-running-requests", "256", "--skip-eval-before-train", "--no-save"]
    return ["--mode", "rl", *model, *task, *flags]


def measure(checkout: Path, mode: str, data: Path, folder: Path) -> Measured:
    """Run one command with the code of `checkout`.

    Raises:
        SystemExit: it failed.
    """
    run_dir, mark = folder / f"run-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    env = {**os.environ, "PYTHONPATH": str(checkout), MARK: mark}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process compiles each module
    command = [sys.executable, "-m", "fusionrl.cli", "train", *flags_of(mode, data), "--run-dir", str(run_dir)]
    watch, start = Watch(mark), time.time()
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=checkout, env=env, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            watch.look()
            time.sleep(LOOK_S)
        end = time.time()
        output.seek(0)
        if process.returncode:
            raise SystemExit(f"{checkout}: the command ended with {process.returncode}\n{output.read()[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    duration = "perf/time_eval_s" if mode == "eval" else "perf/step_time_s"
    first = next(row for row in rows if duration in row)
    began, last = first["time"] - first[duration], rows[-1]["time"]
    before, after, at_end = watch.at(began), watch.at(last), watch.at(end)
    return Measured(began - start, end - last, before, sum(at_end.values()) - sum(after.values()))


def report(name: str, rounds: list[dict[str, Measured]]) -> None:
    """Print the figures of one mode, the table's rows first."""
    for figure in ("first_step", "end", "total_cpu"):
        medians = {side: statistics.median(getattr(round_[side], figure) for round_ in rounds) for side in rounds[0]}
        line = ", ".join(f"{side} {value:.1f} s" for side, value in medians.items())
        if "other" in medians:
            ratio = statistics.median(
                getattr(round_["this"], figure) / getattr(round_["other"], figure) for round_ in rounds
            )
            line += f", this / other {ratio:.2f}"
        print(f"{name:5} {figure.replace('total_', '').replace('_', ' '):11} {line}", flush=True)
    kinds = sorted({kind for round_ in rounds for measured in round_.values() for kind in measured.start_cpu})
    print(f"\n| {name}: CPU seconds until the first step | {' | '.join(rounds[0])} |\n|---|{'---|' * len(rounds[0])}")
    for kind in [*kinds, "all"]:
        cells = []
        for side in rounds[0]:
            of_kind = [
                sum(round_[side].start_cpu.values()) if kind == "all" else round_[side].start_cpu.get(kind, 0.0)
                for round_ in rounds
            ]
            cells.append(f"{statistics.median(of_kind):.1f}")
        print(f"| {kind} | {' | '.join(cells)} |")
    print(flush=True)


def main() -> None:
    """Alternate the checkouts and measure; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="root of the other checkout; without: this one"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=("rl", "eval", "sft"), default=["rl", "eval", "sft"])
    parser.add_argument("--data", type=Path, help="folder of tools/make_quickstart.py; without: a new one is made")
    parser.add_argument("--json", type=Path, help="write all figures here as well")
    options = parser.parse_args()
    checkouts = {"this": REPO} | ({"other": options.against.resolve()} if options.against else {})
    rounds: dict[str, list[dict[str, Measured]]] = {mode: [] for mode in options.modes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = (options.data or folder / "data").resolve()
        if options.data is None:
            make = [sys.executable, str(REPO / "tools" / "make_quickstart.py"), "--out", str(data)]
            subprocess.run(make, check=True, capture_output=True)
        for number in range(options.rounds):
            for mode in options.modes:
                sides = sorted(checkouts, reverse=bool(number % 2))
                starts = {side: measure(checkouts[side], mode, data, folder) for side in sides}
                rounds[mode].append({side: starts[side] for side in checkouts})
                times = "; ".join(
                    f"{side} {start.first_step:.1f} + {start.end:.1f} s" for side, start in starts.items()
                )
                print(f"round {number}, {mode}: {times}", flush=True)
    for mode, measured in rounds.items():
        report(mode, measured)
    if options.json:
        plain = {
            mode: [{side: asdict(m) for side, m in round_.items()} for round_ in all_] for mode, all_ in rounds.items()
        }
        options.json.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
