"""Does every algorithm learn? The presets of --algorithm on the quickstart's task, from one SFT checkpoint and seed.

    python tools/bench/presets.py --out runs/presets [--algorithms grpo ppo …] [--seed 1]
    python tools/bench/presets.py --out runs/lora --lora-ranks 0 8 1 --seeds 1 2 3

Runs the command line once for each (SFT first, where --out has none yet), one after the other, and prints held-out
accuracy before and after with the seconds spent in rollout steps (starting up and evaluating are not counted); the
curves go to OUT/accuracy.png, the figures to OUT/presets.json. With --lora-ranks: the quickstart's GRPO with adapters
of these ranks (0: all weights), at ten times its learning rate, for each seed; the figures go to OUT/lora.json. A run
that has finished in OUT is not made again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from fusionrl.algorithms.estimators import PRESETS
from fusionrl.observe.curves import COLORS, Metrics, series, smooth
from fusionrl.observe.metrics import read_metrics

ACCURACY = "eval/held-out/accuracy"
RATES = ["--lr", "1.2e-4", "--min-lr", "1e-5"]
# In addition to the shared flags; chosen on seed 1. Losses with other units need other rates.
OWN_FLAGS: dict[str, list[str]] = {
    # Its reward model learns from answers that are right or wrong: no credit for single digits.
    "prime": ["--rm-type", "exact", "--prm-lr", "1e-3"],
    "remax": ["--num-rollout", "90"],
    "dpo": ["--num-rollout", "90"],
    "ppo": ["--critic-lr", "1e-3", "--num-critic-only-steps", "4", "--num-rollout", "120"],
}


def train(*flags: str) -> None:
    """One run of the command line."""
    subprocess.run([sys.executable, "-m", "fusionrl.cli", "train", "--device", "cpu", *flags], check=True)


def make_start(out: Path, seed: int) -> None:
    """The task and the SFT checkpoint that all start from, as in scripts/quickstart.sh."""
    if (out / "sft-model").is_dir():
        return
    subprocess.run([sys.executable, "tools/make_quickstart.py", "--out", str(out), "--seed", str(seed)], check=True)
    train(
        *("--mode", "sft", "--run-dir", str(out / "sft"), "--hf-checkpoint", str(out / "model"), "--seed", str(seed)),
        *("--prompt-data", str(out / "sft.jsonl"), "--input-key", "messages", "--rollout-shuffle"),
        *("--rollout-batch-size", "128", "--num-rollout", "180", "--lr", "1e-3", "--lr-warmup-iters", "20"),
        *("--no-save", "--save-hf", str(out / "sft-model")),
    )


def run_preset(name: str, out: Path, seed: int) -> None:
    """One algorithm."""
    preset_flags = ["--num-rollout", "75", *RATES, *OWN_FLAGS.get(name, [])]
    run_rl(out, out / name, seed, *("--algorithm", name, "--eval-interval", "15"), *preset_flags)


def run_rank(rank: int, out: Path, seed: int) -> None:
    """The quickstart's GRPO with adapters of a rank; 0: of all weights."""
    rates = ["--lr", "1.2e-3", "--min-lr", "1e-4", "--lora-rank", str(rank)] if rank else RATES
    run_rl(out, out / f"rank-{rank}", seed, *("--num-rollout", "90", "--eval-interval", "45"), *rates)


def run_rl(out: Path, folder: Path, seed: int, *preset_flags: str) -> None:
    """One run on the task in `out`."""
    train(
        *("--mode", "rl", "--run-dir", str(folder), "--seed", str(seed), "--hf-checkpoint", str(out / "sft-model")),
        *("--prompt-data", str(out / "train.jsonl"), "--input-key", "prompt"),
        *("--label-key", "label", "--apply-chat-template"),
        *([] if "--rm-type" in preset_flags else ["--custom-rm-path", "plugins.rewards.digits.reward"]),
        *("--rollout-max-response-len", "5", "--eval-prompt-data", "held-out", str(out / "eval.jsonl")),
        *("--eval-temperature", "0", "--rollout-shuffle", "--rollout-seed", str(seed)),
        *("--rollout-batch-size", "32", "--n-samples-per-prompt", "16", "--num-steps-per-rollout", "2"),
        *("--adam-beta2", "0.99", "--lr-decay-style", "linear", "--lr-warmup-iters", "4", "--colocate", "--no-save"),
        *("--sglang-max-running-requests", "256", *preset_flags),
    )


def result(folder: Path) -> dict[str, float]:
    """Accuracy before and after, and the seconds of all rollout steps."""
    rows = read_metrics(folder)
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    seconds = sum(row.get("perf/step_time_s", 0.0) for row in rows)
    return {"before": accuracies[0], "after": accuracies[-1], "best": max(accuracies), "train_s": seconds}


def draw_accuracies(runs: Mapping[str, Metrics], out: Path) -> None:
    figure = Figure(figsize=(7.2, 3.6), dpi=130, layout="constrained")
    axis = figure.subplots()
    for index, (name, metrics) in enumerate(runs.items()):
        steps, values = series(metrics, ACCURACY)
        line = "-" if index < len(COLORS) else "--"
        axis.plot(steps, smooth(steps, values), line, color=COLORS[index % len(COLORS)], linewidth=2.0, label=name)
    axis.set(title=ACCURACY, xlabel="step", ylabel="share of correct answers")
    axis.legend(loc="best")
    figure.savefig(out)


def compare_ranks(ranks: Sequence[int], seeds: Sequence[int], out: Path) -> None:
    """Run what is missing, seed by seed, then print the table."""
    found: dict[int, dict[int, dict[str, float]]] = {rank: {} for rank in ranks}
    for seed in seeds:
        folder = out / f"seed-{seed}"
        make_start(folder, seed)
        for rank in ranks:
            if not (folder / f"rank-{rank}" / "curves.png").is_file():
                run_rank(rank, folder, seed)
            found[rank][seed] = result(folder / f"rank-{rank}")
            (out / "lora.json").write_text(json.dumps(found, indent=1) + "\n")
    print("| rank | accuracy before, by seed | after | mean after | seconds of training |\n|---|---|---|---|---|")
    for rank, rows in found.items():
        before, after = ([row[name] for row in rows.values()] for name in ("before", "after"))
        texts = (", ".join(f"{value:.3f}" for value in values) for values in (before, after))
        seconds = fmean(row["train_s"] for row in rows.values())
        print(f"| {rank or 'all weights'} | {' | '.join(texts)} | {fmean(after):.3f} | {seconds:.0f} |")


def main() -> None:
    """Run what is missing, then the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--algorithms", nargs="*", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lora-ranks", type=int, nargs="+", help="compare adapters in place of algorithms")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="with --lora-ranks")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.lora_ranks is not None:
        compare_ranks(options.lora_ranks, options.seeds, options.out)
        return
    make_start(options.out, options.seed)
    accuracies = {}
    for name in options.algorithms:
        if not (options.out / name / "curves.png").is_file():
            run_preset(name, options.out, options.seed)
        accuracies[name] = result(options.out / name)
        (options.out / "presets.json").write_text(json.dumps(accuracies, indent=1) + "\n")
    print("| algorithm | accuracy before | after | gain | seconds of training |\n|---|---|---|---|---|")
    for name, row in accuracies.items():
        gain = row["after"] - row["before"]
        print(f"| {name} | {row['before']:.3f} | {row['after']:.3f} | {gain:+.3f} | {row['train_s']:.0f} |")
    runs = {name: read_metrics(options.out / name) for name in accuracies}
    draw_accuracies(runs, options.out / "accuracy.png")


if __name__ == "__main__":
    main()
