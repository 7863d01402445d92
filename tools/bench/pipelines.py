"""Compare all pipelines: step times over paced engines, and samples a second over real ones.

    python -m tools.bench.pipelines paced [--turns 2] [--steps 6] [--json FILE]
    python -m tools.bench.pipelines paced --virtual
    python -m tools.bench.pipelines tool --out runs/pipelines [--size full] [--seeds 1 2 3] [--pipelines async …]
    python -m tools.bench.pipelines tool --out runs/pipelines --size full --seeds 1 2 3 --report

`paced` is verl's 64:64 setting: Qwen2.5-7B, lognormal answers of up to 28,672 tokens, 64 devices that generate and 64
that train. Engines emit tokens at modelled rates without computing; training and pushes take their modelled time; the
router, the Buffer and the controller are the real ones. A modelled second takes `--time-scale` real ones. The control
plane's own time is not scaled: with `--time-scale 0.1` a second of it counts as ten.

`--virtual` takes no real time: the controller and the model of engines alone, as if the control plane took no time.
Its staleness is in versions, as in the paced rows.

On-policy recomputes the log-probs before it trains, as verl's synchronous run does; the others take the engines'. The
speed-up over on-policy is given with that part, and without it.

`tool` is the quickstart's task with a tool that is slow now and then, with real engines and trainers. Sizes: `full`
trains to the end, `speed` takes samples a second alone, `smoke` shows that it runs. A run whose figures are in
OUT/results.jsonl is not run again, so the command can be ended and given again; `--report` runs nothing and prints the
table of what is there. On two cores a run of `full` takes about 8 minutes (on-policy), 7 (one-step-off, async) or 4
(stream, async-partial), the supervised model of a seed 2: 32 minutes for a seed, about 95 for three.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tools.bench import pipelines_tool
from tools.bench.lengths import Lengths
from tools.bench.pipelines_paced import ROOT, Row, Setting, run_row
from tools.bench.pipelines_virtual import run_virtual

COLUMNS = {
    "name": "pipeline",
    "step_s": "step s",
    "speed_up": "× on-policy",
    "speed_up_without": "× without its log-probs",
    "wait_s": "wait s",
    "drain_s": "drain s",
    "push_s": "push s",
    "engines_idle": "engines idle",
    "trainers_idle": "trainers idle",
    "running_per_engine": "running",
    "staleness": "staleness",
    "staleness_max": "max",
    "tokens_prefilled_again": "prefilled again",
    "control_cpu_s_per_1000": "control CPU s/1,000",
    "loop_delay_s": "loop delay s",
}
FORMATS = {"engines_idle": "{:.0%}", "trainers_idle": "{:.0%}", "speed_up": "{:.2f}", "speed_up_without": "{:.2f}"}
FORMATS |= {"staleness": "{:.2f}", "staleness_max": "{:.0f}", "tokens_prefilled_again": "{:,.0f}"}
FORMATS |= {"control_cpu_s_per_1000": "{:.2f}", "loop_delay_s": "{:.2f}"}


def rows(setting: Setting) -> list[Row]:
    """Return the lines of the table."""
    # verl's synchronous run has all 128 devices for both; so many seconds for each part of training.
    everywhere = {"engines": 2 * setting.engines, "update_s": 114.0, "log_probs_s": 54.0}
    little, further = {"admission_lead": 0.5}, {"max_staleness": 3, "admission_lead": 1.0}
    # Four parts as verl: a push after four times 128 prompts.
    return [
        Row("on-policy", "on-policy", log_probs=True),
        Row("on-policy, all devices", "on-policy", log_probs=True, setting=everywhere),
        Row("stream", "stream", parts=4),
        Row("one-step-off", "one-step-off"),
        Row("async", "async"),
        Row("async-partial", "async-partial"),
        Row("async, lead 0.5", "async", little),
        Row("async, lead 1.5", "async", {"admission_lead": 1.5}),
        Row("async-partial, lead 0.5", "async-partial", little),
        Row("async-partial, lead 1", "async-partial", {"admission_lead": 1.0}),
        Row("async-partial, lead 2", "async-partial", {"admission_lead": 2.0}),
        Row("async, 4 parts", "async", little, parts=4),
        Row("async-partial, 4 parts", "async-partial", little, parts=4),
        Row("async-partial, 4 parts, in place", "async-partial", little | {"in_flight": "in_place"}, parts=4),
        Row("async-partial, 4 parts, K 3, lead 1", "async-partial", further, parts=4),
    ]


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each name: means over its turns, largest delays, and the speed-up over on-policy."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_name.setdefault(run["name"], []).append(run)
    summaries = []
    for name, turns in by_name.items():
        row: dict[str, Any] = {"name": name, "turns": len(turns)}
        for key, value in turns[0].items():
            if isinstance(value, (int, float)):
                most = key in ("loop_delay_s", "staleness_max", "engines_late_s")
                row[key] = (max if most else statistics.fmean)(turn[key] for turn in turns)
        if "buffer_cpu_s_per_1000" in row:
            row["control_cpu_s_per_1000"] = row["buffer_cpu_s_per_1000"] + row["router_cpu_s_per_1000"]
        summaries.append(row)
    base = next((row for row in summaries if row["name"] == "on-policy"), None)
    if base is not None:
        for row in summaries:
            row["speed_up"] = base["step_s"] / row["step_s"]
            row["speed_up_without"] = (base["step_s"] - base["log_probs_s"]) / (row["step_s"] - row["log_probs_s"])
    return summaries


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [
            str(row[key])
            if key == "name"
            else FORMATS.get(key, "{:.1f}").format(row[key])
            if row.get(key) is not None
            else "–"
            for key in COLUMNS
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def paced(options: argparse.Namespace) -> dict[str, Any]:
    """Run the paced part; prints a line for each run."""
    sizes = {name: getattr(options, name) for name in ("engines", "gpus", "prompts", "samples", "weight")}
    setting = Setting(**sizes, time_scale=options.time_scale, token_scale=options.token_scale)
    setting = replace(setting, lengths=Lengths(seed=options.seed))
    if options.virtual:
        chosen = [row for row in rows(setting) if not options.rows or row.name in options.rows]
        turns = [replace(setting, lengths=Lengths(seed=options.seed + turn)) for turn in range(options.turns)]
        runs = [run_virtual(turn, row, options.steps, max(1, options.warm_up)) for turn in turns for row in chosen]
        return {"setting": asdict(setting), "rows": summary(runs), "runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, str(ROOT / "tools" / "make_quickstart.py"), "--out", folder]
        subprocess.run(make, check=True, capture_output=True)
        model = Path(folder) / "model"
        chosen = [row for row in rows(setting) if not options.rows or row.name in options.rows]
        runs = []
        for turn in range(options.turns):
            for row in chosen if turn % 2 == 0 else reversed(chosen):
                runs.append(run_row(setting, row, options.steps, options.warm_up, model))
                print(f"turn {turn + 1}: {row.name}: {runs[-1]['step_s']:.1f} s a step", file=sys.stderr, flush=True)
                write(options.json, {"setting": asdict(setting), "rows": summary(runs), "runs": runs})
    return {"setting": asdict(setting), "rows": summary(runs), "runs": runs}


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures so far."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = command.add_subparsers(dest="part", required=True)
    paced_part = parts.add_parser("paced", help="modelled engines; the real router, Buffer and controller")
    paced_part.add_argument("--rows", nargs="+", help="names of the rows to run; default: all")
    paced_part.add_argument("--turns", type=int, default=1, help="with --virtual each has lengths of its own")
    paced_part.add_argument("--steps", type=int, default=6, help="measured steps of a turn")
    paced_part.add_argument("--warm-up", type=int, default=3, help="steps before them")
    paced_part.add_argument("--engines", type=int, default=Setting.engines)
    paced_part.add_argument("--gpus", type=int, default=Setting.gpus, help="of an engine (tensor parallel)")
    paced_part.add_argument("--prompts", type=int, default=Setting.prompts, help="of a batch")
    paced_part.add_argument("--samples", type=int, default=Setting.samples, help="of a prompt")
    paced_part.add_argument("--weight", type=float, default=Setting.weight, help="modelled samples for each sample")
    paced_part.add_argument("--time-scale", type=float, default=Setting.time_scale)
    paced_part.add_argument("--token-scale", type=float, default=Setting.token_scale)
    paced_part.add_argument("--seed", type=int, default=0)
    paced_part.add_argument("--virtual", action="store_true", help="instead: the controller alone, in virtual time")
    two = parts.add_parser("tool", help="real engines and trainers, with a slow tool")
    two.add_argument("--out", type=Path, required=True, help="folder of the runs and of results.jsonl")
    two.add_argument("--size", choices=sorted(pipelines_tool.SIZES), default="smoke")
    two.add_argument("--seeds", type=int, nargs="+", default=[1])
    two.add_argument("--pipelines", nargs="+", choices=pipelines_tool.PIPELINES, default=list(pipelines_tool.PRESETS))
    two.add_argument("--rollouts", type=int, help="in place of the size's own number")
    two.add_argument("--target", type=float, default=0.5, help="held-out accuracy; the time to it is given")
    two.add_argument("--again", action="store_true", help="also what has figures")
    two.add_argument("--report", action="store_true", help="run nothing: the table of what is there")
    for part in (paced_part, two):
        part.add_argument("--json", type=Path, help="write the figures here as well")
    return command


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser().parse_args(argv)
    if options.part == "paced":
        figures = paced(options)
        print(table(figures["rows"]))
    else:
        task = pipelines_tool.SIZES[options.size]
        if options.rollouts is not None:
            task = replace(task, rollouts=options.rollouts)
        which = (options.size, options.pipelines, options.seeds)
        if options.report:
            runs = pipelines_tool.of_task(pipelines_tool.results(options.out), options.size, task)
        else:
            runs = pipelines_tool.run_all(options.out, *which, options.again, task)
        figures = {"rows": pipelines_tool.summary(runs, options.target), "runs": runs}
        print(pipelines_tool.table(figures["rows"]))
        for text in [*pipelines_tool.verdict(figures["rows"]), *pipelines_tool.missing(runs, *which, task)]:
            print(text)
    write(options.json, figures)


if __name__ == "__main__":
    main()
