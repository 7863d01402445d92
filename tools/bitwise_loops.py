"""Run --bitwise loops: log-probs of engine and trainer must be equal, bit by bit, in every step and after every push.

    python -m tools.bitwise_loops --out DIR [--only TEXT] [--steps N] [--plain] [--json FILE]

A row is a run of `fusionrl train` with a tiny random model on this machine's CPU: families in fp32 and bf16, engines
that compute 1, 3 or 16 requests at once, and trainers in several layouts. `--only qwen3-bf16,ep2` runs the rows with
one of these texts in their names. Columns: the largest difference of log-probs in a step (`train/logprob_diff_max`)
and after a push (`sync/verify_logprob_diff_max`), the mean ratio of the two probabilities, and the largest mean
difference in a step (`train/logprob_diff_mean`). Exit code 1 unless each run ends well with 0, 0, 1 and 0 in every
step. `--plain` runs the rows without the flag, to see what it removes. A row takes 20 to 40 seconds on two cores.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.family_loops import make_model
from tools.make_quickstart import write_quickstart

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
_BATCHES = (1, 3, 16)
_TWO = ("--actor-num-gpus-per-node", "2")
_LAYOUTS = {
    "dp2": _TWO,
    "pp2": (*_TWO, "--pipeline-model-parallel-size", "2"),
    "ep2": (*_TWO, "--expert-model-parallel-size", "2"),
    "tp2": (*_TWO, "--tensor-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2"),
}


def rows() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of each row → (its family, its flags)."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for family in FAMILIES:
        for precision in ("fp32", "bf16"):
            types = ("--precision", precision, "--rollout-dtype", precision)
            for batch in _BATCHES:
                flags = ("--sglang-max-running-requests", str(batch), "--sglang-chunked-prefill-size", "16")
                found[f"{family}-{precision}-batch{batch}"] = family, (*types, *flags)
            for name, layout in _LAYOUTS.items():
                if name != "ep2" or family.endswith("_moe"):
                    devices = "2" if name == "tp2" else "1"
                    found[f"{family}-{precision}-{name}"] = family, (*types, *layout, "--rollout-num-gpus", devices)
    return found


def run_row(
    family: str, flags: tuple[str, ...], task: Path, folder: Path, num_steps: int, *, is_plain: bool
) -> dict[str, Any]:
    """Run it; what it measured, and why it is not exact."""
    folder.mkdir(parents=True)
    # A rank of an engine has whole multiples of 32 columns of an MLP, or it gets some of zeros.
    sizes = {"intermediate_size": 64} | ({"moe_intermediate_size": 64} if family.endswith("_moe") else {})
    make_model(family, task, folder / "model", **sizes)
    command = [
        *(sys.executable, "-m", "fusionrl.cli", "train", "--hf-checkpoint", str(folder / "model")),
        *([] if is_plain else ["--bitwise"]),
        *("--prompt-data", str(task / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--custom-rm-path", f"{ROOT}/tools/proof/hooks.py:partial_credit"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "12"),
        *("--device", "cpu", "--num-rollout", str(num_steps), "--no-save", "--verify-weights", "always"),
        *("--lr", "1e-3", "--run-dir", str(folder / "run"), *flags),
    ]
    with open(folder / "output.txt", "wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
    if code:
        return {"why": f"exit status {code}: {folder / 'output.txt'}"}
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in metrics if "train/grad_norm" in line]
    row: dict[str, Any] = {
        "steps": max(line.get("train/logprob_diff_max", math.inf) for line in trained),
        "pushes": max(line.get("sync/verify_logprob_diff_max", 0.0) for line in metrics),
        "ratio": max(
            (line.get("train/logprob_ratio_mean", math.inf) for line in trained), key=lambda ratio: abs(ratio - 1)
        ),
        "mean": max(line.get("train/logprob_diff_mean", math.inf) for line in trained),
    }
    why = [] if is_plain or tuple(row.values()) == (0.0, 0.0, 1.0, 0.0) else ["not exact"]
    if len(trained) != num_steps or not all(line["train/grad_norm"] > 0 for line in trained):
        why.append("a step without a gradient")
    return row | {"why": ", ".join(why)}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the runs")
    parser.add_argument("--only", default="", help="rows whose names have one of these texts, with commas")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="without --bitwise: how large the differences are then")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(argv)
    out: Path = options.out.absolute()
    write_quickstart(out / "task", 0)
    results = {}
    print("| run | steps | pushes | ratio | mean | |\n|---|---|---|---|---|---|", flush=True)
    for name, (family, flags) in rows().items():
        if any(text in name for text in options.only.split(",")):
            row = run_row(family, flags, out / "task", out / name, options.steps, is_plain=options.plain)
            results[name] = row
            cells = (f"{row[key]:.6g}" if key in row else "" for key in ("steps", "pushes", "ratio", "mean"))
            print(f"| {name} | {' | '.join(cells)} | {row['why']} |", flush=True)
    bad = sum(bool(row["why"]) for row in results.values())
    print(f"{len(results)} rows, {bad} {'failed' if options.plain else 'not exact'}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(bad > 0 or not results)


if __name__ == "__main__":
    sys.exit(main())
