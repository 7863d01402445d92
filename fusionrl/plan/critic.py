"""The plan of the second group of trainers: PPO's critic, or PRIME's reward model (prm).

What they have instead of the actor's flags, and where they run.
"""

from dataclasses import dataclass
from typing import Any

from fusionrl.algorithms.estimators import Role
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.models.shape import ModelShape
from fusionrl.plan.balance import Balance
from fusionrl.plan.batch import BatchPlan
from fusionrl.plan.layout import TrainerLayout


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


def role_flag(config: Config, role: Role, name: str) -> Any:
    """The value of a flag that both roles have, --critic-… or --prm-…."""
    return getattr(getattr(config, role), f"{role}_{name}")


def auxiliary_config(config: Config, role: Role) -> Config:
    """The configuration as these trainers read it: their own sizes, weights and schedule under the usual names."""
    model, train = config.model, config.train
    names = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model"))
    sizes = {name: role_flag(config, role, name) or getattr(model, name) for name in names}
    changed = {name for name, size in sizes.items() if size != getattr(model, name)}
    if changed:  # interleaving belongs to the actor's sizes
        sizes |= {"virtual_pipeline_model_parallel_size": None, "num_layers_per_virtual_pipeline_stage": None}
    own_load = role_flag(config, role, "load")
    start = {
        "hf_checkpoint": own_load or model.hf_checkpoint,
        "megatron_checkpoint": None if own_load else model.megatron_checkpoint,
        "custom_model_provider_path": None,  # builds the policy alone
        "custom_spec_path": None,
    }
    overrides = {name: role_flag(config, role, name) for name in ("lr", "lr_warmup_iters")}
    schedule = {name: getattr(train, name) if value is None else value for name, value in overrides.items()}
    if overrides["lr_warmup_iters"] is not None:
        schedule["lr_warmup_fraction"] = None
    if schedule["lr"] < train.min_lr:
        schedule["min_lr"] = schedule["lr"]
    schedule |= {"freeze_params_name_list": [], "only_train_params_name_list": [], "freeze_vision": False}
    return config.model_copy(
        update={
            "model": model.model_copy(update=sizes | start),
            "train": train.model_copy(update=schedule),
            "lora": config.lora.model_copy(update={"lora_rank": 0}),  # the policy alone has adapters
        }
    )
