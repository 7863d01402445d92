"""Devices of engines, the policy's and those that only read (a reward model's, a teacher's); what devices cannot do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fusionrl.base.cpu_wing import ATTENTION_BACKEND
from fusionrl.base.wording import dividing
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import FLAG, engine_groups, eval_group, serving_groups
from fusionrl.config.run_parts import asks_for_routing, uses_engines, uses_trainers
from fusionrl.models.quantization import BlockFp8, read_described
from fusionrl.models.shape import ModelShape
from fusionrl.plan.trainer_plan import layer_impl

Bundles = tuple[tuple[int, ...], ...]
SIZE_FLAG = "--rollout-num-gpus-per-engine"


def place_one_by_one(
    sizes: Sequence[int], first: int, per_node: int, size_flag: str = SIZE_FLAG, *, may_skip: bool = False
) -> Bundles:
    """Return the devices, from `first` on, of engines of these sizes: one after the other.

    An engine larger than a node of `per_node` devices begins where a node does, and must take whole nodes. `may_skip`:
    leave devices idle, where one that fits on a node would span two.
    """
    bundles = []
    for size in sizes:
        check_engine_size(size_flag, size, per_node)
        left = -first % per_node
        if size > per_node or (may_skip and 0 < left < size):
            first += left
        bundles.append(tuple(range(first, first + size)))
        first += size
    return tuple(bundles)


def place_evaluation(config: Config, first: int) -> Bundles:
    """Return the devices, from `first` on, of the engines that evaluate and do nothing else (--eval-num-gpus)."""
    cluster, flag = config.cluster, SIZE_FLAG
    count, size, group = config.eval.eval_num_gpus, cluster.rollout_num_gpus_per_engine, eval_group(config)
    if group is not None:
        size, flag = group.per_engine, f"{FLAG} {group.name}: per_engine"
        if count != group.num_gpus:
            raise ValueError(f"--eval-num-gpus {count}: {FLAG} {group.name} has {group.num_gpus} devices; leave it out")
    return place_engines("--eval-num-gpus", flag, count, size, first, cluster.num_gpus_per_node)


def engine_sizes(config: Config) -> list[int]:
    """Return the devices of each of the policy's engines."""
    cluster = config.cluster
    if not uses_engines(config):
        return []
    count = cluster.rollout_num_gpus or 1
    if cluster.rollout_num_gpus is None and cluster.colocate and uses_trainers(config):
        count = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if groups := serving_groups(config):
        total = sum(group.num_gpus for group in groups)
        if count != total:
            raise ValueError(f"--rollout-num-gpus {count}: the groups of {FLAG} have {total} devices; leave it out")
        return [group.per_engine for group in groups for _ in range(group.num_engines)]
    return _equal_sizes("--rollout-num-gpus", SIZE_FLAG, count, cluster.rollout_num_gpus_per_engine)


def _equal_sizes(flag: str, size_flag: str, count: int, size: int) -> list[int]:
    if count % size:
        raise ValueError(f"{flag} {count} is not a multiple of {size_flag} {size}; {dividing(count, size)}")
    return [size] * (count // size)


def check_engine_size(size_flag: str, size: int, per_node: int) -> None:
    """Check that an engine larger than a node takes whole nodes: SGLang wants as many ranks on each."""
    if size > per_node and size % per_node:
        below, above = size // per_node * per_node, -(-size // per_node) * per_node
        raise ValueError(
            f"{size_flag} {size}: an engine over several nodes takes whole ones, of --num-gpus-per-node {per_node}"
            f" devices; take {below} or {above}"
        )


def place_engines(flag: str, size_flag: str, count: int, size: int, first: int, per_node: int) -> Bundles:
    """Return the devices of each engine, from `first` on: `count` devices (of `flag`), `size` an engine.

    None of them spans two nodes of `per_node` devices if it fits on one.
    """
    return place_one_by_one(_equal_sizes(flag, size_flag, count, size), first, per_node, size_flag, may_skip=True)


ScorerRole = Literal["reward-model", "teacher"]


@dataclass(frozen=True)
class ScorerPlan:
    """Engines that only read, and whose weights stay as they are: a reward model's or a teacher's.

    bundles       engine → its bundles
    server_args   the user's fields of ServerArgs
    shape         of its model; None: its config.json is not here, or is one of a family that only SGLang knows
    quantization  that its config.json describes
    unknown       the reason why the shape is unknown
    """

    role: ScorerRole
    model_path: str
    bundles: tuple[tuple[int, ...], ...]
    server_args: dict[str, object] = field(default_factory=dict)
    shape: ModelShape | None = None
    quantization: BlockFp8 | None = None
    unknown: str = ""

    @property
    def size(self) -> int:
        """Devices of one engine (its tensor parallel size)."""
        return len(self.bundles[0])

    @property
    def name(self) -> str:
        return self.role.replace("-", " ")


def plan_scorers(config: Config, first: int) -> tuple[ScorerPlan, ...]:
    """The engines that only read, on devices from `first` on."""
    if not uses_engines(config):
        return ()
    reward, algorithm, per_node = config.reward, config.algorithm, config.cluster.num_gpus_per_node
    requests: list[tuple[ScorerRole, str, str, int, int, dict[str, object]]] = []
    if reward.rm_model is not None:
        sizes = (reward.rm_num_gpus, reward.rm_num_gpus_per_engine)
        requests.append(("reward-model", "--rm", reward.rm_model, *sizes, reward.rm_server_args))
    if algorithm.use_opd and algorithm.opd_type == "sglang" and algorithm.opd_teacher_load is not None:
        sizes = (algorithm.opd_teacher_num_gpus, algorithm.opd_teacher_num_gpus_per_engine)
        path = algorithm.opd_teacher_load
        requests.append(("teacher", "--opd-teacher", path, *sizes, algorithm.opd_teacher_server_args))
    scorers = []
    for role, prefix, path, count, size, server_args in requests:
        bundles = place_engines(f"{prefix}-num-gpus", f"{prefix}-num-gpus-per-engine", count, size, first, per_node)
        first = 1 + bundles[-1][-1]
        scorers.append(ScorerPlan(role, path, bundles, server_args, *_model_of(role, path)))
    return tuple(scorers)


def _model_of(role: ScorerRole, path: str) -> tuple[ModelShape | None, BlockFp8 | None, str]:
    """Shape and quantisation of the model, or the reason why they are not known."""
    flag = "--rm-model" if role == "reward-model" else "--opd-teacher-load"
    try:
        shape, quantization = read_described(path, flag)
    except ValueError as error:  # what a run cannot do with is refused elsewhere: SGLang knows more families
        return None, None, str(error)
    # A classifier has a score in place of the output layer, as a critic has.
    return shape.with_value_head() if role == "reward-model" else shape, quantization, ""


FP32_ATTENTION = ("torch_native", "triton", "flex_attention")
"""SGLang's attention on GPUs that takes fp32; FlashAttention and its like are compiled for 16 bits and less."""
CPU_DRAFTERS = ("NGRAM",)
"""Values of --sglang-speculative-algorithm with which an engine runs on a CPU (`cpu/speculation.py`)."""
_ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_device(
    config: Config,
    shape: ModelShape,
    device: Literal["cpu", "cuda"],
    precision: str,
    rollout_dtype: str,
    quantization: BlockFp8 | None,
) -> None:
    """Refuse, by its flag, what the device cannot do."""
    if device == "cpu" and config.passthrough.optimizer.get("optimizer_cpu_offload"):
        raise ValueError("--optimizer-cpu-offload: there is no GPU memory to save on a CPU; leave the flag out")
    if device == "cpu" and asks_for_routing(config):
        raise ValueError(
            "--use-rollout-routing-replay: SGLang records which experts it chose on a GPU alone; set"
            " rollout_routed_experts in --custom-generate-function-path, or take --use-routing-replay"
        )
    if device == "cuda" and precision == "fp32" and config.model.transformer_impl == "transformer_engine":
        raise ValueError(
            "--transformer-impl transformer_engine with --precision fp32: no attention of Transformer Engine takes"
            " packed sequences in fp32; use --transformer-impl local or auto, or --precision bf16"
        )
    groups = engine_groups(config)
    if asks_for_routing(config) and any(group.role == "prefill" for group in groups):
        raise ValueError(
            "--use-rollout-routing-replay with --engine-group role=prefill: the router, which makes the pairs, drops"
            " the request for the experts; give groups with role=generate, or take --use-routing-replay"
        )
    if device == "cpu" and (parted := next((group for group in groups if group.role in ("prefill", "decode")), None)):
        raise ValueError(
            f"--engine-group {parted.name}: role={parted.role} on a CPU: SGLang moves keys and values between engines"
            " from GPU to GPU alone; give groups with role=generate"
        )
    engine_fields = config.passthrough.sglang
    for name, args in [("", engine_fields), *((group.name, group.server_args) for group in groups)]:
        prefix = f"--engine-group {name}: " if name else "--sglang-"
        if device == "cuda":
            _check_attention(args, prefix, rollout_dtype, config)
        elif uses_engines(config):
            _check_speculation(engine_fields | args, prefix, shape)
    if quantization is not None and uses_engines(config) and (device == "cpu" or rollout_dtype == "fp32"):
        raise ValueError(
            f"--hf-checkpoint {config.model.hf_checkpoint}: its weights are in fp8, with which SGLang computes on a GPU"
            f" alone, and in bf16; this would be on {device} with --rollout-dtype {rollout_dtype}: change these, or"
            " give the bf16 checkpoint"
        )


def check_fused_layers(
    config: Config, shape: ModelShape, device: Literal["cpu", "cuda"], precision: str, version: str | None
) -> None:
    """Refuse attention that Transformer Engine of this `version` (None: not installed) cannot do."""
    impl = layer_impl(config.model.transformer_impl, device, version is not None, precision)
    if device == "cpu" or impl == "local" or version is None:
        return
    major, minor = map(int, version.split(".")[:2])
    for kind in dict.fromkeys(shape.attention):
        if (major, minor) < kind.fused_since:
            raise ValueError(
                f"--transformer-impl {config.model.transformer_impl}: Transformer Engine {version} has no attention of"
                f" the kind {kind.kind} of {shape.model_type}, version {'.'.join(map(str, kind.fused_since))} has;"
                " use --transformer-impl local"
            )


def drafts_by_itself(config: Config) -> bool:
    """Return whether engines speculate with the model's own layers of multi-token prediction."""
    common = config.passthrough.sglang
    settings = [common, *(common | group.server_args for group in engine_groups(config))]
    return any(
        args.get("speculative_algorithm") in ("EAGLE", "NEXTN") and not args.get("speculative_draft_model_path")
        for args in settings
    )


def _check_attention(args: Mapping[str, object], prefix: str, rollout_dtype: str, config: Config) -> None:
    """Refuse attention that engines on a GPU cannot have; `args` are SGLang's fields."""
    if ATTENTION_BACKEND in map(args.get, _ATTENTION_FIELDS):
        raise ValueError(f"{prefix}attention-backend {ATTENTION_BACKEND}: it is for engines on a CPU; leave it out")
    if rollout_dtype != "fp32" or not uses_engines(config):
        return
    for name in _ATTENTION_FIELDS:
        backend = args.get(name)
        if backend is not None and backend not in FP32_ATTENTION:
            raise ValueError(
                f"{prefix}{name.replace('_', '-')} {backend}: the engines are in fp32, which on a GPU only"
                f" {', '.join(FP32_ATTENTION)} take; leave it out, or use --rollout-dtype bf16"
            )


def _check_speculation(args: Mapping[str, object], prefix: str, shape: ModelShape) -> None:
    """Refuse drafts that engines on a CPU cannot have; `args` are all SGLang fields of an engine."""
    drafter = args.get("speculative_algorithm")
    if drafter is None:
        return
    if drafter not in CPU_DRAFTERS:
        raise ValueError(
            f"{prefix}speculative-algorithm {drafter}: SGLang's engines on a CPU lack the kernels of a draft model;"
            f" use {' or '.join(CPU_DRAFTERS)}, or leave it out"
        )
    if reason := next((kind.refuses_drafts for kind in shape.attention if kind.refuses_drafts), ""):
        raise ValueError(f"{prefix}speculative-algorithm {drafter}: on a CPU {reason}; leave it out")
    backends = [str(name) for name in map(args.get, _ATTENTION_FIELDS) if name is not None]
    if set(backends) - {ATTENTION_BACKEND}:
        raise ValueError(
            f"{prefix}speculative-algorithm {drafter} with --sglang-attention-backend {backends[0]}: on a CPU only"
            f" {ATTENTION_BACKEND} attends to drafts; leave the attention backend out"
        )


def check_placement(config: Config, device: Literal["cpu", "cuda"]) -> None:
    """On GPUs, engines that share the trainers' devices get the weights by IPC or files, and others never by IPC.

    Else NCCL would meet itself on a device, or an engine would have no trainer on it.
    """
    cluster, transport = config.cluster, config.weights.update_weight_transport
    if device == "cpu" or not (uses_trainers(config) and uses_engines(config)):
        return
    world_size = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if cluster.colocate and transport == "broadcast":
        raise ValueError(
            "--update-weight-transport broadcast with --colocate: NCCL takes no two ranks on one GPU; use ipc or auto"
        )
    if cluster.colocate and (cluster.rollout_num_gpus or world_size) > world_size:
        raise ValueError(
            f"--rollout-num-gpus {cluster.rollout_num_gpus} with --colocate: only {world_size} devices have a trainer"
            " to share; raise --actor-num-gpus-per-node or leave --colocate out"
        )
    if not cluster.colocate and transport == "ipc":
        raise ValueError(
            "--update-weight-transport ipc: on GPUs an engine maps the memory of the trainer on its own GPU, and these"
            " have none; use broadcast or auto, or --colocate"
        )
