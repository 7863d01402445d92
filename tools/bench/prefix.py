"""Time and memory of a training step with the prompt of a group computed once, against once a sample, by turns.

    python tools/bench/prefix.py [--shape tiny] [--samples 8] [--lengths 2048x256 1024x256 256x256 256x1024] [--turns 3]

One optimizer step over one micro-batch: the samples of one prompt (`--lengths PROMPTxRESPONSE`), random weights and
tokens, every response token trained on. Both ways run in processes of their own, in turn. A row a pair of lengths:
tokens that the model runs over, seconds (median) and peak memory of the plain way, and both as a ratio plain / shared.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fusionrl.config.config import Config, PassThrough
from fusionrl.data.train_batch import TrainShard, TrainStep
from tests.trainer.local_ranks import LocalRanks
from tools.bench.trainer import QWEN3, peak_memory, write_config

VOCAB = 2048


def group_shard(prompt: int, response: int, count: int, seed: int) -> TrainShard:
    """One shard, one step, one micro-batch: `count` samples of one prompt."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCAB, prompt)
    tokens = np.concatenate([[*shared, *random.integers(0, VOCAB, response)] for _ in range(count)])
    return TrainShard(
        rollout_id=0,
        total_lengths=np.full(count, prompt + response, np.int32),
        response_lengths=np.full(count, response, np.int32),
        fields={
            "tokens": tokens.astype(np.int32),
            "loss_mask": np.ones(count * response, np.float32),
            "rewards": np.zeros(count, np.float32),
            "raw_rewards": np.zeros(count, np.float32),
            "sample_index": np.arange(count),
            "group_index": np.zeros(count, np.int64),
            "truncated": np.zeros(count, np.bool_),
        },
        steps=[TrainStep([list(range(count))], count * response, count)],
    )


@dataclass
class Way:
    """One of the two ways: its process, and the seconds of its steps."""

    ranks: LocalRanks
    seconds: list[float] = field(default_factory=list)

    def step(self, shard: TrainShard, index: int) -> None:
        """Take a step; the first is not timed."""
        start = time.perf_counter()
        self.ranks.train([shard], rollout_id=index)
        if index:
            self.seconds.append(time.perf_counter() - start)


def compare(folder: Path, prompt: int, response: int, count: int, turns: int) -> list[str]:
    """The cells of a row."""
    shard = group_shard(prompt, response, count, seed=1)
    ways = {}
    try:
        for shares in (False, True):
            values = {
                "mode": "sft",
                "hf_checkpoint": str(folder),
                "debug_random_weights": True,
                "transformer_impl": "local",
                "share_prompts": shares,
                "lr": 1e-5,
            }
            ways[shares] = Way(LocalRanks(1))
            ways[shares].ranks.start(Config.from_flat(values, PassThrough()))
        for turn in range(turns + 1):
            for shares in (False, True) if turn % 2 else (True, False):
                ways[shares].step(shard, turn)
        plain, shared = (statistics.median(ways[shares].seconds) for shares in (False, True))
        peaks = [ways[shares].ranks.run(peak_memory)[0] / 2**30 for shares in (False, True)]
    finally:
        for way in ways.values():
            way.ranks.close()
    tokens = count * (prompt + response - 1), prompt + count * (response - 1)
    return [
        f"{prompt:,}",
        f"{response:,}",
        f"{prompt / response:.2f}",
        f"{tokens[0]:,} / {tokens[1]:,} = {tokens[0] / tokens[1]:.2f}",
        f"{plain:.2f} / {shared:.2f} = {plain / shared:.2f}",
        f"{peaks[0]:.2f} / {peaks[1]:.2f} = {peaks[0] / peaks[1]:.2f}",
    ]


def _lengths(text: str) -> tuple[int, int]:
    prompt, sign, response = text.partition("x")
    if not sign or not prompt.isdecimal() or not response.isdecimal() or not int(prompt) or not int(response):
        raise argparse.ArgumentTypeError(f"{text!r} is not PROMPTxRESPONSE in tokens, as in 2048x256")
    return int(prompt), int(response)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(QWEN3), default="tiny")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=_lengths,
        default=[(256, 1024), (256, 256), (1024, 256), (2048, 256)],
        metavar="PROMPTxRESPONSE",
    )
    parser.add_argument("--turns", type=int, default=3, help="timed steps of each way")
    options = parser.parse_args(argv)
    print("| prompt | response | prompt ÷ response | tokens run | seconds a step | peak GiB |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_config(options.shape, Path(scratch))
        for prompt, response in options.lengths:
            row = compare(Path(scratch), prompt, response, options.samples, options.turns)
            print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
