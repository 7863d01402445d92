"""`Plan`: config → devices, placement, parallel groups, batch arithmetic, memory. What --dry-run prints."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from fusionrl.algorithms.estimators import Role
from fusionrl.base.wording import attempt, dividing
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import EngineGroup, engine_groups
from fusionrl.config.pipeline import knobs_of
from fusionrl.config.run_parts import is_streamed, uses_trainers
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.balance import Balance, BatchPlan, plan_batches
from fusionrl.plan.costs import SequenceCost
from fusionrl.plan.devices import Machine
from fusionrl.plan.hook_args import slime_args
from fusionrl.plan.layout import TrainerLayout, model_errors, mtp_errors, sequence_multiple, stage_layers
from fusionrl.plan.memory.advice import least_change
from fusionrl.plan.memory.report import MemoryReport, memory_report
from fusionrl.plan.memory.states import stage_parameters
from fusionrl.plan.placement import (
    ScorerPlan,
    check_device,
    check_placement,
    drafts_by_itself,
    engine_sizes,
    place_evaluation,
    place_one_by_one,
    plan_scorers,
)
from fusionrl.plan.push_plan import push_tensors, torch_name
from fusionrl.plan.trained_parts import (
    AdapterPush,
    adapter_push,
    adapters_of,
    frozen_of,
    image_cost,
    max_image_tokens,
    vision_errors,
)
from fusionrl.plan.trainer_plan import (
    AuxiliaryPlan,
    TrainerPlan,
    auxiliary_config,
    auxiliary_role,
    layer_impl,
    precision_or,
    trainer_precision,
    trainer_threads,
)


@dataclass(frozen=True)
class Plan:
    """Everything derived from the configuration. Bundles are devices, numbered by node and then by device."""

    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    rollout_dtype: Literal["fp32", "bf16"]
    shape: ModelShape
    layout: TrainerLayout | None  # None: the run has no trainers
    auxiliary: AuxiliaryPlan | None  # the critic, or the process reward model
    num_engines: int
    engine_size: int  # of the smallest, where --engine-group has several sizes
    num_bundles: int
    trainer_bundles: tuple[int, ...]  # rank → bundle
    engine_bundles: tuple[tuple[int, ...], ...]  # engine → its bundles
    scorers: tuple[ScorerPlan, ...]
    transport: Literal["broadcast", "ipc", "disk"] | None
    batch: BatchPlan | None
    balance: Balance | None
    num_rollout: int
    train_num_threads: int
    eval_bundles: tuple[tuple[int, ...], ...] = ()  # the same of engines that evaluate alone, numbered after the others
    groups: tuple[EngineGroup, ...] = ()  # of --engine-group, in the order of their engines
    quantization: BlockFp8 | None = None  # of the engines' weights
    lora_push: AdapterPush | None = None  # None: no engine gets adapters
    drafts: bool = False  # engines speculate with the model's layers of multi-token prediction
    memory: MemoryReport | None = None
    sandbox: str | None = None  # the kind that this machine gives to programs of the model; None: the run has none
    engines_give_memory: bool = False  # while the trainers work
    trainers_give_memory: bool = False  # while the engines generate
    knobs: Knobs | None = None  # of the controller; None: one rollout after the other
    answers: dict[str, object] = field(default_factory=dict)  # for hooks: flags that were left open, by their names

    @property
    def num_optimizer_steps(self) -> int:
        return self.num_rollout * self.batch.num_steps if self.batch else 0

    def trainer_plan(self, role: Role | None = None) -> TrainerPlan:
        """Return what the trainers of a role follow; None is the policy's. The run must have such trainers."""
        group = self if role is None else self.auxiliary
        assert group is not None and group.layout is not None, f"the run has no trainers of the role {role}"
        steps, threads = self.num_optimizer_steps or None, self.train_num_threads
        return TrainerPlan(group.layout, self.device, self.precision, threads, steps, self.answers, self.knobs)

    @property
    def pushed_shape(self) -> ModelShape:
        """The part of the model that engines get: with layers of multi-token prediction where they draft with them."""
        return self.shape if self.drafts else self.shape.trunk

    @property
    def push_bytes(self) -> int:
        """Bytes that a weight push brings to each engine."""
        tensors = push_tensors(self.pushed_shape, lambda _: 0, torch_name(self.rollout_dtype), self.quantization)
        return sum(tensor.sent_bytes for tensor in tensors)

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def all_engine_bundles(self) -> tuple[tuple[int, ...], ...]:
        """The bundles of every engine that serves the policy, by its number: to generate, and to evaluate alone."""
        return self.engine_bundles + self.eval_bundles

    def bundles_of(self, role: Literal["engine", "reward-model", "teacher"], index: int) -> tuple[int, ...]:
        """The bundles of one engine of a role."""
        if role == "engine":
            return self.all_engine_bundles[index]
        return next(scorer.bundles[index] for scorer in self.scorers if scorer.role == role)

    @property
    def has_pairs(self) -> bool:
        """Return whether the router sends each request to a pair of engines: one prefills, the other decodes."""
        return any(group.role == "prefill" for group in self.groups)

    def group_of(self, engine: int) -> EngineGroup | None:
        """Return the group of an engine, by its number; None: it has the run's --sglang-* alone."""
        if engine >= self.num_engines:
            return next((group for group in self.groups if group.role == "eval"), None)
        serving = (group for group in self.groups if group.role != "eval" for _ in range(group.num_engines))
        return next(itertools.islice(serving, engine, None), None)

    @property
    def is_colocated(self) -> bool:
        return any(bundle in self.trainer_bundles for bundles in self.engine_bundles for bundle in bundles)

    @property
    def takes_turns(self) -> bool:
        """Return whether engines and trainers take turns on shared GPUs."""
        return self.device == "cuda" and self.is_colocated

    @property
    def start_order(self) -> Literal["together", "engines first", "trainers first"]:
        """Return who starts before whom on the devices.

        Engines that give their memory away start first, on empty devices. Engines that keep it start last, so that they
        find what the trainers leave to them.
        """
        if not self.takes_turns:
            return "together"
        return "engines first" if self.engines_give_memory else "trainers first"

    @property
    def shares_with_auxiliary(self) -> bool:
        """Return whether the actor shares a device with the critic, or with the process reward model."""
        return self.auxiliary is not None and bool(set(self.auxiliary.bundles) & set(self.trainer_bundles))


def make_plan(
    config: Config,
    shape: ModelShape,
    *,
    device: Literal["cpu", "cuda"],
    num_prompts: int,
    num_cores: int = 1,
    quantization: BlockFp8 | None = None,
    machine: Machine | None = None,
    sandbox: str | None = None,
) -> Plan:
    """Work out the plan, and estimate its memory.

    num_prompts   rows of the prompt data, for --num-epoch; 0 where there is none.
    quantization  of --hf-checkpoint's weights
    sandbox       the kind that this machine gives, for the plan's text
    machine       what the memory is compared with; None: nothing
    """
    plan = replace(_plan(config, shape, device, num_prompts, num_cores, quantization), sandbox=sandbox)
    report = memory_report(plan, config, machine)
    if report.fits is not False:
        return replace(plan, memory=report)

    def try_plan(changed: Config) -> MemoryReport | None:
        try:
            changed_plan = _plan(changed, shape, device, num_prompts, num_cores, quantization)
        except ValueError:  # an impossible layout is not a cure
            return None
        return memory_report(changed_plan, changed, machine, report.push)

    return replace(plan, memory=replace(report, change=least_change(config, shape, try_plan)))


def _plan(
    config: Config,
    shape: ModelShape,
    device: Literal["cpu", "cuda"],
    num_prompts: int,
    num_cores: int,
    quantization: BlockFp8 | None,
) -> Plan:
    """The plan without its memory."""
    cluster, model = config.cluster, config.model
    precision = trainer_precision(model.precision, device)
    rollout_dtype = precision_or(model.rollout_dtype, precision)
    check_device(config, shape, device, precision, rollout_dtype, quantization)
    check_placement(config, device)
    layout = _checked_layout(config, shape)
    world_size = layout.world_size if layout else 0
    sizes = engine_sizes(config)
    first_engine = 0 if cluster.colocate else world_size
    num_engines = len(sizes)
    # Of one size they have always followed one another, and on several nodes the sizes are chosen to fit.
    may_skip = bool(cluster.engine_group) and not cluster.colocate
    engine_bundles = place_one_by_one(sizes, first_engine, cluster.num_gpus_per_node, may_skip=may_skip)
    num_bundles = max([world_size, *(1 + bundles[-1] for bundles in engine_bundles)])
    auxiliary = _auxiliary(config, shape, device, num_bundles) if layout else None
    num_bundles = max(num_bundles, 1 + max(auxiliary.bundles)) if auxiliary else num_bundles
    scorers = plan_scorers(config, num_bundles)
    num_bundles = max([num_bundles, *(1 + bundles[-1] for scorer in scorers for bundles in scorer.bundles)])
    eval_bundles = place_evaluation(config, num_bundles) if layout and num_engines else ()
    transport = None
    if layout and num_engines:
        transport_flag = config.weights.update_weight_transport
        transport = ("ipc" if cluster.colocate else "broadcast") if transport_flag == "auto" else transport_flag
    local_ranks = min(world_size, cluster.actor_num_gpus_per_node)
    plan = Plan(
        device=device,
        precision=precision,
        rollout_dtype=rollout_dtype,
        shape=shape,
        layout=layout,
        auxiliary=auxiliary,
        num_engines=num_engines,
        engine_size=min(sizes, default=cluster.rollout_num_gpus_per_engine),
        num_bundles=max([num_bundles, *(1 + bundles[-1] for bundles in eval_bundles)]),
        trainer_bundles=tuple(range(world_size)),
        engine_bundles=engine_bundles,
        eval_bundles=eval_bundles,
        groups=engine_groups(config) if num_engines else (),
        scorers=scorers,
        transport=transport,
        batch=_batch(config, layout),
        balance=_balance(config, layout, shape, device) if layout else None,
        num_rollout=_num_rollout(config, num_prompts),
        train_num_threads=trainer_threads(cluster.train_num_threads, num_cores, local_ranks),
        quantization=quantization,
        lora_push=push[0] if (push := adapter_push(config, shape)) is not None else None,
        drafts=drafts_by_itself(config),
    )
    when = cluster.offload_train
    return replace(
        plan,
        knobs=knobs_of(config, plan.num_rollout, num_engines) if is_streamed(config) else None,
        engines_give_memory=plan.takes_turns and cluster.offload_rollout,
        trainers_give_memory=when == "always" or (when == "auto" and plan.takes_turns),
        answers=slime_args(config, plan),
    )


def plan_errors(
    config: Config, num_prompts: int, shape: ModelShape | None = None, device: Literal["cpu", "cuda"] = "cpu"
) -> list[str]:
    """Every size that does not divide or does not fit, all at once; what `make_plan` raises one of.

    Without a shape (the model could not be read) what depends on it is left out. `device` is the run's, as it was
    found where --device is auto.
    """
    errors: list[str] = []
    layout = attempt(errors, lambda: _layout(config, shape))
    if layout and shape:
        errors += _layout_errors(config, layout, shape)
        if not errors:
            attempt(errors, lambda: _check_saved(config, layout, shape))
    pieces: list[Callable[[], object]] = [
        lambda: _auxiliary(config, shape, "cpu", 0) if shape and layout else None,
        lambda: adapter_push(config, shape) if shape else None,
        lambda: engine_sizes(config),
        lambda: plan_scorers(config, 0),
        lambda: place_evaluation(config, 0),
        lambda: _batch(config, layout),
        lambda: check_placement(config, device),
        lambda: _num_rollout(config, num_prompts) if num_prompts else None,
    ]
    for piece in pieces:
        attempt(errors, piece)
    return list(dict.fromkeys(errors))


def _auxiliary(config: Config, shape: ModelShape, device: str, first: int) -> AuxiliaryPlan | None:
    """Plan the second trained model: on the actor's devices, or on those from `first` on (--critic-num-gpus)."""
    role = auxiliary_role(config)
    if role is None:
        return None
    role_config, load = auxiliary_config(config, role), config.value(f"{role}_load")
    count = config.value(f"{role}_num_gpus")
    try:
        shape = read_model_shape(load, f"--{role}-load") if load else shape.trunk
        layout = _checked_layout(role_config, shape, count)
        assert layout is not None
    except ValueError as error:
        raise ValueError(f"{role} (--{role}-num-gpus, --{role}-…-parallel-size): {error}") from error
    places = range(layout.world_size) if count is None else range(first, first + count)
    trained = shape.with_value_head() if role == "critic" else shape
    return AuxiliaryPlan(
        role, trained, layout, tuple(places), _batch(config, layout), _balance(role_config, layout, shape, device)
    )


def _layout(config: Config, shape: ModelShape | None, world_size: int | None = None) -> TrainerLayout | None:
    if not uses_trainers(config):
        return None
    model = config.model
    return TrainerLayout(
        world_size=world_size or config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node,
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        cp=model.context_parallel_size,
        ep=model.expert_model_parallel_size,
        etp=model.expert_tensor_parallel_size
        or (model.tensor_model_parallel_size if shape and shape.divides_experts else 1),
        vpp=_virtual_size(config, shape),
    )


def _checked_layout(config: Config, shape: ModelShape, world_size: int | None = None) -> TrainerLayout | None:
    """The layout, into which the model divides."""
    layout = _layout(config, shape, world_size)
    if layout:
        if errors := _layout_errors(config, layout, shape):
            raise ValueError(errors[0])
        _check_saved(config, layout, shape)
    return layout


def _layout_errors(config: Config, layout: TrainerLayout, shape: ModelShape) -> list[str]:
    errors = model_errors(layout, shape, config.passthrough.transformer) + mtp_errors(config, layout, shape)
    return errors or vision_errors(config, layout, shape)


def _check_saved(config: Config, layout: TrainerLayout, shape: ModelShape) -> None:
    """Megatron's optimizer has a part for what a stage trains of experts, and one for what else it trains.

    States of which a stage lacks one are not saved, or do not load.
    """
    stages, frozen = stage_layers(layout, shape.num_layers, config.passthrough.transformer), frozen_of(config, shape)
    may_lack = frozen or (shape.num_experts and layout.pp > 1)
    if config.checkpoint.no_save or stages is None or not may_lack:
        return
    counted = stage_parameters(shape, layout, stages, frozen, adapters_of(config, shape))
    trains_experts = any(parameters.expert for parameters in counted)
    for stage, (layers, parameters) in enumerate(zip(stages, counted, strict=True)):
        lacks = "experts" if trains_experts and not parameters.expert else ""
        if lacks or not (parameters.dense or parameters.exact or parameters.shared):
            which = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers"
            raise ValueError(
                f"--pipeline-model-parallel-size {layout.pp}: stage {stage} ({which}) trains"
                f" no {lacks or 'parameters outside of experts'}, and a checkpoint of such a run could not be loaded"
                " again; choose other stages, other parameters to train, or --no-save"
            )


def _virtual_size(config: Config, shape: ModelShape | None) -> int:
    """Model chunks a pipeline rank holds."""
    model = config.model
    size, layers = model.virtual_pipeline_model_parallel_size, model.num_layers_per_virtual_pipeline_stage
    if size is not None and layers is not None:
        raise ValueError(
            "--virtual-pipeline-model-parallel-size and --num-layers-per-virtual-pipeline-stage say the same; "
            "leave one out"
        )
    if layers is None or shape is None:
        return size or 1
    stages = model.pipeline_model_parallel_size
    if stages == 1:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {layers} needs --pipeline-model-parallel-size of at least 2: one"
            " stage has nothing to interleave"
        )
    chunk = layers * stages
    if shape.num_layers % chunk:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x --pipeline-model-parallel-size {stages} = {chunk} does"
            f" not divide the model's {shape.num_layers} layers"
            + ("" if shape.num_layers % stages else f"; {dividing(shape.num_layers // stages, layers)}")
        )
    return shape.num_layers // chunk


def _batch(config: Config, layout: TrainerLayout | None) -> BatchPlan | None:
    if not config.rollout.rollout_batch_size:
        return None
    return plan_batches(
        rollout_batch_size=config.rollout.rollout_batch_size,
        n_samples_per_prompt=1 if config.run.mode == "sft" else config.rollout.n_samples_per_prompt,
        global_batch_size=config.train.global_batch_size,
        num_steps_per_rollout=config.train.num_steps_per_rollout,
        dp_size=layout.dp if layout else 1,
    )


def _balance(config: Config, layout: TrainerLayout, shape: ModelShape, device: str) -> Balance:
    # Transformer Engine's attention takes every sequence by itself, context parallelism cuts each one up, and not every
    # kind of attention can.
    precision = trainer_precision(config.model.precision, device)
    local = layer_impl(config.model.transformer_impl, device, True, precision) == "local"
    return Balance(
        cost=SequenceCost.of_shape(shape),
        max_tokens=config.train.max_tokens_per_gpu * layout.cp,
        max_samples=config.train.micro_batch_size,
        pad_to=sequence_multiple(layout.cp, layout.tp),
        stages=layout.pp,
        multiple=layout.pp if layout.vpp > 1 else 1,
        share_prompts=config.train.share_prompts and local and layout.cp == 1 and shape.may_share_prompts,
        dense_within=shape.dense_within,
        images=image_cost(config, shape),
        max_image_tokens=max_image_tokens(config, shape),
    )


def _num_rollout(config: Config, num_prompts: int) -> int:
    run = config.run
    if run.mode == "eval":
        return 0
    if run.num_rollout is not None:
        return run.num_rollout
    size = config.rollout.rollout_batch_size
    if run.num_epoch is not None and size:
        count = run.num_epoch * num_prompts // size
        if not count:
            raise ValueError(
                f"--num-epoch {run.num_epoch} x {num_prompts} prompts are less than one --rollout-batch-size {size}"
            )
        return count
    return 0
