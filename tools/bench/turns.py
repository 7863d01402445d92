"""Rollouts of this checkout against another one, by turns: wall and CPU seconds.

    git worktree add ../before COMMIT
    python tools/bench/turns.py --against ../before [--rounds 5] [--samples 2048] [--tokens 4096]
    python tools/bench/turns.py --against ../before --samples 512 --tokens 4       # of the quickstart's size

Each round runs `tools/bench/buffer.py` of each checkout once, with the code of that checkout; the order changes from
round to round. Printed are the medians of each, and the median over the rounds of the ratio, this checkout to the
other one. CPU seconds are those of the Buffer and of its helpers: other programs on the machine change them less than
they change wall seconds. Exits with 1 if the CPU ratio is over --most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
UNBOUNDED = "1e9"  # memory is not judged here


def measure(checkout: Path, num_samples: int, num_tokens: int) -> dict[str, float]:
    """Wall and CPU seconds of one rollout with the code of `checkout`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        sizes = ["--samples", str(num_samples), "--tokens", str(num_tokens), "--max-memory", UNBOUNDED]
        script = str(checkout / "tools" / "bench" / "buffer.py")
        done = subprocess.run(
            [sys.executable, script, *sizes, "--json", str(out)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{checkout}: tools/bench/buffer.py ended with {done.returncode}\n{done.stderr[-2000:]}")
        (figures,) = json.loads(out.read_text(encoding="utf-8"))
    return {"wall": figures["seconds"], "CPU": figures["buffer_cpu_s"] + figures["helpers_cpu_s"]}


def main() -> int:
    """Measure by turns; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, metavar="CHECKOUT", help="root of the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2048, help="samples of the rollout, a multiple of 64")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a response")
    parser.add_argument("--most", type=float, default=1.05, help="ratio of CPU seconds that is accepted")
    options = parser.parse_args()
    checkouts = {"this": REPO, "other": options.against.resolve()}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        names = sorted(checkouts, reverse=bool(number % 2))
        rounds.append({name: measure(checkouts[name], options.samples, options.tokens) for name in names})
        told = [
            f"{kind} {rounds[-1]['this'][kind]:.2f} / {rounds[-1]['other'][kind]:.2f} s" for kind in ("wall", "CPU")
        ]
        print(f"round {number}: {', '.join(told)}", flush=True)
    ratios = {}
    for kind in ("wall", "CPU"):
        this, other = (statistics.median(one[name][kind] for one in rounds) for name in ("this", "other"))
        ratios[kind] = statistics.median(one["this"][kind] / one["other"][kind] for one in rounds)
        print(f"{kind:4}  this {this:.2f} s, other {other:.2f} s, this / other {ratios[kind]:.3f}")
    return 0 if ratios["CPU"] <= options.most else 1


if __name__ == "__main__":
    sys.exit(main())
