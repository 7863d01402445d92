"""Time a weight push between real processes, next to a bare gloo broadcast and a memcpy on the same machine.

    python -m tools.bench.weight_push [--shape qwen3-0.6b] [--layouts tp1,tp2-pp2] [--receivers 1,2]
                                      [--buckets 64,256,1024] [--turns 5] [--engine] [--device cuda] [--json FILE]

Ranks hold random tensors of the model's names and shapes in bf16, divided as Megatron divides them, and run the
product's sender and protocol; receivers answer as an engine does and drop what they get (by shared memory they copy it
out once). All of a row is measured in one run, alternating; figures are medians over turns, ratios the medians of the
ratios within a turn. A push that is counted is the second of two, whose plan, groups and buffers stand, as in a run:

broadcast, ipc   first byte sent to last byte received, after the preparation; `pause` is how long the engines wait
tensor-by-tensor one gather, one call and one broadcast for each tensor, as verl and early slime
raw broadcast    the same bytes out of one buffer to as many receivers, with nothing else
raw memcpy       the same bytes from buffer to buffer

--engine adds a real SGLang engine (random weights of its own, pushed over). On one GPU, --device cuda has one rank and
one receiver, CUDA IPC, gloo broadcasts of CUDA tensors, and the device's copy for comparison.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fusionrl.base.group_stores import create_group_store
from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.engines.external_engine import AttachedEngine
from fusionrl.models.families import hf_shapes
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.push_plan import EngineTarget, Feed
from fusionrl.weights.push import Push
from tools.bench.push_processes import HOST, TIMEOUT_S, RankOptions, Ranks, Receivers
from tools.threaded import Threaded

MB = 1024**2
_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128}
_EXPERTS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts_per_tok": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    # The published config.json of Qwen/Qwen3-0.6B.
    "qwen3-0.6b": _COMMON
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024}
    | {"intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"tie_word_embeddings": True},
    # 5,000 tensors of 64 KiB, in the proportions of a mixture of experts.
    "moe-5000": _COMMON
    | _EXPERTS
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8192, "hidden_size": 256}
    | {"intermediate_size": 512, "num_hidden_layers": 25, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"head_dim": 32, "num_experts": 64, "moe_intermediate_size": 128, "tie_word_embeddings": False},
    "tiny": _COMMON
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 8192, "hidden_size": 256}
    | {"intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 64, "tie_word_embeddings": True},
    "tiny-moe": _COMMON
    | _EXPERTS
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1024, "hidden_size": 64}
    | {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 16, "num_experts": 16, "moe_intermediate_size": 32, "tie_word_embeddings": False},
}
LAYOUTS = {
    "tp1": TrainerLayout(1),
    "tp2": TrainerLayout(2, tp=2),
    "pp2": TrainerLayout(2, pp=2),
    "ep2": TrainerLayout(2, ep=2),
    "tp2-pp2": TrainerLayout(4, tp=2, pp=2),
    "tp2-ep2": TrainerLayout(2, tp=2, ep=2),
}


class Bench:
    """The ranks of one layout, and one set of receivers."""

    def __init__(self, ranks: Ranks, receivers: Receivers, shape: ModelShape, device: str) -> None:
        self.ranks, self.receivers, self.device = ranks, receivers, device
        self.num_bytes = 2 * sum(torch.Size(sizes).numel() for sizes in hf_shapes(shape).values())
        self._version = 0
        self._configured: int | None = None

    def push(self, transport: str, bucket: int, targets: Sequence[EngineTarget] | None = None) -> dict[str, Any]:
        """One push; its metrics, and `transfer_s` to the last byte that a receiver got."""
        if self._configured != bucket:
            self.ranks.call("configure", bucket)
            self._configured = bucket
        self._version += 1
        push = Push(self.ranks.handles, targets or self.receivers.targets, self._version, TIMEOUT_S)
        metrics: dict[str, Any] = push.from_memory([Feed(0, (0,), 0)], transport, "abort")
        if targets is None:
            received = self.receivers.received()
            metrics["received"] = [[rank["bytes"] for rank in engine] for engine in received]
            last = max(rank["last_s"] for engine in received for rank in engine)
            reports = [report for report in self.ranks.call("last_report") if "first_s" in report]
            metrics["transfer_s"] = last - min(report["first_s"] for report in reports)
            if transport == "broadcast":
                assert all(n == self.num_bytes for engine in metrics["received"] for n in engine), "not every byte came"
        return metrics

    def second_push(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `push`, the second of two: plan, groups and buffers stand, as in a run after its first push."""
        self.push(*args, **kwargs)
        return self.push(*args, **kwargs)

    def raw_broadcast(self, bucket: int) -> float:
        """Seconds for the same bytes, to the same receivers; see `Rank.raw_broadcast`."""
        store = create_group_store(HOST, TIMEOUT_S)
        engines = [rank for engine in self.receivers.engines for rank in engine.ranks]
        size = 1 + len(engines)
        calls = [
            Threaded(engine).post.remote(
                "/raw_broadcast",
                {"num_bytes": self.num_bytes, "bucket": bucket, "port": store.port, "world_size": size, "rank": place},
            )
            for place, engine in enumerate(engines, start=1)
        ]
        seconds = self.ranks.handles[0].raw_broadcast.remote(self.num_bytes, bucket, store.port, size).result()
        for call in calls:
            call.result()
        return seconds

    def raw_memcpy(self, bucket: int) -> float:
        """Seconds to copy the same bytes once."""
        return self.ranks.handles[0].raw_memcpy.remote(self.num_bytes, bucket).result()


def by_turns(turns: int, measured: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Each of `measured` once a turn, after one turn that is not counted; what they return, turn by turn."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in measured}
    for turn in range(turns + 1):
        for name, run in measured.items():
            value = run()
            if turn:
                samples[name].append(value)
    return samples


def medians(samples: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of every figure."""
    return {
        name: {key: _median([value[key] for value in values]) for key in values[0]} for name, values in samples.items()
    }


def _median(values: list[Any]) -> Any:
    return statistics.median(values) if isinstance(values[0], float | int) else values[0]


def _ratio(over: list[dict[str, Any]], key: str, under: list[dict[str, Any]], under_key: str = "") -> float:
    """The median over turns of `key` of one by a figure of the other."""
    return statistics.median(a[key] / b[under_key or key] for a, b in zip(over, under, strict=True))


def measure(bench: Bench, bucket: int, turns: int, baseline: bool) -> dict[str, Any]:
    """One row."""
    transports = ["broadcast", "ipc"]
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "raw memcpy": lambda: {"transfer_s": bench.raw_memcpy(bucket)},
        "raw broadcast": lambda: {"transfer_s": bench.raw_broadcast(bucket)},
        **{name: (lambda name=name: bench.second_push(name, bucket)) for name in transports},
    }
    if baseline and bench.device == "cpu":
        measured["tensor-by-tensor"] = lambda: bench.push("broadcast", 1)
    samples = by_turns(turns, measured)
    key = "transfer_s"
    ratios = {
        "broadcast / raw broadcast": _ratio(samples["raw broadcast"], key, samples["broadcast"]),
        "ipc / raw memcpy": _ratio(samples["raw memcpy"], key, samples["ipc"]),
        "pause / transfer, broadcast": _ratio(samples["broadcast"], "sync/pause_s", samples["broadcast"], key),
        "pause / transfer, ipc": _ratio(samples["ipc"], "sync/pause_s", samples["ipc"], key),
    }
    if "tensor-by-tensor" in samples:
        ratios["broadcast / tensor-by-tensor"] = _ratio(samples["tensor-by-tensor"], key, samples["broadcast"])
    values = medians(samples)
    rate = {name: bench.num_bytes / value[key] / 1e9 for name, value in values.items()}
    return {"gb_per_s": rate, "ratios": ratios, "medians": values}


def measure_engine(bench: Bench, bucket: int, turns: int, config: dict[str, Any], num_threads: int) -> dict[str, Any]:
    """The same with a real engine, which loads what it gets."""
    with tempfile.TemporaryDirectory(prefix="push-engine-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
        spec = EngineSpec(
            index=0,
            model_path=folder,
            device=bench.device,
            dtype="bfloat16",
            tp_size=1,
            gpu_ids=(0,),
            host=HOST,
            api_key=None,
            log_dir=folder,
            seed=1,
            num_threads=num_threads,
            server_args={"load_format": "dummy", "skip_tokenizer_init": True, "max_total_tokens": 1024},
        )
        engine = EngineActor(spec)
        try:
            url = engine.start()
            target = EngineTarget(0, Threaded(AttachedEngine(0, url, 1)), "", (0,))
            measured = {
                name: (lambda name=name: bench.second_push(name, bucket, targets=[target]))
                for name in ("broadcast", "ipc")
            }
            figures = medians(by_turns(turns, measured))
        finally:
            engine.shutdown()
    return {
        "gb_per_s": {name: bench.num_bytes / values["sync/transfer_s"] / 1e9 for name, values in figures.items()},
        "medians": figures,
    }


def environment(device: str) -> dict[str, Any]:
    """The settings on which the figures depend."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else None,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def show(row: dict[str, Any]) -> str:
    """A row as text."""
    head = f"{row['shape']}, {row['layout']}, {row['receiver']}, buckets of {row['bucket_mb']} MB"
    rates = ", ".join(f"{name} {value:.2f}" for name, value in row["gb_per_s"].items())
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in row.get("ratios", {}).items())
    return f"{head}\n  GB/s: {rates}\n" + (f"  ratios: {ratios}\n" if ratios else "")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--layouts", default="tp1,tp2-pp2", help="of " + ", ".join(LAYOUTS))
    parser.add_argument(
        "--receivers", default="1,2", help="how many engines; 1x2 is one of two ranks, dividing experts"
    )
    parser.add_argument("--buckets", default="64,256,1024", help="MB")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-baseline", action="store_true", help="without tensor-by-tensor")
    parser.add_argument("--engine", action="store_true", help="also a real engine")
    parser.add_argument("--engine-num-threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        options.layouts = "tp1"
    shape = shape_from_hf_config(CONFIGS[options.shape])
    rows = []
    for layout in options.layouts.split(","):
        with Ranks(RankOptions(shape, LAYOUTS[layout], device=options.device)) as ranks:
            for receivers in options.receivers.split(","):
                count, _, size = receivers.partition("x")
                sizes = [int(size or 1)] * int(count)
                ep_size = len(sizes) and (sizes[0] if shape.num_experts else 1)
                with Receivers(sizes, device=options.device, ep_size=ep_size) as engines:
                    bench = Bench(ranks, engines, shape, options.device)
                    for bucket in map(int, options.buckets.split(",")):
                        row: dict[str, Any] = {"shape": options.shape, "layout": layout, "bucket_mb": bucket}
                        row |= {"receiver": f"{receivers} dropping", "bytes": bench.num_bytes}
                        row |= measure(bench, bucket * MB, options.turns, not options.no_baseline)
                        rows.append(row)
                        print(show(row), file=sys.stderr, flush=True)
                    if options.engine and receivers == "1":
                        for bucket in map(int, options.buckets.split(",")):
                            row = {"shape": options.shape, "layout": layout, "bucket_mb": bucket}
                            row |= {"receiver": "SGLang engine", "bytes": bench.num_bytes}
                            row |= measure_engine(
                                bench, bucket * MB, options.turns, CONFIGS[options.shape], options.engine_num_threads
                            )
                            rows.append(row)
                            print(show(row), file=sys.stderr, flush=True)
    result = {"environment": environment(options.device), "turns": options.turns, "rows": rows}
    print(json.dumps(result, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
