"""Build what is trained: the GPT model, its data-parallel wrapper, the optimizer and its schedule."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, call_hook, flag_of, load_function
from fusionrl.models import families
from fusionrl.models.hf_io import local_tensors
from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import model_errors
from fusionrl.plan.trainer_plan import TrainerPlan, lr_decay_steps, warm_up_steps
from fusionrl.trainer import settings
from fusionrl.trainer.layers import block_spec, finish_layers
from fusionrl.trainer.outputs import ChosenOutputs, ValueModel
from fusionrl.trainer.replicas import ReplicaCheck

if TYPE_CHECKING:
    from fusionrl.models.vision import VisionShape
    from fusionrl.trainer.lora import GradientWatch
    from fusionrl.trainer.routing import RoutingReplay
    from fusionrl.trainer.vision import Sight


@dataclass
class Trained:
    """The model of one rank with everything that trains it."""

    chunks: list[DistributedDataParallel]  # pipeline chunks, wrapped for data parallelism
    transformer: TransformerConfig  # Megatron's TransformerConfig
    optimizer: ChainedOptimizer  # Megatron's ChainedOptimizer over distributed optimizers
    scheduler: OptimizerParamScheduler  # learning rate and weight decay
    routing: RoutingReplay | None = None  # what routers must choose, or None where they are free
    is_amid: bool = False  # some optimizer steps of a rollout have been taken, but not all
    watch: GradientWatch | None = None  # looks at adapters' gradients; None without adapters
    replicas: ReplicaCheck | None = None  # compares the weights of data-parallel replicas; None: nothing does


def build_model(
    config: Config, shape: ModelShape, plan: TrainerPlan, device: torch.device
) -> tuple[list[torch.nn.Module], TransformerConfig]:
    """This rank's part of the model, with memory for its weights but nothing in it.

    Raises ValueError for sizes that the model's shape does not allow, or passed-through fields Megatron refuses.
    """
    layout = plan.layout
    errors = model_errors(layout, shape, config.passthrough.transformer)
    if errors:
        raise ValueError(errors[0])
    fields = settings.transformer_fields(config, shape, plan)
    try:
        transformer = settings.transformer_class(fields)(**fields)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"Megatron-core refuses the model's configuration: {error}") from error
    chunks = []
    for stage in range(layout.vpp) if layout.vpp > 1 else [None]:
        place = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            "vp_stage": stage,
        }
        chunks.append(_finished(_build_chunk(config, transformer, shape, plan, place), transformer, shape, device))
    return chunks, transformer


def _build_chunk(
    config: Config, transformer: TransformerConfig, shape: ModelShape, plan: TrainerPlan, place: dict[str, Any]
) -> GPTModel:
    """Build our own GPTModel, of our layers or of a user's, or what the user's functions build.

    --custom-spec-path returns, once a stage, a spec of the layers or a function that builds the stage. The provider of
    --custom-model-provider-path is called with `pre_process`, `post_process` and `vp_stage`; it may also take `config`
    (Megatron's), `args` (the flags) and `usual` (a function that builds what there would be without it). Parameters
    that have Megatron's names are loaded, pushed and saved.

    Raises HookError if a function raised, or returned something else.
    """
    spec_path, provider_path = config.model.custom_spec_path, config.model.custom_model_provider_path
    spec: Any = None
    is_spec = False
    if spec_path is not None:
        spec = call_hook("custom_spec_path", spec_path, config.to_args(**plan.answers), transformer, place["vp_stage"])
        is_spec = isinstance(spec, ModuleSpec | TransformerBlockSubmodules)
        if not (is_spec or (callable(spec) and "pre_process" in inspect.signature(spec).parameters)):
            raise HookError(
                f"--custom-spec-path {spec_path}: it returned {type(spec).__name__}; expected Megatron's ModuleSpec, or"
                " a function that builds a pipeline stage (pre_process, post_process, vp_stage)"
            )

    def usual() -> GPTModel:
        """Build the model of our layers, or of --custom-spec-path."""
        if callable(spec) and not is_spec:
            return _checked_model("custom_spec_path", str(spec_path), spec(**place), shape)
        kind: type[GPTModel] = ValueModel if shape.value_head else ChosenOutputs
        further: dict[str, object] = {}
        if shape.vision is not None:
            from fusionrl.trainer.vision import SeeingModel

            kind, further["sight"] = SeeingModel, _sight(config, shape.vision)
        if shape.mtp_layers and place["post_process"]:
            from fusionrl.trainer.multi_token import mtp_spec

            further["mtp_block_spec"] = mtp_spec(transformer, shape, place["vp_stage"])
        return kind(
            transformer,
            spec if is_spec else block_spec(transformer, shape, place["vp_stage"]),
            vocab_size=-(-shape.vocab_size // plan.layout.tp) * plan.layout.tp,  # rows beyond the first are padding
            max_sequence_length=shape.max_position_embeddings,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_percent=shape.rotary_percent,
            rotary_base=shape.rope_theta,
            **further,
            **place,
        )

    if provider_path is None:
        return usual()
    taken = inspect.signature(load_function(provider_path)).parameters
    extras = {"config": transformer, "args": config.to_args(**plan.answers), "usual": usual}
    extras = {name: value for name, value in extras.items() if name in taken}
    field = "custom_model_provider_path"
    return _checked_model(field, provider_path, call_hook(field, provider_path, **place, **extras), shape)


def _sight(config: Config, shape: VisionShape) -> Sight:
    """Return the argument of a `SeeingModel`."""
    from fusionrl.data.images import read_processor_files
    from fusionrl.trainer.vision import Sight
    from fusionrl.trainer.vision_tower import PixelScale

    scale, overlaps = PixelScale(), bool(settings.ddp_fields(config)["overlap_grad_reduce"])
    if config.model.hf_checkpoint is not None:  # else nothing is read
        files = read_processor_files(config.model.hf_checkpoint)
        scale = PixelScale(files.mean, files.std)
    return Sight(shape, scale, config.train.vision_recompute, overlaps)


def _checked_model(field: str, path: str, model: object, shape: ModelShape) -> GPTModel:
    """Return a user's model with the outputs that the trainer asks for.

    Raises HookError if it is not a GPTModel, or sees none of a run's images.
    """
    if not isinstance(model, GPTModel):
        raise HookError(f"{flag_of(field)} {path}: it returned {type(model).__name__}; expected Megatron's GPTModel")
    if shape.vision is not None and not hasattr(model, "sight"):
        raise HookError(
            f"{flag_of(field)} {path}: it returned a {type(model).__name__}, which has no vision tower, for a run with"
            " images; expected what `usual` of --custom-model-provider-path returns, a `trainer.vision.SeeingModel`"
        )
    if not isinstance(model, ChosenOutputs):
        model.__class__ = type(type(model).__name__, (ChosenOutputs, type(model)), {})
    return model


def mark_experts(model: torch.nn.Module, tensor_size: int) -> None:
    """Tell Megatron which parameters are experts', `tensor_size` ranks of which hold an expert together.

    It marks its own, and those only where experts are divided: a model would have two optimizers at some
    expert-parallel sizes and one at others, and the state of one could not be loaded at the other. Any other parameter
    in an expert would count in the norm of the gradients on the first tensor-parallel rank alone, though at size 1 the
    ranks share its state like data-parallel ones. Megatron's mark of a bias for sequence parallelism would have its
    gradient, which is summed over the expert's data-parallel ranks, summed over the tensor-parallel ones again.
    """
    for name, param in model.named_parameters():
        if ".mlp.experts." in name:
            param.allreduce = param.sequence_parallel = False
            if tensor_size == 1:
                param.tensor_model_parallel = True


def _finished(
    model: GPTModel, transformer: TransformerConfig, shape: ModelShape, device: torch.device
) -> torch.nn.Module:
    model.real_vocab_size, model.logits_scale = shape.vocab_size, shape.logits_scale
    mark_experts(model, parallel_state.get_expert_tensor_parallel_world_size())
    finish_layers(model, transformer, shape)
    if device.type == "cuda":
        model.cuda(device)
    if not transformer.bf16:
        return model
    wrapped = Float16Module(transformer, model)
    for module in wrapped.modules():
        # The wrapper makes everything bf16; a router turns its bias back at its first forward pass, after loading.
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
    return wrapped


@torch.no_grad()
def randomize(modules: list[torch.nn.Module], std: float = 0.02) -> None:
    """Normal weights of `std`, and ones in the norms; replicated ones differ between ranks, so only time is real."""
    for module in modules:
        for param in module.parameters():
            if param.dim() > 1:
                param.normal_(std=std)
            else:
                param.fill_(1.0)


def build_training(
    config: Config,
    modules: list[torch.nn.Module],
    transformer: TransformerConfig,
    plan: TrainerPlan,
    watch: GradientWatch | None = None,
    role: str | None = None,
) -> Trained:
    """Wrap loaded `modules` for data parallelism and give them an optimizer and a schedule.

    The optimizer takes its fp32 master weights from the modules, so these must hold their weights already. Raises
    ValueError for passed-through fields Megatron refuses, or a schedule that cannot be (see `lr_decay_steps`).
    """
    try:
        ddp_config = DistributedDataParallelConfig(**settings.ddp_fields(config))
        optimizer_config = OptimizerConfig(**settings.optimizer_fields(config, plan))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"Megatron-core refuses the configuration of the optimizer: {error}") from error
    chunks = [
        DistributedDataParallel(transformer, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    _count_padding(chunks)
    with torch.no_grad():  # else shards of fp32 are views with a gradient, which --optimizer-cpu-offload refuses
        optimizer = get_megatron_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    _complete_state(optimizer)

    def finalize(model: Sequence[object], num_tokens: object = None, **kwargs: object) -> None:
        # The loss is already divided by the one global count; Megatron must not divide again.
        finalize_model_grads(model, None, **kwargs)

    transformer.finalize_model_grads_func = finalize
    transformer.grad_scale_func = optimizer.scale_loss
    if ddp_config.overlap_grad_reduce:
        transformer.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
        if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
            sync = [chunk.start_param_sync for chunk in chunks]
            transformer.param_sync_func = sync if len(chunks) > 1 else sync[0]
    train, decay_steps = config.train, lr_decay_steps(config.train, plan.num_steps)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=min(train.lr_warmup_init, train.lr),
        max_lr=train.lr,
        min_lr=min(train.min_lr, train.lr),
        lr_warmup_steps=warm_up_steps(train, plan.num_steps),
        lr_decay_steps=decay_steps,
        lr_decay_style=train.lr_decay_style,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )
    interval, layout = train.check_weight_hash_across_dp_replicas_interval, plan.layout
    of_experts = layout.world_size // (layout.etp * layout.ep * layout.pp) if transformer.num_moe_experts else 1
    has_replicas = max(layout.dp * layout.cp, of_experts) > 1
    replicas = ReplicaCheck(interval, role or "trainer") if interval is not None and has_replicas else None
    return Trained(chunks, transformer, optimizer, scheduler, watch=watch, replicas=replicas)


def _count_padding(chunks: Sequence[DistributedDataParallel]) -> None:
    """Let checkpoints find the state of each parameter in buffers of several buckets.

    Megatron-core 0.16.1 gathers that state without the padding between buckets, and looks it up by places that count
    the padding: an embedding that the first and the last stage share, in a bucket of its own, is shifted and loses its
    end (its own warning: "param range exceeds unpadded buffer").
    """
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets[:-1]:
                bucket.numel_unpadded = bucket.grad_data.numel()
            buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def _complete_state(optimizer: ChainedOptimizer) -> None:
    """Let checkpoints find the state of each parameter.

    A group has the shards in fp32 first, and Megatron-core 0.16.1 looks for them in the order of its buffers. Adam
    makes its moments at its first step; a checkpoint before it (a resume, a skipped step) needs them as well.
    """
    for inner in optimizer.chained_optimizers:
        for number, group in enumerate(getattr(inner, "opt_group_ranges", [])):
            params = sorted(group["params"], key=lambda param: param.dtype is not torch.float32)
            inner.model_param_group_index_map.update({param: (number, at) for at, param in enumerate(params)})
        if getattr(inner, "is_stub_optimizer", False) or inner.init_state_fn is None:
            continue  # --optimizer-cpu-offload: Megatron makes that state itself
        inner.init_state_fn(inner.optimizer, inner.config)
        for group in inner.optimizer.param_groups:
            group.setdefault("step", 0)


def take_apart(trained: Trained) -> None:
    """Give the memory of a model back that is not needed any more.

    Autograd keeps the hooks of every parameter, and the hooks keep the wrapper of the model, so that no collector finds
    it unused: with it would stay the weights, and threads and descriptors of each group.
    """
    for chunk in trained.chunks:
        for param in chunk.parameters():
            param.data, param.main_grad = torch.empty(0, device=param.device, dtype=param.dtype), None
        vars(chunk).clear()


def forget_images(trained: Trained) -> None:
    """Drop what a frozen vision tower has kept of images, as weights or images are others now."""
    for chunk in trained.chunks:
        unwrap(chunk).forget_images()


def unwrap(module: torch.nn.Module) -> ChosenOutputs:
    """The model within its wrappers."""
    while not isinstance(module, ChosenOutputs):
        module = module.module
    return module


def freeze(modules: list[torch.nn.Module], shape: ModelShape, frozen: Set[str]) -> None:
    """Freeze the parameters whose Megatron names are in `frozen`, before the model is wrapped."""
    rules = families.model_rules(shape)
    sources = {name for megatron in frozen for name in rules[megatron].hf}
    for name, rule, tensor in local_tensors(modules, shape):
        if sources.issuperset(rule.hf):  # by these names also the copy of a tied embedding
            tensor.requires_grad_(False)
            if name.startswith("embedding."):
                _want_gradients(modules)


def _want_gradients(modules: list[torch.nn.Module]) -> None:
    """Let embeddings want gradients: layers that are computed again in backward have none without."""

    def want(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        wants = torch.is_grad_enabled() and not output.requires_grad
        return output.detach().requires_grad_() if wants else output

    for model in map(unwrap, modules):  # of several pipeline pieces one has it
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(want)
