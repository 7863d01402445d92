"""Run the quickstart's GRPO again and compare: the same flags, other batches, several engines, after a kill and resume.

    python tools/repeat_runs.py OUT [--steps 30] [--cases again few engines resume] [--times 50] [-- FLAGS]

makes the quickstart's model, trains it supervised, and makes one GRPO run and one of each case, FLAGS in addition. A
case is equal if every number that a step reports about rollouts, training and evaluation is equal, times left out, and
the exported weights are equal byte by byte. Exits with 1 if one is not. Folders that are finished are kept.

    again    the same flags; also every other number of metrics.jsonl must be equal but for times
    few      engines that compute 3 requests at once
    engines  two engines
    resume   killed (SIGKILL) after a checkpoint in the middle, then resumed
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusionrl.observe.metrics import read_metrics
from fusionrl.observe.run_differences import is_timed

ROOT = Path(__file__).parents[1]
CASES: dict[str, list[str]] = {
    "again": [],
    "few": ["--sglang-max-running-requests", "3"],
    "engines": ["--rollout-num-gpus", "2"],
    "resume": ["--save-interval", "1", "--keep-checkpoints", "2"],
}
_TIMEOUT_S = 3600.0


def steps_of(run: Path, *, of_work: bool = True) -> dict[int, dict[str, Any]]:
    """Step → its numbers without times; `of_work`: those of rollouts, training and evaluation alone."""

    def counts(name: str) -> bool:
        if of_work:
            return name.startswith(("train/", "rollout/", "eval/"))
        return "/" in name and not is_timed(name)

    return {row["step"]: {k: v for k, v in row.items() if counts(k)} for row in read_metrics(run) if row["step"]}


def first_difference(one: Path, other: Path, *, of_work: bool = True) -> str:
    """Return the first step at which two runs differ, with the names of the numbers; "" if none does."""
    first, second = steps_of(one, of_work=of_work), steps_of(other, of_work=of_work)
    for step in sorted(first.keys() | second.keys()):
        a, b = first.get(step, {}), second.get(step, {})
        if names := sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)):
            values = f"{a.get(names[0])!r} and {b.get(names[0])!r}"
            return f"step {step}: {len(names)} of {len(a)} numbers, {names[0]}: {values}"
    return ""


def weights_differ(one: Path, other: Path) -> bool:
    """Return whether two exported folders have other weights."""
    files = [sorted(folder.glob("*.safetensors")) for folder in (one, other)]
    names = [[file.name for file in found] for found in files]
    return names[0] != names[1] or any(
        a.read_bytes() != b.read_bytes() for a, b in zip(files[0], files[1], strict=True)
    )


def main(argv: Sequence[str]) -> int:
    """Make the runs that are missing, and print the table."""
    argv, more = _split(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sft-steps", type=int, default=180)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--times", type=int, default=1, help="runs of each case")
    options = parser.parse_args(argv)
    out: Path = options.out
    model = _model(out, options.sft_steps)
    flags = [*_flags(out, model, options.steps), *more]
    base = _finished(out / "base", flags)
    print(f"{'case':12} {'numbers':>8} {'weights':>8}  first difference", flush=True)
    num_differing = 0
    for case in options.cases:
        for number in range(1, options.times + 1):
            run = _finished(out / f"{case}-{number}", [*flags, *CASES[case]], is_killed=case == "resume")
            difference = first_difference(base, run, of_work=case != "again")
            weights = "differ" if weights_differ(base / "hf", run / "hf") else "equal"
            numbers = "differ" if difference else "equal"
            num_differing += "differ" in (weights, numbers)
            print(f"{run.name:12} {numbers:>8} {weights:>8}  {difference}", flush=True)
    print(f"{num_differing} of {len(options.cases) * options.times} runs differ")
    return int(num_differing > 0)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _model(out: Path, num_steps: int) -> Path:
    """Return the model after supervised training, as the quickstart does it."""
    model = out / "sft-model"
    if not model.exists():
        if not (out / "model").exists():
            _call(sys.executable, str(ROOT / "tools" / "make_quickstart.py"), "--out", str(out), "--seed", "1")
        flags = ["--mode", "sft", "--hf-checkpoint", str(out / "model"), "--prompt-data", str(out / "sft.jsonl")]
        flags += ["--input-key", "messages", "--rollout-shuffle", "--rollout-batch-size", "128", "--lr", "1e-3"]
        flags += ["--lr-warmup-iters", "20", "--num-rollout", str(num_steps), "--no-save", "--save-hf", str(model)]
        _call(*_command([*flags, "--run-dir", str(out / "sft")]))
    return model


def _flags(out: Path, model: Path, num_steps: int) -> list[str]:
    """The quickstart's GRPO, with engines and trainers apart, so that there can be several engines."""
    return [
        *("--mode", "rl", "--hf-checkpoint", str(model), "--prompt-data", str(out / "train.jsonl")),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--custom-rm-path", "plugins.rewards.digits.reward", "--rollout-max-response-len", "5"),
        *("--rollout-batch-size", "32", "--n-samples-per-prompt", "16", "--num-steps-per-rollout", "2"),
        *("--lr", "1.2e-4", "--min-lr", "1e-5", "--adam-beta2", "0.99", "--lr-decay-style", "linear"),
        *("--lr-warmup-iters", "4", "--eval-prompt-data", "held-out", str(out / "eval.jsonl"), "--eval-temperature"),
        *("0", "--eval-interval", str(max(1, num_steps // 2)), "--skip-eval-before-train"),
        *("--num-rollout", str(num_steps)),
    ]


def _finished(run: Path, flags: list[str], is_killed: bool = False) -> Path:
    """Return the run's folder; make the run if it has not ended well before."""
    if (run / "hf" / "model.safetensors").exists():
        return run
    shutil.rmtree(run, ignore_errors=True)  # an unfinished one
    saves = [] if is_killed else ["--no-save"]
    command = _command([*flags, *saves, "--save-hf", str(run / "hf"), "--run-dir", str(run)])
    if is_killed:
        _kill_in_the_middle([*command, "--resume"], run, int(flags[flags.index("--num-rollout") + 1]) // 2)
        command.append("--resume")
    _call(*command)
    return run


def _kill_in_the_middle(command: list[str], run: Path, step: int) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    deadline = time.monotonic() + _TIMEOUT_S
    while not (run / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{run}: it ended, or took too long, before step {step}")
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def _command(flags: list[str]) -> list[str]:
    return [str(Path(sys.executable).with_name("fusionrl")), "train", *flags]


def _call(*command: str) -> None:
    code = subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=_TIMEOUT_S).returncode
    if code:
        raise SystemExit(f"exit code {code}: {' '.join(command)}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
