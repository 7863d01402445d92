"""Print what a quickstart achieved: held-out accuracy before and after GRPO, the mismatch, and where to look.

python tools/quickstart_result.py FOLDER
"""

import json
import sys
from pathlib import Path

from fusionrl.observe.metrics import read_metrics


def summarize(folder: Path) -> dict[str, float]:
    """The figures of a quickstart folder, from its runs' metrics.jsonl."""

    def accuracy(run: str) -> float:
        return next(
            row["eval/held-out/accuracy"] for row in read_metrics(folder / run) if "eval/held-out/accuracy" in row
        )

    steps = [row for row in read_metrics(folder / "grpo") if "train/logprob_diff_mean" in row]
    before, after = accuracy("eval-sft"), accuracy("eval-grpo")
    return {
        "accuracy_after_sft": before,
        "accuracy_after_grpo": after,
        "gain": after - before,
        "largest_mean_logprob_difference": max(row["train/logprob_diff_mean"] for row in steps),
        "grpo_steps": len(steps),
    }


def main() -> None:
    """Entry point."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    result = summarize(folder)
    before, after = result["accuracy_after_sft"], result["accuracy_after_grpo"]
    mismatch = result["largest_mean_logprob_difference"]
    print(f"held-out accuracy   {before:.3f} after SFT -> {after:.3f} after GRPO")
    print(f"engine vs trainer   mean |log-prob difference| at most {mismatch:.1e} at any step")
    print(f"curves              {folder / 'grpo' / 'curves.png'}")
    print(json.dumps(result))
    print("\nto look at it (`source .venv/bin/activate` first):")
    print(f"  fusionrl show {folder / 'grpo'}    # answers of the last step, with rewards")
    print(f"  fusionrl view {folder / 'grpo'}    # all of it as one page: curves, samples, tokens")


if __name__ == "__main__":
    main()
