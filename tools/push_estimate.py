"""Estimate how long a weight push takes on a cluster, from the plan and from rates that were measured elsewhere.

    python tools/push_estimate.py [--config MODEL/config.json] [--tp 2 --pp 4 --ep 8 --etp 1 --ranks 64]
                                  [--engines 8 --engine-tp 8] [--bucket-mb 1024] [--gb-per-s 22.9] [--call-s 0.01]

Without --config: the table of docs/results/weight-push.md. An estimate, not a measurement: every engine rank receives
every byte once (SGLang's broadcast cannot leave out other ranks' experts), one bucket at a time, so

    seconds = bytes / rate + buckets * seconds a call

where the rate is that of a broadcast as the engines see it. Gathers overlap the sends of other sources and are left
out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.push import plan_for_layout

MB = 1024**2
_QWEN3_30B = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960},
}
_GLM45 = {
    **{"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120, "intermediate_size": 12288},
    **{"num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    **{"n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "n_shared_experts": 1},
    **{"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    **{"attention_bias": True, "tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072},
}


@dataclass(frozen=True)
class Cluster:
    """A model, its trainers and its engines."""

    name: str
    config: dict[str, Any]
    layout: TrainerLayout
    num_engines: int
    engine_tp: int

    @property
    def num_gpus(self) -> int:
        return self.layout.world_size + self.num_engines * self.engine_tp


CASES = (
    Cluster("Qwen3-30B-A3B", _QWEN3_30B, TrainerLayout(32, tp=2, pp=2, ep=8), 17, 4),
    Cluster("Qwen3-30B-A3B", _QWEN3_30B, TrainerLayout(64, tp=4, pp=2, ep=8), 112, 4),
    Cluster("GLM-4.5, 355B", _GLM45, TrainerLayout(128, tp=8, pp=4, ep=16), 16, 8),
    Cluster("GLM-4.5, 355B", _GLM45, TrainerLayout(512, tp=8, pp=4, ep=16), 64, 8),
)


def estimate(cluster: Cluster, bucket_bytes: int, gb_per_s: float, call_s: float) -> dict[str, Any]:
    """Facts of the plan, and `seconds`."""
    shape = shape_from_hf_config(cluster.config)
    stages = stage_layers(cluster.layout, shape.num_layers, {})
    assert stages is not None
    engines = [range(cluster.engine_tp)] * cluster.num_engines
    plan = plan_for_layout(shape, cluster.layout, engines, bucket_bytes, "bfloat16", stages)
    num_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    return {
        "num_bytes": num_bytes,
        "sources": len(plan.sources),
        "buckets": len(plan.buckets),
        "calls": plan.num_calls,
        "largest_share": max(plan.sent_bytes(rank) for rank in plan.sources) / num_bytes,
        "peak_bytes": max(plan.peak_bytes(rank) for rank in range(cluster.layout.world_size)),
        "seconds": num_bytes / gb_per_s / 1e9 + len(plan.buckets) * call_s,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a config.json; default: the cases of the docs")
    for name, default in (("tp", 1), ("pp", 1), ("ep", 1), ("etp", 1), ("ranks", 8), ("engines", 1), ("engine-tp", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--gb-per-s", type=float, default=22.9)
    parser.add_argument("--call-s", type=float, default=0.01)
    options = parser.parse_args(arguments)
    cases: Sequence[Cluster] = CASES
    if options.config:
        layout = TrainerLayout(options.ranks, tp=options.tp, pp=options.pp, ep=options.ep, etp=options.etp)
        raw = json.loads(Path(options.config).read_text())
        cases = [Cluster(raw["model_type"], raw, layout, options.engines, options.engine_tp)]
    print("| model | GPUs | trainers | engines | GB | sources | buckets | extra memory of a rank | estimated |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        estimated = estimate(case, options.bucket_mb * MB, options.gb_per_s, options.call_s)
        layout = case.layout
        print(
            f"| {case.name} | {case.num_gpus} | {layout.world_size}: TP {layout.tp}, PP {layout.pp}, EP {layout.ep} |"
            f" {case.num_engines} x TP {case.engine_tp} | {estimated['num_bytes'] / 1e9:.0f} | {estimated['sources']} |"
            f" {estimated['buckets']} | {estimated['peak_bytes'] / 1e9:.1f} GB | {estimated['seconds']:.1f} s |"
        )


if __name__ == "__main__":
    main()
