"""The critic's part of the plan: what its trainers have instead of the actor's flags, and where they run."""

from __future__ import annotations

from dataclasses import dataclass

from fusionrl.config.config import Config
from fusionrl.plan.balance import Balance
from fusionrl.plan.batch import BatchPlan
from fusionrl.plan.layout import TrainerLayout

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@dataclass(frozen=True)
class CriticPlan:
    """The trainers of the critic."""

    layout: TrainerLayout
    bundles: tuple[int, ...]  # rank → bundle
    batch: BatchPlan | None
    balance: Balance


def uses_critic(config: Config) -> bool:
    """Whether the run trains a critic."""
    return config.run.mode == "rl" and config.algorithm.advantage_estimator == "ppo"


def critic_config(config: Config) -> Config:
    """The configuration as the critic's trainers read it: its own sizes, weights and schedule under the usual names."""
    critic, model, train = config.critic, config.model, config.train
    sizes = {
        name: getattr(critic, f"critic_{name}") or getattr(model, name)
        for name in (*_SIZES, "expert_model_parallel_size")
    }
    changed = {name for name, size in sizes.items() if size != getattr(model, name)}
    if changed:  # interleaving belongs to the actor's sizes
        sizes |= {"virtual_pipeline_model_parallel_size": None, "num_layers_per_virtual_pipeline_stage": None}
    folder = critic.critic_load or model.hf_checkpoint
    start = {"hf_checkpoint": folder, "megatron_checkpoint": None if critic.critic_load else model.megatron_checkpoint}
    schedule = {
        "lr": train.lr if critic.critic_lr is None else critic.critic_lr,
        "lr_warmup_iters": train.lr_warmup_iters
        if critic.critic_lr_warmup_iters is None
        else critic.critic_lr_warmup_iters,
    }
    if schedule["lr"] < train.min_lr:
        schedule["min_lr"] = schedule["lr"]
    return config.model_copy(
        update={
            "model": model.model_copy(update=sizes | start),
            "train": train.model_copy(update=schedule),
        }
    )
