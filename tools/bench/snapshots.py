"""Time snapshots of the trainers (--snapshot-interval): their share of a step, and their seconds by bytes.

    bash scripts/quickstart.sh 1 runs/quickstart    # makes the model
    python tools/bench/snapshots.py --model runs/quickstart/sft-model [--turns 20] [--steps 5] [--hidden 256 512 1024]

Turns of `--steps` steps with a snapshot after each, and of as many without, alternate in one run of the quickstart's
size (16 prompts x 8 samples x 32 tokens). Then models of other widths are started alone, and asked for snapshots while
nothing else is at work: the time until the state of all ranks is in Ray's object store. Prints one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusionrl.cli.resolve import resolve
from fusionrl.runtime.run_actors import Actors
from fusionrl.weights.remote_calls import get
from tools.bench.bare import QUESTIONS
from tools.bench.step import our_flags, our_step


def share_of_step(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the median seconds of a step with and without snapshots, and by how much the one is longer."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": QUESTIONS[i % len(QUESTIONS)]} for i in range(options.prompts)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, plan = resolve(our_flags(options, data, folder / "run"))
    (folder / "run" / "logs").mkdir(parents=True)
    without, with_snapshots, number = list[float](), list[float](), 0
    with Actors(config, plan, folder / "run", 1) as actors:
        actors.weights.push(0)
        for turn in range(2 * options.turns + 2):  # the first of each side is a warm-up
            start = time.perf_counter()
            for _ in range(options.steps):
                our_step(actors, number)
                if turn % 2:
                    actors.recovery.take_snapshot_if_due(number)
                number += 1
            seconds = (time.perf_counter() - start) / options.steps
            if turn >= 2:
                (with_snapshots if turn % 2 else without).append(seconds)
    longer = [b / a - 1 for a, b in zip(without, with_snapshots, strict=True)]
    return {
        "without_s": round(statistics.median(without), 4),
        "with_s": round(statistics.median(with_snapshots), 4),
        "longer_percent": round(100 * statistics.median(longer), 2),
        "quartiles_percent": [round(100 * value, 2) for value in statistics.quantiles(longer, n=4)],
    }


def by_bytes(options: argparse.Namespace, hidden: int, folder: Path) -> dict[str, float]:
    """Return the bytes of a snapshot of a model of this width, and the median of its seconds."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shape = AutoConfig.from_pretrained(options.model)
    shape.hidden_size, shape.intermediate_size = hidden, 3 * hidden
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(options.model).save_pretrained(folder / "model")
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (folder / "sft.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    flags = ["--mode", "sft", "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "sft.jsonl")]
    flags += ["--input-key", "messages", "--rollout-batch-size", "1", "--num-rollout", "1", "--no-save"]
    config, plan = resolve([*flags, "--run-dir", str(folder / "run")])
    (folder / "run" / "logs").mkdir(parents=True)
    seconds = []
    with Actors(config, plan, folder / "run", 1) as actors:
        for _ in range(options.repeats):
            start = time.perf_counter()
            pairs = [trainer.snapshot.options(num_returns=2).remote() for trainer in actors.trainers.policy]
            num_bytes = sum(get([pair[0] for pair in pairs]))
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    rate = round(num_bytes / median / 1e9, 2)
    return {"hidden": hidden, "bytes": num_bytes, "seconds": round(median, 4), "gb_per_s": rate}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--turns", type=int, default=20, help="of each side")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 512, 1024], help="widths of further models")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("flags", nargs="*", help="more of fusionrl's own, after --")
    options = parser.parse_args(argv)
    if options.turns < 2:
        parser.error(f"--turns {options.turns}: give at least 2")
    with tempfile.TemporaryDirectory() as folder:
        result = share_of_step(options, Path(folder))
    result["by_bytes"] = []
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory() as folder:
            result["by_bytes"].append(by_bytes(options, hidden, Path(folder)))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
