"""The time of a training step by kind of operation, by torch's profiler.

    python tools/bench/train_parts.py --model runs/smollm2-135m/model [--prompts 4 --samples 8 --new-tokens 32]

One optimizer step over the tokens of a step of `tools/bench/step.py` (prompts and responses are random, the lengths
are the same), after one that is not counted. Printed are milliseconds and shares of the operators' own time; what is
left of the step is Python, and collectives of one rank.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fusionrl.config.config import Config, PassThrough
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.models.shape import read_model_shape
from fusionrl.trainer.local_ranks import LocalRanks

if TYPE_CHECKING:
    from fusionrl.trainer.policy import PolicyTrainer

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer": ("aten::_fused_adamw_",),
    "copies": ("aten::copy_", "aten::cat", "aten::index", "aten::fill_", "aten::zero_"),
}
"""Beginnings of operators' names; every other operator is elementwise."""
ELEMENTWISE = "norms, gates, softmax"


def make_shard(num_prompts: int, num_samples: int, prompt: int, response: int, vocab_size: int) -> TrainShard:
    """Groups of samples with one prompt each, in one micro-batch of one step; every response token is trained on."""
    random = np.random.default_rng(1)
    heads = [random.integers(0, vocab_size, prompt) for _ in range(num_prompts)]
    parts = [(head, random.integers(0, vocab_size, response)) for head in heads for _ in range(num_samples)]
    count = len(parts)
    return TrainShard(
        rollout_id=0,
        total_lengths=np.full(count, prompt + response, np.int32),
        response_lengths=np.full(count, response, np.int32),
        fields={
            "tokens": np.concatenate([part for pair in parts for part in pair]).astype(np.int32),
            "loss_mask": np.ones(count * response, np.float32),
            "rewards": np.zeros(count, np.float32),
            "raw_rewards": np.zeros(count, np.float32),
            "sample_index": np.arange(count),
            "group_index": np.repeat(np.arange(num_prompts), num_samples),
            "truncated": np.zeros(count, np.bool_),
        },
        steps=[TrainStep([list(range(count))], count * response, count)],
    )


def profiled(trainer: PolicyTrainer, shard: TrainShard, index: int, num_threads: int) -> tuple[float, dict[str, float]]:
    """(seconds of a step, own seconds of each operator)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(num_threads)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        trainer.train(index, shard)
        took = time.perf_counter() - start
    return took, {one.key: one.self_cpu_time_total / 1e6 for one in profiler.key_averages()}


def by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """Add operators up."""
    found: dict[str, float] = defaultdict(float)
    for name, value in seconds.items():
        kinds = [kind for kind, starts in KINDS.items() if name.startswith(starts)]
        if kinds or name.startswith("aten::"):
            found[kinds[0] if kinds else ELEMENTWISE] += value
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sizes = (options.prompts, options.samples, options.prompt_tokens, options.new_tokens)
    shard = make_shard(*sizes, read_model_shape(options.model).vocab_size)
    values = {"mode": "sft", "hf_checkpoint": options.model, "precision": options.precision, "lr": 1e-6}
    ranks = LocalRanks(1)
    try:
        ranks.start(Config.from_flat(values, PassThrough()))
        for index in range(2):  # the first is a warm-up
            took, seconds = ranks.run(profiled, shard, index, options.threads)[0]
    finally:
        ranks.close()
    kinds = by_kind(seconds)
    print(f"{'step':24} {1e3 * took:8.0f} ms")
    for kind, value in sorted(kinds.items(), key=lambda item: -item[1]) + [("else", took - sum(kinds.values()))]:
        print(f"{kind:24} {1e3 * value:8.0f} ms {value / took:7.1%}")


if __name__ == "__main__":
    main()
