"""Time one GRPO step: generate, train, push weights; by turns with TRL's GRPOTrainer on the same model and prompts.

    python tools/bench/step.py --model runs/smollm2-135m/model [--turns 3] [--steps 2] [--no-trl] [--precision bf16]

4 prompts x 8 samples, 32 new tokens each (the end token ignored on both sides), prompts of about 8 tokens. TRL runs in
an environment of its own (`bash scripts/setup-trl-env.sh`), as a process that is started anew for each turn; its
start-up is not counted. Prints one JSON object: seconds a step of every turn, the medians, their ratio, and where our
time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fusionrl.cli import resolve
from fusionrl.driver.actors import Actors

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["What is 12 plus 7?", "What is 35 plus 8?", "What is 41 plus 6?", "What is 28 plus 9?"]
PARTS = ("perf/time_generate_s", "perf/time_train_s", "perf/time_sync_s")


def length_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward that costs nothing and differs within a group: the share of distinct tokens."""
    tokens = list(sample.tokens)[-sample.response_length :]
    return len(set(tokens)) / max(1, len(tokens))


def our_flags(options: argparse.Namespace, data: Path, run_dir: Path) -> list[str]:
    """The command line of the measured run."""
    return [
        *(
            "--mode",
            "rl",
            "--hf-checkpoint",
            options.model,
            "--prompt-data",
            str(data),
            "--input-key",
            "prompt",
        ),
        *(
            "--custom-rm-path",
            f"{Path(__file__).resolve()}:length_reward",
            "--run-dir",
            str(run_dir),
            "--no-save",
        ),
        *("--rollout-batch-size", str(options.prompts), "--n-samples-per-prompt", str(options.samples)),
        *(
            "--rollout-max-response-len",
            str(options.new_tokens),
            "--rollout-ignore-eos",
            "--num-rollout",
            "1",
        ),
        *("--precision", options.precision, "--lr", "1e-6", "--colocate"),
        *("--engine-num-threads", str(options.threads), "--train-num-threads", str(options.threads)),
    ]


def our_step(actors: Actors, number: int) -> dict[str, float]:
    """One step of the on-policy loop, timed by part."""
    start = time.perf_counter()
    rollout = actors.buffer.wait_rollout(actors.buffer.start_rollout(number))
    trained = time.perf_counter()
    values = rollout.metrics | actors.trainers.train(number, rollout.shards)
    values["perf/time_train_s"] = time.perf_counter() - trained
    values |= actors.weights.push(number + 1)
    values["seconds"] = time.perf_counter() - start
    return values


def trl_steps(options: argparse.Namespace, data: Path) -> list[float]:
    """Seconds of each of TRL's steps, the first one left out as a warm-up.

    Raises:
        SystemExit: its environment is missing, or it failed.
    """
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.is_file():
        sys.exit("no TRL environment: run `bash scripts/setup-trl-env.sh` first, or pass --no-trl")
    command = [
        str(python),
        str(ROOT / "tools/bench/trl_step.py"),
        "--model",
        options.model,
        "--prompts",
        str(data),
    ]
    command += ["--num-prompts", str(options.prompts), "--num-samples", str(options.samples)]
    command += ["--new-tokens", str(options.new_tokens), "--threads", str(options.threads)]
    command += ["--steps", str(options.steps + 1), "--dtype", options.precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds_per_step"][1:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side a turn")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--no-trl", action="store_true", help="time fusionrl alone")
    options = parser.parse_args()
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        rows = [{"prompt": QUESTIONS[i % len(QUESTIONS)]} for i in range(options.prompts)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config, plan = resolve(our_flags(options, data, Path(folder) / "run"))
        (Path(folder) / "run" / "logs").mkdir(parents=True)
        with Actors(config, plan, Path(folder) / "run", 1) as actors:
            actors.weights.push(0)
            our_step(actors, 0)  # warm-up
            for turn in range(options.turns):
                ours += [our_step(actors, 1 + turn * options.steps + i) for i in range(options.steps)]
                if not options.no_trl:
                    theirs += trl_steps(options, data)
    print(json.dumps(report(options, ours, theirs), indent=1))


def report(options: argparse.Namespace, ours: list[dict[str, float]], theirs: list[float]) -> dict[str, Any]:
    """Return the measurements, with the environment."""
    import torch

    seconds = [step["seconds"] for step in ours]
    result: dict[str, Any] = {
        "model": options.model,
        "samples": options.prompts * options.samples,
        "new_tokens": options.new_tokens,
        "precision": options.precision,
        "cores": len(os.sched_getaffinity(0)),
        "threads": options.threads,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "fusionrl_seconds": [round(s, 3) for s in seconds],
        "fusionrl_median": round(statistics.median(seconds), 3),
        "fusionrl_parts": {p.split("_")[1]: round(statistics.median(s[p] for s in ours), 3) for p in PARTS},
    }
    if theirs:
        result["trl_seconds"] = [round(s, 3) for s in theirs]
        result["trl_median"] = round(statistics.median(theirs), 3)
        result["trl_over_fusionrl"] = round(statistics.median(theirs) / statistics.median(seconds), 3)
    return result


if __name__ == "__main__":
    main()
