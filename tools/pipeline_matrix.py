"""Prove the pipelines: whole runs of each, and every sampled token scored again under the weights that it claims.

    python -m tools.pipeline_matrix --out DIR [--pipelines …] [--generation default,agent,batch] [--transport …]
    python -m tools.pipeline_matrix --out DIR --pauses 3

Each row is a run of `fusionrl train` with real engines, router and trainers on this machine's CPU: a pipeline, a way of
generating (the default, an agent with a tool, slime's whole-batch function, slime's own worker) and a transport of
weights. The weights of every version are kept, by the disk push's files or by checkpoints. Afterwards transformers
scores each saved sample in float32, each token under the version that it claims (`tools/rescoring.py`).

Exit code 1 where a log-prob differs by more than 1e-4, a token is staler than --max-staleness, a run fails or is
refused, or the row proves nothing: no stale token where the pipeline allows some, no sample over a push under
async-partial. `--pauses N` measures instead how long engines stand still at a push, on-policy and async-partial by
turns. A row takes about a minute on two cores.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fusionrl.pipeline.knobs import PIPELINES
from tools.matrix_task import write_task
from tools.rescoring import Rescored, checkpoint_versions, pushed_versions, rescore, saved_samples

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 420.0
MOST_LONGER = 1.2  # a pause of async-partial, of one under on-policy
BATCH_FUNCTIONS = {
    "batch": "tests/e2e/slime_batches.py:generate_rollout",
    "worker": "tests/e2e/slime_batches.py:generate_rollout_continuously",
}
GENERATION: dict[str, list[str]] = {
    "default": [],
    "agent": [
        *("--custom-generate-function-path", "fusionrl.rollout.agent.generate"),
        *("--tools-path", "tools/pipeline_hooks.py:tools", "--tool-call-parser", "qwen25"),
    ],
    **{name: ["--rollout-function-path", path] for name, path in BATCH_FUNCTIONS.items()},
}
_REFUSED = re.compile(r"not available here|not bounded by|whole batches")


@dataclass(frozen=True)
class Row:
    """One run."""

    pipeline: str
    generation: str
    transport: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.pipeline}-{self.generation}-{self.transport}"

    @property
    def max_staleness(self) -> int:
        """K, in versions."""
        return int(PIPELINES[self.pipeline]["max_staleness"])

    @property
    def update_weights_interval(self) -> int:
        """U, in rollouts."""
        return int(PIPELINES[self.pipeline]["update_weights_interval"])


@dataclass
class Outcome:
    """One row's result. `refused` is the command's message where it takes no such combination."""

    row: Row
    rescored: Rescored = field(default_factory=Rescored)
    pauses: list[float] = field(default_factory=list)
    prefilled_again: float = 0.0
    tool_calls: int = 0
    seconds: float = 0.0
    refused: str | None = None
    faults: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    options = _parser().parse_args(argv)
    warnings.simplefilter("ignore")  # Megatron's, of parts that a conversion on a CPU does not use
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "model").is_dir():
        write_task(options.out)
    if options.pauses:
        return compare_pauses(options)
    rows = [
        Row(pipeline, generation, transport)
        for pipeline in options.pipelines
        for generation in options.generation
        for transport in options.transport
        # Without a bound, the worker's samples may have any age.
        if not (generation == "worker" and pipeline == "on-policy")
    ]
    outcomes = []
    print(_line(HEADER) + "\n" + _line(["---"] * len(HEADER)))
    for row in rows:
        outcomes.append(outcome := run_row(row, options))
        print(_line(shown(outcome)), flush=True)
        for fault in outcome.faults:
            print(f"    {row.name}: {fault}", file=sys.stderr, flush=True)
    failed = [outcome for outcome in outcomes if outcome.faults or (outcome.refused and not options.allow_refused)]
    print(f"\n{len(outcomes)} rows, {len(failed)} failed")
    return 1 if failed or not outcomes else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for model, runs and weights; its rows are run anew"
    )
    parser.add_argument("--pipelines", type=_choice(list(PIPELINES)), default=list(PIPELINES))
    parser.add_argument("--generation", type=_choice(list(GENERATION)), default=["default", "agent", "batch"])
    parser.add_argument("--transport", type=_choice(["broadcast", "disk"]), default=["broadcast", "disk"])
    parser.add_argument("--steps", type=int, default=6, help="of each run; 9 see a second version under stream")
    parser.add_argument("--response-len", type=int, default=320, help="tokens of an answer, at most")
    parser.add_argument("--allow-refused", action="store_true", help="combinations that fusionrl refuses do not fail")
    parser.add_argument("--in-flight", choices=["retract", "in_place"], help="of async-partial, in place of its own")
    parser.add_argument("--pauses", type=int, default=0, metavar="TURNS", help="compare pauses only, by turns")
    return parser


def _choice(known: list[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if strange := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(strange)} of {known}")
        return names

    return read


# ------------------------------------------------------------------------------------------------ one run
def run_row(row: Row, options: argparse.Namespace) -> Outcome:
    """Run the row, and score its samples again."""
    outcome, folder, start = Outcome(row), options.out / row.name, time.monotonic()
    code, output = launch(row, folder, options, keeps_weights=True)
    outcome.seconds = time.monotonic() - start
    if code:
        first = next((line for line in output.splitlines() if _REFUSED.search(line)), None)
        if code == 2 and first is not None:
            outcome.refused = first.strip()
        else:
            outcome.faults = [f"exit code {code}:\n{output[-3000:]}"]
        return outcome
    read_metrics(folder, outcome)
    samples = saved_samples(folder, row.update_weights_interval)
    keeps_cache = row.pipeline == "async-partial" and options.in_flight == "in_place"
    outcome.rescored = rescored = rescore(
        samples,
        weights_of(row, folder, options.out / "model"),
        max_staleness=row.max_staleness,
        update_weights_interval=row.update_weights_interval,
        keeps_cache=keeps_cache,
    )
    outcome.faults = rescored.told() + proves_nothing(outcome)
    return outcome


def proves_nothing(outcome: Outcome) -> list[str]:
    """List what should have happened in the run and did not, so that its figures say little."""
    row, rescored, missing = outcome.row, outcome.rescored, []
    if not rescored.tokens:
        missing.append("it saved no sampled token")
    if row.max_staleness and not rescored.stale_tokens:
        missing.append("no token is stale; give more --steps or a longer --response-len")
    if row.pipeline == "async-partial" and not rescored.spanning:
        missing.append("no sample spans a push; give more --steps or a longer --response-len")
    if row.generation == "agent" and not outcome.tool_calls:
        missing.append("no tool was called")
    return missing


def launch(row: Row, folder: Path, options: argparse.Namespace, keeps_weights: bool) -> tuple[int, str]:
    """Run `fusionrl train` in a new `folder`; its exit code and what it printed."""
    shutil.rmtree(folder, ignore_errors=True)  # samples and weights of an earlier run are not this one's
    flags = [
        *("--mode", "rl", "--pipeline", row.pipeline, "--hf-checkpoint", str(options.out / "model")),
        *("--prompt-data", str(options.out / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--custom-rm-path", "tools/pipeline_hooks.py:reward", "--rollout-shuffle"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--lr", "1e-3", "--device", "cpu"),
        # Some requests wait in the engine, also over a push.
        *("--sglang-max-running-requests", "12"),
        *("--rollout-max-response-len", str(options.response_len), "--num-rollout", str(options.steps)),
        *("--update-weight-transport", row.transport, "--run-dir", str(folder)),
        *GENERATION[row.generation],
    ]
    if row.max_staleness or row.update_weights_interval > 1:
        flags.append("--use-tis")
    if row.pipeline == "async-partial" and options.in_flight is not None:
        flags += ["--in-flight", options.in_flight]
    if keeps_weights and row.transport == "disk":
        flags += ["--no-save", "--update-weight-disk-keep-files"]
    else:
        flags += ["--save-interval", "1"] if keeps_weights else ["--no-save"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "fusionrl.cli", "train", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=environment,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the run ends its own processes
            output = process.communicate()[0] + f"\nno end after {TIMEOUT_S:.0f} s"
    return process.returncode, output


def weights_of(row: Row, folder: Path, model: Path) -> dict[int, Path]:
    """Return the weights of every version that engines got: version → Hugging Face folder."""
    if row.transport == "disk":
        return pushed_versions(folder)
    return checkpoint_versions(folder, model, row.update_weights_interval)


def read_metrics(folder: Path, outcome: Outcome) -> None:
    """Read the pauses of the run's pushes, the first one apart: it also builds groups; and what was computed again."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        outcome.prefilled_again += row.get("pipeline/tokens_prefilled_again", 0.0)
        if row.get("sync/pause_s") is not None and row["step"] > 0:
            outcome.pauses.append(row["sync/pause_s"])
    for file in sorted((folder / "rollouts").glob("*.train.*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            outcome.tool_calls += (json.loads(line).get("metadata") or {}).get("num_tool_calls", 0)


# ------------------------------------------------------------------------------------------------ the table
HEADER = [
    *("pipeline", "generation", "transport", "samples", "tokens", "stale", "span versions", "largest gap"),
    *("gap if of the newest", "staleness", "K", "prefilled again", "pause ms", "result"),
]


def shown(outcome: Outcome) -> list[str]:
    """Return the row's cells."""
    row, rescored = outcome.row, outcome.rescored
    cells = [row.pipeline, row.generation, row.transport]
    if outcome.refused is not None:
        return cells + ["–"] * (len(HEADER) - 4) + [f"refused: {outcome.refused}"]
    pause = f"{1000 * statistics.median(outcome.pauses):.0f}" if outcome.pauses else "–"
    tokens = f"{rescored.tokens}" + (f" ({rescored.unchecked} unchecked)" if rescored.unchecked else "")
    return [
        *cells,
        *(
            str(rescored.samples),
            tokens,
            str(rescored.stale_tokens),
            str(rescored.spanning),
            f"{rescored.largest_gap:.1e}",
        ),
        *(f"{rescored.other_version:.1e}" if rescored.other_version else "–", str(rescored.max_staleness)),
        *(str(row.max_staleness), f"{outcome.prefilled_again:.0f}", pause),
        "FAILED" if outcome.faults else f"ok, {outcome.seconds:.0f} s",
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ------------------------------------------------------------------------------------------------ pauses
def compare_pauses(options: argparse.Namespace) -> int:
    """Compare how long engines pause at a push, alternating on-policy and async-partial; return 1 if it is longer."""
    code = 0
    for transport in options.transport:
        medians: dict[str, list[float]] = {"on-policy": [], "async-partial": []}
        for turn in range(options.pauses):
            for pipeline, pauses in medians.items():
                row = Row(pipeline, "default", transport)
                folder = options.out / f"pauses-{row.name}-{turn}"
                outcome = Outcome(row)
                if status := launch(row, folder, options, keeps_weights=False)[0]:
                    print(f"{folder}: exit code {status}", file=sys.stderr)
                    return 1
                read_metrics(folder, outcome)
                pauses.append(statistics.median(outcome.pauses))
        ratios = [late / early for early, late in zip(*medians.values(), strict=True)]
        for pipeline, pauses in medians.items():
            print(
                f"{transport}, {pipeline}: pause of a push "
                + ", ".join(f"{1000 * pause:.0f}" for pause in pauses)
                + " ms"
            )
        ratio = statistics.median(ratios)
        print(f"{transport}: async-partial / on-policy {ratio:.2f} (at most {MOST_LONGER}), turns {ratios}", flush=True)
        code |= int(ratio > MOST_LONGER)
    return code


if __name__ == "__main__":
    sys.exit(main())
