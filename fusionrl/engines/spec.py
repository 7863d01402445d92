"""The specification of one SGLang engine: command line and environment."""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fusionrl.base.cpu_wing import ATTENTION_BACKEND, PROCESSOR_VARIABLE
from fusionrl.base.environment import MKL_MODE, child_environment, deterministic_settings
from fusionrl.base.sockets import collective_interfaces
from fusionrl.engines import ADAPTERS_VARIABLE, BITWISE_VARIABLE, DEVICE_VARIABLE, NODES_VARIABLE
from fusionrl.engines.images import ImageSettings
from fusionrl.models.engine_config import engine_fields, read_scorer
from fusionrl.models.hf_folder import text_config

_RESERVED_TOKENS = 7  # of SGLang 0.5: an input of context_length - 6 tokens is refused

LOADER = "fusionrl.engines.weight_payload.load"
"""Load format of a payload that `fusionrl.engines.weight_payload` takes apart; engines on a CPU are started with it."""

# These back ends need no GPU kernel (`cpu/sglang_patches.py` registers the attention); without sleep_on_idle an idle
# scheduler burns a core. The server's warm-up waits a second before it begins, and `EngineActor.start` generates a
# token anyway. A KV pool sized from free memory would take most of a machine that trainers share; it bounds how many
# requests run, too, so the number of them need not be small.
_CPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": ATTENTION_BACKEND,
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "max_total_tokens": 32768,
    "max_running_requests": 256,
    "max_mamba_cache_size": 768,  # states of delta nets: with a prefix cache SGLang counts on three a request
    "skip_server_warmup": True,
    "disable_hybrid_swa_memory": True,  # the backend has no cache of its own for layers with a window
}
# In fp32, on a GPU: what SGLang chooses by itself (FlashAttention 3 on Hopper, FlashInfer elsewhere) takes 16 bits at
# most, and so do its fused norms and rotary embeddings, in whose place torch's own come (`server_environment`).
_FP32_GPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
}
_DEFAULTS: dict[str, Any] = {
    "weight_version": "0",  # the spans of an answer then hold numbers from the first request on
    "log_level_http": "warning",  # one line a request otherwise
}


@dataclass(frozen=True)
class EngineSpec:
    """One engine, or its part on one of several nodes: what it serves, on which devices, and how it is reached."""

    index: int
    model_path: str
    device: str  # "cpu" or "cuda"
    dtype: str  # "float32" or "bfloat16"
    tp_size: int
    # Devices as this process numbers them, one a tensor-parallel rank here, evenly spaced; ignored on a CPU.
    gpu_ids: tuple[int, ...]
    host: str  # address to bind; the one by which other nodes reach this engine
    api_key: str | None = field(repr=False)
    log_dir: str
    seed: int
    start_timeout_s: float = 300.0
    num_threads: int = 1  # OpenMP threads a scheduler on a CPU
    # The user's values of ServerArgs fields, but for those that fusionrl sets (`upstream_flags.SGLANG_OWNED`).
    server_args: dict[str, Any] = field(default_factory=dict)
    images: ImageSettings | None = None  # None: it is asked about text alone
    adapters: tuple[str, ...] = ()  # names of the adapters that are pushed to it by themselves
    wrapper: tuple[str, ...] = ()  # the beginning of the server's command line: a profiler's, under which it runs
    # Part of the log's name. A reward model classifies and a teacher reads: only an engine generates.
    role: Literal["engine", "reward-model", "teacher"] = "engine"
    bitwise: bool = False
    num_nodes: int = 1  # that it spans, each with as many of its ranks
    node_rank: int = 0  # this part's place among them; part 0 serves, and the others only compute

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}" + (f" part {self.node_rank}" if self.node_rank else "")

    @property
    def log_name(self) -> str:
        return f"{self.role}-{self.index}" + (f"-part-{self.node_rank}" if self.node_rank else "") + ".log"

    @property
    def meets_decoders(self) -> bool:
        """Return whether engines that decode meet it at a port of its own, to take keys and values over."""
        return self.server_args.get("disaggregation_mode") == "prefill"

    @property
    def ranks_here(self) -> int:
        """Return the tensor-parallel ranks on this node."""
        return self.tp_size // self.num_nodes

    def __post_init__(self) -> None:
        if self.tp_size % self.num_nodes:
            raise ValueError(f"{self.name}: tp_size={self.tp_size} is not a multiple of {self.num_nodes} nodes")
        if self.device == "cuda":
            steps = {b - a for a, b in zip(self.gpu_ids, self.gpu_ids[1:], strict=False)}
            if len(self.gpu_ids) != self.ranks_here or len(steps) > 1 or (steps and min(steps) < 1):
                raise ValueError(
                    f"gpu_ids={self.gpu_ids} of {self.name}: SGLang takes {self.ranks_here} devices on this node"
                    f" (tp_size={self.tp_size}), ascending and evenly spaced"
                )


def server_command(
    spec: EngineSpec, port: int, nccl_port: int, meeting: str | None = None, bootstrap_port: int | None = None
) -> list[str]:
    """Command that serves `spec` on `port`; `nccl_port` is the rendezvous of its tensor-parallel ranks.

    meeting         of an engine over several nodes: where their ranks meet, host:port of part 0's node
    bootstrap_port  of an engine that prefills: where engines that decode meet it
    """
    assert (spec.num_nodes > 1) == (meeting is not None), "an engine meets at an address if it spans nodes"
    spanning = {"nnodes": spec.num_nodes, "node_rank": spec.node_rank, "dist_init_addr": meeting}
    arguments: dict[str, Any] = {
        **_DEFAULTS,
        **(_CPU_DEFAULTS if spec.device == "cpu" else _FP32_GPU_DEFAULTS if spec.dtype == "float32" else {}),
        **({} if spec.role == "engine" else {"context_length": _reading_length(spec.model_path)}),
        **({} if spec.images is None else spec.images.arguments(spec.device)),
        **spec.server_args,
        "model_path": os.path.abspath(spec.model_path) if os.path.isdir(spec.model_path) else spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        "tp_size": spec.tp_size,
        "host": spec.host,
        "port": port,
        "nccl_port": nccl_port,
        "random_seed": spec.seed,
        "disaggregation_bootstrap_port": bootstrap_port,
        **(spanning if meeting is not None else {}),
    }
    if fields := engine_fields(spec.model_path, sees=spec.images is not None):
        own = json.loads(arguments.get("json_model_override_args") or "{}")
        arguments["json_model_override_args"] = fields | own
    if spec.device == "cpu" and spec.role == "engine":
        arguments["custom_weight_loader"] = [*(arguments.get("custom_weight_loader") or ()), LOADER]
    if spec.device == "cuda":
        first, *rest = spec.gpu_ids
        arguments["base_gpu_id"] = first
        arguments["gpu_id_step"] = rest[0] - first if rest else 1
    return [*spec.wrapper, sys.executable, "-m", "fusionrl.engines.launch_server", *to_flags(arguments)]


def to_flags(arguments: Mapping[str, object]) -> list[str]:
    """Command-line form of upstream field values: `{"a_b": 1, "c": True, "d": None}` → `--a-b 1 --c`.

    True is a bare flag, False and None leave the flag out, a list is several values; a dict, and a list that has one,
    is JSON.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        is_listed = isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value)
        if isinstance(value, dict) or is_listed:
            flags.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            flags.extend(str(item) for item in value)
        elif value is not True:
            flags.append(str(value))
    return flags


def server_environment(spec: EngineSpec) -> dict[str, str]:
    """Environment of the server: this process's without secrets, what `spec` decides, and the defaults of a CPU run.

    It keeps this process's CUDA_VISIBLE_DEVICES, by which `spec.gpu_ids` are counted.
    """
    env = package_environment("engine")
    env[DEVICE_VARIABLE] = spec.device
    if spec.bitwise:
        env |= deterministic_settings(spec.device) | ({BITWISE_VARIABLE: "1"} if spec.device == "cpu" else {})
    if spec.adapters:
        env[ADAPTERS_VARIABLE] = ",".join(spec.adapters)
    # A health check that generates a token fails by design while generation is paused or memory released;
    # the router would take the engine out.
    env.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")
    # The server closes a connection that was idle for 5 s, which is when the router, after a training step, sends
    # the next rollout's requests over it: hundreds of resets at once.
    env.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", str(24 * 3600))
    env.setdefault("SGLANG_LOG_MS", "1")  # milliseconds in the log, from which the timeline has the engine's load
    env.setdefault("SGLANG_MAMBA_CONV_DTYPE", spec.dtype)  # else bf16, whatever the model's type
    env |= collective_interfaces(spec.host, env)
    if spec.num_nodes > 1:
        env[NODES_VARIABLE] = str(spec.num_nodes)
    if spec.role != "engine":
        env.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # see `_reading_length`
    if spec.images is not None:
        env |= spec.images.environment()
    if os.path.isdir(spec.model_path):
        env["HF_HUB_OFFLINE"] = "1"
    if spec.device == "cuda" and spec.dtype == "float32":
        env.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
    if spec.device == "cpu":
        env["OMP_NUM_THREADS"] = str(spec.num_threads)
        env.setdefault(*MKL_MODE)
        env["TORCHDYNAMO_DISABLE"] = "1"
        # Large tensors in large pages: a push is received into new memory, which the kernel maps page by page.
        env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if spec.tp_size > 1:
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _thread_binding(spec))
        _skip_others(env, spec.model_path, spec.images is not None)
    return env


def package_environment(purpose: str) -> dict[str, str]:
    """Environment of a child of this `purpose`, in which this package can be imported."""
    env = child_environment(purpose)
    package_root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, env.get("PYTHONPATH"))))
    return env


def _reading_length(model_path: str) -> int | None:
    """A context length by which a model may read as many tokens as it has positions; None: SGLang's own.

    SGLang keeps the last places of the context for tokens to be generated, and refuses an input that reaches into
    them: the last tokens of the policy's longest samples, where both models have as many positions.
    """
    longest = read_scorer(model_path, "model").max_positions
    return None if longest is None else longest + _RESERVED_TOKENS


def _thread_binding(spec: EngineSpec) -> str:
    """`cores|cores|...`, one group of `num_threads` cores a rank here; engines and ranks go round the cores."""
    cores = sorted(os.sched_getaffinity(0))
    start = (spec.index * spec.tp_size + spec.node_rank * spec.ranks_here) * spec.num_threads
    groups = []
    for rank in range(spec.ranks_here):
        places = range(start + rank * spec.num_threads, start + (rank + 1) * spec.num_threads)
        groups.append(",".join(str(core) for core in sorted({cores[i % len(cores)] for i in places})))
    return "|".join(groups)


def _skip_others(env: dict[str, str], model_path: str, sees: bool) -> None:
    """Tell SGLang not to import the files of models and processors that do not serve this checkpoint's architecture.

    A scheduler otherwise imports all of its 250 model files, 1.4 s of a start of 10 s, and of a model that sees those
    of 55 processors. Files that the wanted one imports are not affected. Where no file defines and serves it, those
    that name it are wanted. Left alone where the user set the variable or the architecture is unknown.
    """
    config = Path(model_path, "config.json")
    package = importlib.util.find_spec("sglang")
    if not config.is_file() or package is None or package.origin is None:
        return
    whole = json.loads(config.read_text())
    raw = whole if sees else {**text_config(whole), **engine_fields(model_path)}
    names = "|".join(re.escape(name) for name in raw.get("architectures") or []) or "$."
    folder = Path(package.origin).parent / "srt"
    if "SGLANG_DISABLED_MODEL_ARCHS" not in env:
        texts = _texts(folder / "models")
        serves = re.compile(rf"^class (?:{names})\b.*^EntryClass\b.*\b(?:{names})\b", re.MULTILINE | re.DOTALL)
        needed = {stem for stem, text in texts.items() if re.search(names, text)}
        needed = {stem for stem in needed if serves.search(texts[stem])} or needed
        if needed:
            others = texts.keys() - needed - {"registry", "transformers"}
            env["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(others))
    if "vision_config" in whole:
        processes = re.compile(rf"^    models = \[[^\]]*\b(?:{names})\b", re.MULTILINE)
        for stem, text in _texts(folder / "multimodal" / "processors").items():
            if processes.search(text):
                env[PROCESSOR_VARIABLE] = stem


def _texts(package: Path) -> dict[str, str]:
    """The modules of a package by their names."""
    files = (file for file in sorted(package.glob("*.py")) if file.stem != "__init__")
    return {file.stem: file.read_text(errors="replace") for file in files}
