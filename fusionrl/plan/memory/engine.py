"""Memory of an SGLang engine: its weights, and the tokens that its KV cache holds.

A reward model's and a teacher's engines only read, and have devices of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusionrl.models.shape import ModelShape
from fusionrl.plan.devices import Machine
from fusionrl.plan.layout import passed
from fusionrl.plan.push import push_tensors, torch_name
from fusionrl.plan.scorers import ScorerPlan

_CPU_TOKENS = 32768  # `engines.spec`: the KV pool on a CPU
_TORCH_WIDTHS = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one device of an engine.

    weights    of the device
    kv_tokens  tokens that the KV cache holds; below 0: the weights alone do not fit
    kv_bytes   of one token on the device
    pool       the KV cache
    fraction   of a device's memory that weights and KV cache may take (--sglang-mem-fraction-static); None on a CPU
    """

    weights: float
    kv_tokens: int
    kv_bytes: float
    fraction: float | None

    @property
    def pool(self) -> float:
        return max(self.kv_tokens, 0) * self.kv_bytes

    @property
    def total(self) -> float:
        return self.weights + self.pool


def kv_bytes(shape: ModelShape, tp: int, width: int) -> float:
    """Bytes of one token's keys and values on one of `tp` devices; latent attention's stand whole on each of them."""
    if shape.mla is not None:
        return float(shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim) * width)
    return float(2 * shape.num_layers * max(-(-shape.num_query_groups // tp), 1) * shape.head_dim * width)


def static_fraction(device_memory: float, tp: int) -> float:
    """About what SGLang 0.5 takes where --mem-fraction-static is not given.

    All but 0.5 GiB, 1.5 MiB for each token of a prefill chunk, 1/8 GiB for each device of the engine, and 1 GiB for
    graphs; on a device of more than 60 GiB all but at least 10 GiB.
    """
    mebibytes = device_memory / 2**20
    bounds = ((20, 2048), (60, 4096), (160, 8192))
    chunk = next((size for limit, size in bounds if mebibytes < limit * 1024), 16384)
    reserved = 512 + 1.5 * chunk + tp / 8 * 1024 + 1024
    if mebibytes > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return max(round(1 - reserved / mebibytes, 3), 0.1)


def engine_memory(
    shape: ModelShape,
    weight_bytes: float,
    tp: int,
    dtype: str,
    server_args: Mapping[str, object],
    *,
    device_memory: float | None,
    on_cpu: bool,
    resident: float = 0.0,
) -> EngineMemory | None:
    """One device of an engine of `tp` devices; None: the device's memory is not known.

    weight_bytes  of all weights of the model, as engines hold them
    dtype         "fp32" or "bf16"
    on_cpu        the engine's pool has a fixed number of tokens there
    resident      bytes of others on the device; SGLang leaves them out of its fraction
    """
    kind = str(server_args.get("kv_cache_dtype", "auto"))
    token = kv_bytes(shape, tp, _TORCH_WIDTHS.get(kind, _TORCH_WIDTHS[dtype]))
    weights, limit = weight_bytes / tp, passed(server_args, "max_total_tokens", int)
    if on_cpu:
        return EngineMemory(weights, limit or _CPU_TOKENS, token, None)
    if device_memory is None:
        return None
    fraction = passed(server_args, "mem_fraction_static", float) or static_fraction(device_memory, tp)
    room = int((fraction * device_memory - resident - weights) // token)
    return EngineMemory(weights, min(room, limit) if limit else room, token, fraction)


def scorer_memory(
    scorer: ScorerPlan, dtype: Literal["fp32", "bf16"], machine: Machine | None, *, on_cpu: bool
) -> EngineMemory | None:
    """One device of the engines of a reward model or a teacher; None: not estimated. `dtype` is that of all engines."""
    if scorer.shape is None:
        return None
    tensors = push_tensors(scorer.shape, lambda _: 0, torch_name(dtype), scorer.quantization)
    return engine_memory(
        scorer.shape,
        float(sum(tensor.sent_bytes for tensor in tensors)),
        scorer.size,
        dtype,
        scorer.server_args,
        device_memory=machine.device_memory if machine is not None else None,
        on_cpu=on_cpu,
    )
