"""Time the trainer alone: tokens a second, share of the machine's peak (MFU) and peak memory, on made-up data.

    python tools/bench/trainer.py --shape qwen3-0.6b --tokens 16384 --sequence 2048 [--ranks 8 --tp 2 --pp 2 --cp 2]
    python tools/bench/trainer.py --hf-checkpoint FOLDER ...

Random weights of the shape (only config.json is read), one optimizer step over --micro-batches micro-batches of
--tokens tokens a rank, in sequences of --sequence tokens, all of them trained on. Operations are counted as
`fusionrl.plan.balance.SequenceCost` says: 6 a weight and token, and causal attention; recomputation does not count.
The peak is the vendor's for bf16 without sparsity on GPUs that are known here, and measured by a large product
elsewhere. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.config.config import Config, PassThrough
from fusionrl.data.train_batch import TrainShard, TrainStep
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.costs import SequenceCost
from fusionrl.plan.layout import TrainerLayout
from tests.trainer.local_ranks import LocalRanks

# Sizes of published models (their config.json), under model_type qwen3.
QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
}
# Dense bf16 operations a second, by the name that torch gives the device (vendor's data sheets).
PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}


def write_config(name: str, folder: Path) -> None:
    """config.json of a shape in the table above."""
    sizes = QWEN3[name]
    config = {
        "model_type": "qwen3",
        "num_key_value_heads": min(8, sizes["num_attention_heads"]),
        "head_dim": 128 if name != "tiny" else 64,
        "vocab_size": 151936 if name != "tiny" else 2048,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def make_shard(tokens: int, sequence: int, micro_batches: int, ranks: int, vocab: int, seed: int) -> TrainShard:
    """One data-parallel rank's shard: every micro-batch of the same sequences' lengths, one prompt token each."""
    random = np.random.default_rng(seed)
    lengths = [sequence] * (tokens // sequence) + ([tokens % sequence] if tokens % sequence > 1 else [])
    total = np.array(lengths * micro_batches, np.int32)
    count, responses = len(total), total - 1
    steps = [
        TrainStep(
            [list(range(i * len(lengths), (i + 1) * len(lengths))) for i in range(micro_batches)],
            int(responses.sum()) * ranks,
            count * ranks,
        )
    ]
    return TrainShard(
        rollout_id=0,
        total_lengths=total,
        response_lengths=responses,
        fields={
            "tokens": random.integers(0, vocab, int(total.sum())).astype(np.int32),
            "loss_mask": np.ones(int(responses.sum()), np.float32),
            "rewards": np.zeros(count, np.float32),
            "raw_rewards": np.zeros(count, np.float32),
            "sample_index": np.arange(count),
            "group_index": np.arange(count),
            "truncated": np.zeros(count, np.bool_),
        },
        steps=steps,
    )


def peak_memory(actor: Any) -> int:
    """Peak bytes of this rank so far: allocated on its GPU, or resident on a CPU."""
    import resource

    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_peak(actor: Any) -> tuple[str, float, str]:
    """(device's name, operations a second at best, where that figure is from)."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        for known, peak in PEAKS.items():
            if known in name:
                return name, peak, "vendor, bf16 dense"
    dtype = actor.trained.transformer.params_dtype
    size = 4096 if torch.cuda.is_available() else 1536
    a, b = (torch.randn(size, size, dtype=dtype, device=actor.device) for _ in range(2))
    best = 0.0
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return str(actor.device), best, f"measured, product of {size} x {size} in {dtype}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model_source = parser.add_mutually_exclusive_group(required=True)
    model_source.add_argument("--shape", choices=sorted(QWEN3))
    model_source.add_argument("--hf-checkpoint", help="folder with a config.json")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch, before context parallelism")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    for axis in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--transformer-impl", choices=["auto", "local", "transformer_engine"], default="auto")
    parser.add_argument("--recompute", action="store_true", help="full recomputation of each layer")
    options = parser.parse_args(argv)
    layout = TrainerLayout(options.ranks, options.tp, options.pp, options.cp, options.ep, options.etp, options.vpp)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.hf_checkpoint
        if folder is None:
            write_config(options.shape, Path(scratch))
            folder = scratch
        shape = read_model_shape(folder)
        values = {
            "mode": "sft",
            "hf_checkpoint": str(folder),
            "debug_random_weights": True,
            "precision": options.precision,
            "transformer_impl": options.transformer_impl,
            "actor_num_gpus_per_node": options.ranks,
            "lr": 1e-5,
        }
        config = Config.from_flat(values, PassThrough(transformer=full if options.recompute else {}))
        ranks = LocalRanks(options.ranks)
        try:
            info = ranks.start(config, layout)[0]
            shards = [
                make_shard(options.tokens, options.sequence, options.micro_batches, layout.dp, shape.vocab_size, rank)
                for rank in range(layout.dp)
            ]
            seconds = []
            for step in range(options.steps + 1):
                start = time.perf_counter()
                ranks.train(shards, layout, step)
                seconds.append(time.perf_counter() - start)
            memory = max(ranks.run(peak_memory))
            device, peak, source = ranks.run(device_peak)[0]
        finally:
            ranks.close()
    took = statistics.median(seconds[1:])
    lengths = np.concatenate([shard.total_lengths for shard in shards]) - 1  # the last token is not run
    operations = float(SequenceCost.of_shape(shape)(lengths).sum())
    devices = options.ranks if device.startswith(("NVIDIA", "AMD")) else 1  # ranks on a CPU share it
    result = {
        "shape": options.shape or options.hf_checkpoint,
        "parameters": shape.num_parameters,
        "layout": {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")},
        **{key: info[key] for key in ("impl", "precision")},
        "device": device,
        "cores": os.cpu_count(),
        "tokens_per_step": int(lengths.sum()),
        "sequence": options.sequence,
        "seconds_per_step": round(took, 4),
        "tokens_per_second": round(float(lengths.sum()) / took, 1),
        "mfu": round(operations / took / (peak * devices), 4),
        "peak_operations_per_second": peak,
        "peak_from": source,
        "peak_memory_gib": round(memory / 2**30, 2),
    }
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
