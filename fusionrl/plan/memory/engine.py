"""Memory of an SGLang engine: its weights, the tokens that its KV cache holds, and the states of its requests.

A reward model's and a teacher's engines only read, and have devices of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusionrl.models.shape import ModelShape
from fusionrl.models.vision import VisionShape
from fusionrl.plan.devices import Machine
from fusionrl.plan.layout import passed
from fusionrl.plan.memory.activations import pass_bytes
from fusionrl.plan.placement import ScorerPlan
from fusionrl.plan.push_plan import push_tensors, torch_name

_CPU_TOKENS, _CPU_STATES = 32768, 768  # `engines.spec`: the pools on a CPU
_PREFILL_TOKENS = 16384  # SGLang's --max-prefill-tokens
_STATE_RATIO = 0.9  # SGLang's --mamba-full-memory-ratio
# Places that a request takes in the pool of states: its own, and with a prefix cache those of prefixes
# (`_calculate_mamba_ratio` of SGLang 0.5).
_PLACES_A_REQUEST = {"none": 1, "cpu": 3, "cuda": 5}
_TORCH_WIDTHS = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one device of an engine.

    weights       of the device
    kv_tokens     tokens that the KV cache holds; below 0: the weights alone do not fit
    kv_bytes      of one token on the device
    fraction      of a device's memory that weights and KV cache may take (--sglang-mem-fraction-static); None on a CPU
    state_bytes   of the state of one request on the device, apart from its tokens; 0: no layer has one
    num_states    places for states
    num_requests  requests that have states at a time
    images        what a vision tower needs for a moment; SGLang's fraction leaves room for it
    pool          the KV cache and the states
    """

    weights: float
    kv_tokens: int
    kv_bytes: float
    fraction: float | None
    state_bytes: float = 0.0
    num_states: int = 0
    num_requests: int = 0
    images: float = 0.0

    @property
    def states(self) -> float:
        return self.num_states * self.state_bytes

    @property
    def pool(self) -> float:
        return max(self.kv_tokens, 0) * self.kv_bytes + self.states

    @property
    def total(self) -> float:
        return self.weights + self.pool


def kv_bytes(shape: ModelShape, tp: int, width: int) -> float:
    """Bytes of one token in the cache on one of `tp` devices."""
    return sum(kind.cache_bytes(shape, tp, width) for kind in shape.attention)


def request_bytes(shape: ModelShape, tp: int, width: int) -> float:
    """Bytes of one request's states on one of `tp` devices."""
    return sum(kind.state_bytes(shape, tp, width) for kind in shape.attention)


def _num_states(server_args: Mapping[str, object], state: float, room: float, *, on_cpu: bool) -> tuple[int, int]:
    """(places for states in a device's memory of `room` bytes, requests that have some at a time), as SGLang does."""
    has_prefixes = not server_args.get("disable_radix_cache")
    count = passed(server_args, "max_mamba_cache_size", int)
    if count is None:
        count = _CPU_STATES if on_cpu else None if has_prefixes else passed(server_args, "max_running_requests", int)
    if count is None:
        ratio = passed(server_args, "mamba_full_memory_ratio", float) or _STATE_RATIO
        count = max(int(room * ratio / (1 + ratio) // state) - 1, 0)
    places = _PLACES_A_REQUEST["none" if not has_prefixes else "cpu" if on_cpu else "cuda"]
    return count + 1, count // places  # one is for padding


def prefill_chunk(device_memory: float, server_args: Mapping[str, object]) -> int:
    """Tokens that SGLang 0.5 reads at once; --chunked-prefill-size -1: it does not divide prompts."""
    size = passed(server_args, "chunked_prefill_size", int)
    if size is None:
        bounds = ((20, 2048), (60, 4096), (160, 8192))
        return next((size for limit, size in bounds if device_memory < limit * 2**30), 16384)
    return size if size > 0 else passed(server_args, "max_prefill_tokens", int) or _PREFILL_TOKENS


def static_fraction(device_memory: float, tp: int, chunk: int) -> float:
    """About what SGLang 0.5 takes where --mem-fraction-static is not given.

    All but 0.5 GiB, 1.5 MiB for each token of a prefill chunk (at least 2,048), 1/8 GiB for each device of the engine,
    and 1 GiB for graphs; on a device of more than 60 GiB all but at least 10 GiB.
    """
    mebibytes = device_memory / 2**20
    reserved = 512 + 1.5 * max(chunk, 2048) + tp / 8 * 1024 + 1024
    if mebibytes > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return max(round(1 - reserved / mebibytes, 3), 0.1)


def seeing_fraction(vision: VisionShape) -> float:
    """Part of `static_fraction` that SGLang 0.5 takes with a vision tower of this size, where it finds its layers."""
    complexity = (vision.num_layers if vision.engine_counts_layers else 24) / 24 * (vision.hidden_size / 1024) ** 2
    return 0.95 * min(max(1.1 - 0.1 * complexity, 0.8), 1.05)


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
    on_cpu        the engine's pool has a fixed number of tokens there
    resident      bytes of others on the device; SGLang leaves them out of its fraction
    """
    kind, width = str(server_args.get("kv_cache_dtype", "auto")), _TORCH_WIDTHS[dtype]
    token, state = kv_bytes(shape, tp, _TORCH_WIDTHS.get(kind, width)), request_bytes(shape, tp, width)
    weights, limit, images = weight_bytes / tp, passed(server_args, "max_total_tokens", int), 0.0
    if (vision := shape.vision) is not None:
        whole = vision.num_weights() if server_args.get("mm_enable_dp_encoder") else vision.num_whole_weights()
        weights += whole * width * (1 - 1 / tp)
    if on_cpu:
        states = _num_states(server_args, state, 0.0, on_cpu=True) if state else (0, 0)
        return EngineMemory(weights, limit or _CPU_TOKENS, token, None, state, *states)
    if device_memory is None:
        return None
    chunk, fraction = prefill_chunk(device_memory, server_args), passed(server_args, "mem_fraction_static", float)
    if fraction is None or not fraction:
        fraction = static_fraction(device_memory, tp, chunk) * (seeing_fraction(vision) if vision else 1.0)
    if vision is not None:
        images = chunk * vision.out_hidden_size * (1 + len(vision.deepstack)) * width  # features of one prefill chunk
        images += pass_bytes(vision, chunk * vision.merge**2, width)
    room = fraction * device_memory - resident - weights
    states = _num_states(server_args, state, room, on_cpu=False) if state else (0, 0)
    tokens = int((room - states[0] * state) // (token or 1.0))
    return EngineMemory(weights, min(tokens, limit) if limit else tokens, token, fraction, state, *states, images)


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
