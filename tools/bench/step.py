"""Time one GRPO step: generate, train, push weights; alternating with TRL's GRPOTrainer and with rows without our code.

    python tools/bench/step.py --model runs/smollm2-135m/model [--turns 5] [--steps 2] [--no-trl] [--precision bf16]
    bash scripts/quickstart.sh 1 runs/quickstart    # makes the model of the next line
    python tools/bench/step.py --model runs/quickstart/sft-model --prompts 16 --samples 8 --new-tokens 32 --threads 1

4 prompts x 8 samples, 32 new tokens each (the end token ignored on both sides), prompts of about 8 tokens. TRL runs in
an environment of its own (`bash scripts/setup-trl-env.sh`), as a process that is started anew for each turn; its
start-up is not counted. The first step of each side in a turn is a warm-up: our processes have slept until then, and
TRL's is new. The bare rows (`tools/bench/bare.py`, on a CPU alone) use the same prompts and tokens:
transformers' model in a plain loop, its forward and backward pass, and the matrix products alone. `engine_alone` are
the same requests straight to the run's engine (`tools/bench/engine_alone.py`).

Prints one JSON object: seconds a step of every turn and their medians, where our time goes, the rows, and our ratios
to them: medians over the turns of the ratio within a turn. Generation is compared with the loops, training (all of it:
packing, forward, backward, optimizer) with the forward and backward pass.
"""

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusionrl.base.environment import ENGINE_KEY
from fusionrl.cli.resolve import resolve
from fusionrl.runtime.run_actors import Actors
from tools.bench import engine_alone
from tools.bench.bare import QUESTIONS, Bare, samples_of

ROOT = Path(__file__).resolve().parents[2]
GENERATE, TRAIN, PUSH = PARTS = ("perf/time_generate_s", "perf/time_train_s", "perf/time_sync_s")
ENGINE_ALONE = "engine_alone"
COMPARED = {
    "loop_dynamic": GENERATE,
    "loop_static": GENERATE,
    "generate_products": GENERATE,
    ENGINE_ALONE: GENERATE,
    "forward_backward": TRAIN,
    "train_products": TRAIN,
}
"""Which part of our step each row is compared with."""


@dataclass
class Turn:
    """One turn: our steps, TRL's (none without TRL), and the seconds of each row (none without the bare rows)."""

    ours: list[dict[str, float]]
    trl: list[float] = field(default_factory=list)
    rows: dict[str, float] = field(default_factory=dict)

    def median(self, part: str = "seconds") -> float:
        """Return our seconds of a part in this turn."""
        return statistics.median(step[part] for step in self.ours)

    def ratios(self) -> dict[str, float]:
        """Return our time over each row's."""
        return {name: self.median(COMPARED[name]) / seconds for name, seconds in self.rows.items()}


def length_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward that costs nothing and differs within a group: the share of distinct tokens."""
    tokens = list(sample.tokens)[-sample.response_length :]
    return len(set(tokens)) / max(1, len(tokens))


def our_flags(options: argparse.Namespace, data: Path, run_dir: Path) -> list[str]:
    """The command line of the measured run."""
    sizes = {
        "rollout-batch-size": options.prompts,
        "n-samples-per-prompt": options.samples,
        "rollout-max-response-len": options.new_tokens,
        "engine-num-threads": options.threads,
        "train-num-threads": options.threads,
        "precision": options.precision,
    }
    return [
        *("--mode", "rl", "--hf-checkpoint", options.model, "--prompt-data", str(data), "--input-key", "prompt"),
        *("--custom-rm-path", f"{Path(__file__).resolve()}:length_reward", "--run-dir", str(run_dir), "--no-save"),
        *(part for name, value in sizes.items() for part in (f"--{name}", str(value))),
        *("--rollout-ignore-eos", "--num-rollout", "1", "--lr", "1e-6", "--colocate"),
        *options.flags,
    ]


def our_step(actors: Actors, number: int) -> dict[str, float]:
    """One step of the on-policy loop, timed by part."""
    start = time.perf_counter()
    rollout = actors.buffer.wait_rollout(actors.buffer.start_rollout(number, actors.weights.version))
    trained = time.perf_counter()
    values = rollout.metrics | actors.trainers.train(number, rollout.shards)
    values[TRAIN] = time.perf_counter() - trained
    values |= actors.weights.push(number + 1)
    values["seconds"] = time.perf_counter() - start
    return values


def trl_steps(options: argparse.Namespace, data: Path) -> list[float]:
    """Return the seconds of each step in TRL, the first one left out as a warm-up.

    Raises:
        SystemExit: its environment is missing, or it failed.
    """
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.is_file():
        sys.exit("no TRL environment: run `bash scripts/setup-trl-env.sh` first, or pass --no-trl")
    command = [str(python), str(ROOT / "tools/bench/trl_step.py"), "--model", options.model, "--prompts", str(data)]
    command += ["--num-prompts", str(options.prompts), "--num-samples", str(options.samples)]
    command += ["--new-tokens", str(options.new_tokens), "--threads", str(options.threads)]
    command += ["--steps", str(options.steps + 1), "--dtype", options.precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds_per_step"][1:]


def measure(options: argparse.Namespace, folder: Path) -> list[Turn]:
    """Our actors and the bare rows stay from turn to turn; the one sleeps while the other works."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": QUESTIONS[i % len(QUESTIONS)]} for i in range(options.prompts)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, plan = resolve(our_flags(options, data, folder / "run"))
    (folder / "run" / "logs").mkdir(parents=True)
    prompts = samples_of(options.prompts, options.samples)
    os.environ.setdefault(ENGINE_KEY, secrets.token_hex(24))  # the engine is asked directly, too
    turns = []
    with ExitStack() as stack:
        actors = stack.enter_context(Actors(config, plan, folder / "run", 1))
        actors.weights.push(0)
        bare = None
        if not options.no_bare and plan.device == "cpu":
            bare = Bare(options.model, prompts, options.new_tokens, options.precision, options.threads)
            stack.callback(bare.close)
        for number in range(options.turns):
            first = number * (options.steps + 1)
            _, *ours = [our_step(actors, first + i) for i in range(options.steps + 1)]
            turn = Turn(ours)
            if bare is not None:
                turn.rows = bare.seconds() | {ENGINE_ALONE: _engine_alone(actors, options, prompts)}
            if not options.no_trl:
                turn.trl = trl_steps(options, data)
            turns.append(turn)
            print(f"turn {number + 1} of {options.turns}: {told(turn)}", file=sys.stderr, flush=True)
    return turns


def _engine_alone(actors: Actors, options: argparse.Namespace, prompts: Sequence[str]) -> float:
    from fusionrl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    return engine_alone.seconds(actors.engines.urls[0], os.environ[ENGINE_KEY], ids, options.new_tokens)


def told(turn: Turn) -> str:
    """One line of a turn."""
    ours = f"fusionrl {turn.median():.3f} s" + "".join(f", {_short(part)} {turn.median(part):.3f}" for part in PARTS)
    rows = "".join(f", {name} {seconds:.3f}" for name, seconds in turn.rows.items())
    return ours + rows + (f", TRL {statistics.median(turn.trl):.3f}" if turn.trl else "")


def _short(part: str) -> str:
    return part.split("_")[1]


def report(options: argparse.Namespace, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the measurements, with the environment."""
    import torch

    ours = [step for turn in turns for step in turn.ours]
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
        "fusionrl_seconds": _rounded(seconds),
        "fusionrl_median": round(statistics.median(seconds), 3),
        "fusionrl_parts": {_short(p): round(statistics.median(s[p] for s in ours), 3) for p in PARTS},
    }
    theirs = [step for turn in turns for step in turn.trl]
    if theirs:
        result["trl_seconds"] = _rounded(theirs)
        result["trl_median"] = round(statistics.median(theirs), 3)
        of_turns = [statistics.median(turn.trl) / turn.median() for turn in turns]
        result["trl_over_fusionrl"] = round(statistics.median(of_turns), 3)
    if turns[0].rows:
        result["bare_seconds"] = _medians([turn.rows for turn in turns])
        result["fusionrl_over_bare"] = _medians([turn.ratios() for turn in turns])
    return result


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in values), 3) for name in values[0]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side a turn")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--no-bare", action="store_true", help="leave the bare rows out")
    parser.add_argument("flags", nargs="*", help="more of fusionrl's own, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        turns = measure(options, Path(folder))
    print(json.dumps(report(options, turns), indent=1))


if __name__ == "__main__":
    main()
