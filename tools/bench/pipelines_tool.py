"""The quickstart's task with a slow tool, on real engines, router and trainers: part (a) of `tools/bench/pipelines.py`.

Every run is one `fusionrl train` with a folder of its own. Its figures are a line of results.jsonl, and a run that has
its line is not run again: an interrupted program resumes where it stopped.

The time of a run is the tool's: a step of on-policy waits 10 s for its slowest call, however few samples it has. So a
rollout has twice the quickstart's samples and optimizer steps, and a run has a third of its rollouts. Further ones
bring on-policy nothing (without the tool, seed 1: 0.69, 0.76, 0.82, 0.86, 0.84 after 8, 16, 24, 32, 40).
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusionrl.observe.metrics import read_metrics
from tools.bench.pipelines_paced import ROOT

PRESETS = ("on-policy", "stream", "one-step-off", "async", "async-partial")
# Name of a row → flags. A tool call takes up to 10 s and a step without it less than 3: K 4 leaves room for both.
PIPELINES: dict[str, list[str]] = {
    **{name: ["--pipeline", name] for name in PRESETS},
    "async-partial-k4": ["--pipeline", "async-partial", "--max-staleness", "4", "--admission-lead", "2"],
}
# Of a run of size `full` on two idle cores, its start included; the supervised model of a seed takes
# two more.
MINUTES = {"on-policy": 8, "stream": 4, "one-step-off": 7, "async": 7, "async-partial": 4, "async-partial-k4": 4}
LEAST_SPEED_UP, MOST_GAP = 2.0, 0.03  # of async-partial in samples a second; of every pipeline in final accuracy
RESULTS = "results.jsonl"
TOOL = "tools/bench/slow_tool.py:answer"
ACCURACY = "eval/held-out/accuracy"
COLUMNS = {
    "pipeline": "pipeline",
    "seeds": "seeds",
    "samples_per_s": "samples/s",
    "speed_up": "× on-policy",
    "accuracy": "final accuracy",
    "accuracy_gap": "− on-policy",
    "time_to_target_s": "s to target",
    "wait_s": "wait s",
    "drain_s": "drain s",
    "train_s": "train s",
    "push_s": "push s",
    "staleness": "staleness",
    "staleness_max": "max",
}


@dataclass(frozen=True)
class Task:
    """Sizes of a run. `eval_interval` None: no evaluation, the speed alone; `warm_up`: steps that are not timed,
    first and after each evaluation; `optimizer_steps`: of a rollout.

    All are multiples of 4: `stream` waits once in four rollouts.
    """

    prompts: int = 64
    samples: int = 16
    rollouts: int = 32
    optimizer_steps: int = 4
    sft_steps: int = 180
    eval_interval: int | None = 8
    warm_up: int = 4


SIZES = {
    "full": Task(),
    "speed": Task(rollouts=16, eval_interval=None),
    "smoke": Task(prompts=8, samples=8, rollouts=8, optimizer_steps=2, sft_steps=20, eval_interval=8),
}


def fusionrl(arguments: Sequence[str], log: Path) -> None:
    """Run `fusionrl train`.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", "fusionrl.cli", "train", *arguments]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {log}\n{log.read_text(errors='replace')[-2000:]}")


def prepare(folder: Path, seed: int, task: Task) -> Path:
    """Make the quickstart's data and supervised model of a seed, where they are not there yet; returns their folder."""
    task_folder = folder / f"task-s{seed}-sft{task.sft_steps}"
    if (task_folder / "sft-model" / "config.json").is_file():
        return task_folder
    shutil.rmtree(task_folder, ignore_errors=True)
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), "--out", str(task_folder), "--seed", str(seed)]
    subprocess.run(command, check=True, capture_output=True)
    flags = ["--mode", "sft", "--run-dir", str(task_folder / "sft"), "--hf-checkpoint", str(task_folder / "model")]
    flags += ["--seed", str(seed), "--prompt-data", str(task_folder / "sft.jsonl"), "--input-key", "messages"]
    flags += ["--rollout-shuffle", "--rollout-batch-size", "128", "--num-rollout", str(task.sft_steps)]
    flags += ["--lr", "1e-3", "--lr-warmup-iters", str(min(20, task.sft_steps // 2)), "--no-save"]
    fusionrl([*flags, "--save-hf", str(task_folder / "sft-model")], task_folder / "sft.txt")
    return task_folder


def flags_of(pipeline: str, seed: int, task: Task, task_folder: Path, run_dir: Path) -> list[str]:
    """Return the command line of one run: the quickstart's, with the tool, on engines of its own."""
    num_samples = task.prompts * task.samples
    flags = ["--mode", "rl", *PIPELINES[pipeline], "--run-dir", str(run_dir), "--no-save", "--device", "cpu"]
    flags += ["--hf-checkpoint", str(task_folder / "sft-model"), "--seed", str(seed), "--rollout-seed", str(seed)]
    flags += ["--prompt-data", str(task_folder / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"]
    flags += ["--apply-chat-template", "--custom-rm-path", "plugins.rewards.digits.reward", "--rollout-shuffle"]
    flags += ["--custom-generate-function-path", TOOL, "--rollout-max-response-len", "5"]
    flags += ["--rollout-batch-size", str(task.prompts), "--n-samples-per-prompt", str(task.samples)]
    flags += ["--num-steps-per-rollout", str(task.optimizer_steps), "--num-rollout", str(task.rollouts)]
    flags += ["--lr", "1.2e-4", "--min-lr", "1e-5", "--adam-beta2", "0.99", "--lr-decay-style", "linear"]
    flags += ["--lr-warmup-iters", "4", "--sglang-max-running-requests", "256"]
    flags += ["--sglang-server-concurrency", str(max(512, 4 * num_samples))]
    if pipeline != "on-policy":
        flags += ["--use-tis"]  # tokens of older weights: log-probs before the step, and truncated ratios
    if task.eval_interval is not None:
        flags += ["--eval-prompt-data", "held-out", str(task_folder / "eval.jsonl"), "--eval-temperature", "0"]
        flags += ["--skip-eval-before-train", "--eval-interval", str(task.eval_interval)]
    return flags


def run_one(folder: Path, size: str, pipeline: str, seed: int, task: Task) -> dict[str, Any]:
    """Run one pipeline with one seed; returns its line."""
    task_folder = prepare(folder, seed, task)
    run_dir = folder / f"{size}-{pipeline}-s{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)  # an interrupted run: its times are useless
    start = time.monotonic()
    fusionrl(flags_of(pipeline, seed, task, task_folder, run_dir), folder / f"{run_dir.name}.txt")
    measured = figures(list(read_metrics(run_dir)), task)
    return {"size": size, "pipeline": pipeline, "seed": seed, "wall_s": time.monotonic() - start, **measured}


def figures(metrics: Sequence[dict[str, float]], task: Task) -> dict[str, Any]:
    """Return what one run has shown; an evaluation's own time is in no figure."""
    steps = [row for row in metrics if "perf/step_time_s" in row]
    timed = _timed(metrics, task.warm_up)
    seconds = sum(row["perf/step_time_s"] for row in timed)
    passed, curve = 0.0, []
    for row in metrics:
        passed += row.get("perf/step_time_s", 0.0)
        if ACCURACY in row:
            curve.append([passed, row[ACCURACY]])

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in timed)

    return {
        "steps": len(steps),
        "samples_per_s": task.prompts * task.samples * len(timed) / seconds,
        "step_s": seconds / len(timed),
        "wait_s": mean("perf/time_generate_s"),
        "drain_s": mean("perf/time_drain_s"),
        "train_s": mean("perf/time_train_s"),
        "push_s": mean("perf/time_sync_s"),
        "staleness": mean("rollout/staleness/token_mean"),
        "staleness_max": max(row.get("rollout/staleness/token_max", 0.0) for row in steps),
        "accuracy": curve[-1][1] if curve else None,
        "curve": curve,
    }


def _timed(metrics: Sequence[dict[str, float]], warm_up: int) -> list[dict[str, float]]:
    """Return the steps whose time tells the speed: `warm_up` of them are left out first, and after each evaluation.

    Generation continues during an evaluation, so the next steps wait less than they cost.
    """
    rows, left = [], warm_up
    for row in metrics:
        if "perf/step_time_s" in row:
            rows += [row] if left <= 0 else []
            left -= 1
        if ACCURACY in row:
            left = warm_up
    return rows


def time_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Return the seconds after which an evaluation reached `target`; None: none did."""
    return next((seconds for seconds, accuracy in curve if accuracy >= target), None)


def summary(lines: Sequence[dict[str, Any]], target: float) -> list[dict[str, Any]]:
    """Return a row for each pipeline: means over its seeds; compared with on-policy over the seeds that both have."""
    rows = []
    for pipeline in PIPELINES:
        its_lines = [line for line in lines if line["pipeline"] == pipeline]
        if not its_lines:
            continue
        row: dict[str, Any] = {"pipeline": pipeline, "seeds": len(its_lines)}
        for key in ("samples_per_s", "step_s", "wait_s", "drain_s", "train_s", "push_s", "staleness", "accuracy"):
            values = [line[key] for line in its_lines if line[key] is not None]
            row[key] = statistics.fmean(values) if values else None
        row["staleness_max"] = max(line["staleness_max"] for line in its_lines)
        times = [time_to(line["curve"], target) for line in its_lines]
        row["time_to_target_s"] = statistics.fmean(t for t in times if t is not None) if all(times) else None
        rows.append(row)
    base = {line["seed"]: line for line in lines if line["pipeline"] == "on-policy"}
    for row in rows:
        pairs = [
            (line, base[line["seed"]]) for line in lines if line["pipeline"] == row["pipeline"] and line["seed"] in base
        ]
        if not pairs:
            continue
        row["speed_up"] = _mean_of(pairs, "samples_per_s", 0) / _mean_of(pairs, "samples_per_s", 1)
        if all(line["accuracy"] is not None for pair in pairs for line in pair):
            row["accuracy_gap"] = _mean_of(pairs, "accuracy", 0) - _mean_of(pairs, "accuracy", 1)
    return rows


def _mean_of(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], key: str, place: int) -> float:
    return statistics.fmean(pair[place][key] for pair in pairs)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        values = [row.get(key) for key in COLUMNS]
        cells = ["–" if v is None else f"{v:.3f}" if isinstance(v, float) and abs(v) < 1 else v for v in values]
        lines.append("| " + " | ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in cells) + " |")
    return "\n".join(lines)


def run_all(
    folder: Path, size: str, pipelines: Sequence[str], seeds: Sequence[int], again: bool, task: Task
) -> list[dict[str, Any]]:
    """Run what has no line yet, all pipelines of a seed in turn; return all lines of this size."""
    folder.mkdir(parents=True, exist_ok=True)
    file, lines = folder / RESULTS, results(folder)
    for number, seed in enumerate(seeds):
        for pipeline in pipelines if number % 2 == 0 else reversed(pipelines):
            same = same_run(lines, size, pipeline, seed, task)
            if same and not again:
                continue
            line = run_one(folder, size, pipeline, seed, task) | {"task": asdict(task)}
            lines = [earlier for earlier in lines if earlier not in same] + [line]
            part = file.with_suffix(".part")
            part.write_text("".join(json.dumps(earlier) + "\n" for earlier in lines))
            part.replace(file)
            print(f"{pipeline}, seed {seed}: {line['samples_per_s']:.1f} samples/s", file=sys.stderr, flush=True)
    return of_task(lines, size, task)


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all runs that have figures."""
    file = folder / RESULTS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def same_run(lines: Sequence[dict[str, Any]], size: str, pipeline: str, seed: int, task: Task) -> list[dict[str, Any]]:
    """Return the lines of one run: none, or one."""
    key = {"size": size, "pipeline": pipeline, "seed": seed, "task": asdict(task)}
    return [line for line in lines if key.items() <= line.items()]


def of_task(lines: Sequence[dict[str, Any]], size: str, task: Task) -> list[dict[str, Any]]:
    """Return the lines of runs of this size."""
    return [line for line in lines if line["size"] == size and line["task"] == asdict(task)]


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say of each claim whether the rows bear it out; nothing of one that they do not speak of."""
    by_name, verdicts = {row["pipeline"]: row for row in rows}, []
    if (speed_up := by_name.get("async-partial", {}).get("speed_up")) is not None and "on-policy" in by_name:
        word = "holds" if speed_up >= LEAST_SPEED_UP else "FAILS"
        verdicts.append(
            f"{word}: async-partial {speed_up:.2f} x on-policy in samples a second ({LEAST_SPEED_UP:g} wanted)"
        )
    gaps = {row["pipeline"]: row["accuracy_gap"] for row in rows if row.get("accuracy_gap") is not None}
    gaps.pop("on-policy", None)
    if gaps:
        name = max(gaps, key=lambda pipeline: abs(gaps[pipeline]))
        word = "holds" if abs(gaps[name]) <= MOST_GAP else "FAILS"
        verdicts.append(f"{word}: final accuracies within {MOST_GAP:g} of on-policy's; {name} has {gaps[name]:+.3f}")
    return verdicts


def missing(
    lines: Sequence[dict[str, Any]], size: str, pipelines: Sequence[str], seeds: Sequence[int], task: Task
) -> list[str]:
    """Return a line for each run that has no figures yet, with the minutes that it takes where they are known."""
    return [
        f"missing: {pipeline}, seed {seed}" + (f", about {MINUTES[pipeline]} minutes" if size == "full" else "")
        for seed in seeds
        for pipeline in pipelines
        if not same_run(lines, size, pipeline, seed, task)
    ]
