"""The plan of a group of trainers: what `auto` means for it, a second trained model, the learning rate's schedule.

Each rule is here once, for the plan and for a trainer without one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fusionrl.algorithms.estimators import Role
from fusionrl.config.config import Config
from fusionrl.config.model import TrainGroup
from fusionrl.config.pipeline import knobs_of
from fusionrl.config.run_parts import changes_weights, estimator_of, is_streamed
from fusionrl.models.shape import ModelShape
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.balance import Balance, BatchPlan
from fusionrl.plan.layout import TrainerLayout

Precision = Literal["fp32", "bf16"]
Impl = Literal["local", "transformer_engine"]
WIDTHS: dict[str, int] = {"fp32": 4, "bf16": 2}  # bytes of a value


def precision_or(precision: str, default: Precision) -> Precision:
    """Return the precision that a flag names, or the default for `auto`."""
    return default if precision == "auto" else "fp32" if precision == "fp32" else "bf16"


def trainer_precision(precision: str, device: str) -> Precision:
    """Return the precision of the trainers (--precision): for `auto` bf16 on GPUs and fp32 on a CPU."""
    return precision_or(precision, "bf16" if device == "cuda" else "fp32")


def layer_impl(impl: str, device: str, has_fused_layers: bool, precision: str) -> Impl:
    """Return whose layers the trainers have (--transformer-impl): for `auto` fused ones on GPUs, where installed.

    In fp32 the local ones: no attention of Transformer Engine's takes packed sequences in it.
    """
    if impl == "auto":
        return "transformer_engine" if device == "cuda" and has_fused_layers and precision != "fp32" else "local"
    return "local" if impl == "local" else "transformer_engine"


def trainer_threads(num_threads: int | None, num_cores: int, num_local_ranks: int) -> int:
    """Return the CPU threads of a trainer rank (--train-num-threads): by default a node's cores are shared out."""
    return num_threads or max(1, num_cores // max(1, num_local_ranks))


@dataclass(frozen=True)
class TrainerPlan:
    """The plan's answers for a group of trainers. A tool or a test without a run makes one with `trainer_plan`.

    layout       parallel sizes; its dp is the number of shards of a rollout
    num_threads  CPU threads of a rank
    num_steps    optimizer steps of the whole run, over which the learning rate decays; None: not known
    answers      values for hooks of the flags that `auto` or nothing left open, by the flags' names
    knobs        of a pipeline that runs ahead; None: one rollout after the other
    """

    layout: TrainerLayout
    device: Literal["cpu", "cuda"]
    precision: Precision
    num_threads: int
    num_steps: int | None = None
    answers: Mapping[str, object] = field(default_factory=dict)
    knobs: Knobs | None = None


def trainer_plan(
    config: Config, layout: TrainerLayout, device: Literal["cpu", "cuda"] = "cpu", num_cores: int = 1
) -> TrainerPlan:
    """Return the plan of trainers that no run has: `num_cores` are shared out to the ranks, as on one node."""
    has_batches = config.rollout.rollout_batch_size is not None
    return TrainerPlan(
        layout,
        device,
        trainer_precision(config.model.precision, device),
        trainer_threads(config.cluster.train_num_threads, num_cores, layout.world_size),
        knobs=knobs_of(config, None, num_engines=1) if is_streamed(config) and has_batches else None,
    )


@dataclass(frozen=True)
class AuxiliaryPlan:
    """The trainers of the critic, or of the process reward model."""

    role: Role
    shape: ModelShape  # of what it trains
    layout: TrainerLayout
    bundles: tuple[int, ...]  # rank → bundle
    batch: BatchPlan | None
    balance: Balance


def auxiliary_role(config: Config) -> Role | None:
    """Return the role of the second trained model; None if only the policy is trained."""
    return estimator_of(config.algorithm).role if config.run.mode == "rl" else None


def auxiliary_config(config: Config, role: Role) -> Config:
    """The configuration as these trainers read it: their own sizes, weights and schedule under the usual names."""
    model, train = config.model, config.train
    names = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model"))
    sizes = {name: config.value(f"{role}_{name}") or getattr(model, name) for name in names}
    changed = {name for name, size in sizes.items() if size != getattr(model, name)}
    if changed:  # interleaving belongs to the actor's sizes
        sizes |= {"virtual_pipeline_model_parallel_size": None, "num_layers_per_virtual_pipeline_stage": None}
    own_load = config.value(f"{role}_load")
    start = {
        "hf_checkpoint": own_load or model.hf_checkpoint,
        "megatron_checkpoint": None if own_load else model.megatron_checkpoint,
        "custom_model_provider_path": None,  # builds the policy alone
        "custom_spec_path": None,
    }
    overrides = {name: config.value(f"{role}_{name}") for name in ("lr", "lr_warmup_iters")}
    schedule = {name: getattr(train, name) if value is None else value for name, value in overrides.items()}
    if overrides["lr_warmup_iters"] is not None:
        schedule["lr_warmup_fraction"] = None
    if schedule["lr"] < train.min_lr:
        schedule["min_lr"] = schedule["lr"]
    schedule |= {"freeze_params_name_list": [], "only_train_params_name_list": [], "freeze_vision": False}
    return config.changed(**sizes, **start, **schedule, lora_rank=0)  # the policy alone has adapters


def warm_up_notes(config: Config, num_steps: int) -> list[str]:
    """Describe the effect of the warm-up on the first optimizer steps of a run of `num_steps`; nothing without one.

    Megatron's schedule has the rate `init + (lr - init) * k / n` at step k + 1 of a warm-up of n steps.
    """
    train = config.train
    count, start = warm_up_steps(train, num_steps), min(train.lr_warmup_init, train.lr)
    if not count or not changes_weights(config):
        return []
    nothing = ", which changes no weights" if start == 0 else ""
    cure = " (--lr-warmup-init starts higher)" if start == 0 else ""
    notes = [f"learning rate {start:g} at optimizer step 1{nothing}, {train.lr:g} from step {count + 1} on{cure}"]
    if 0 < num_steps <= count:
        notes.append(
            f"--lr-warmup-iters {count}: all {num_steps} optimizer steps of the run are in the warm-up, and none has"
            f" --lr {train.lr:g}"
        )
    return notes


def warm_up_steps(train: TrainGroup, num_steps: int | None) -> int:
    """Return the optimizer steps of the warm-up; `num_steps`: of the whole run."""
    if train.lr_warmup_fraction is None:
        return train.lr_warmup_iters
    steps = train.lr_decay_iters or num_steps
    if steps is None:
        raise ValueError(
            f"--lr-warmup-fraction {train.lr_warmup_fraction:g}: the length of the run is not known; give"
            " --lr-decay-iters, or --lr-warmup-iters"
        )
    return int(train.lr_warmup_fraction * steps)


def lr_decay_steps(train: TrainGroup, num_steps: int | None = None, prefix: str = "") -> int:
    """Optimizer steps over which the learning rate decays; `num_steps`: of the whole run, None: not known.

    `prefix`: of the flags of a critic or a prm ("critic-", "prm-"), for the message.
    """
    steps = train.lr_decay_iters or num_steps
    if train.lr_decay_style == "constant":
        return max(steps or 1, warm_up_steps(train, num_steps) + 1)
    if steps is None:
        raise ValueError(
            f"--lr-decay-style {train.lr_decay_style}: the length of the run is not known; give --lr-decay-iters"
        )
    if train.lr_warmup_fraction is None and steps <= train.lr_warmup_iters:
        raise ValueError(
            f"--{prefix}lr-warmup-iters {train.lr_warmup_iters} is not below the {steps} steps of the decay; "
            "lower it, or raise --lr-decay-iters"
        )
    return steps
