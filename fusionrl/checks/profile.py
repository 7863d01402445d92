"""Checks of --profile-…: steps and processes that the run has, and a tool that this machine has."""

import shutil

from fusionrl.config.config import Config
from fusionrl.config.profile import ProfileOrder
from fusionrl.config.run_parts import uses_engines, uses_trainers
from fusionrl.plan.plan import Plan


def profile_errors(config: Config, device: str) -> list[str]:
    """List what is wrong with the flags of a profile; `device`: "cpu" or "cuda"."""
    try:
        order = ProfileOrder.of(config)
    except ValueError as error:
        return [str(error)]
    if order is None:
        return []
    errors = []
    if order.tool != "torch" and device == "cpu":
        errors.append(f"--profile-tool {order.tool}: it sees what a GPU does, and this run is on a CPU; take torch")
    elif order.tool == "nsys" and shutil.which("nsys") is None:
        errors.append("--profile-tool nsys: no `nsys` on the PATH; install Nsight Systems on every node, or take torch")
    num_trainers = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    over = sorted(rank for rank in order.trainers or () if rank >= num_trainers)
    if over and uses_trainers(config):
        errors.append(f"--profile-ranks {over[0]}: trainers have the ranks 0 to {num_trainers - 1}")
    if order.trainers == frozenset() and not (order.engines and uses_engines(config)):
        errors.append("--profile-ranks: no rank is left to profile; give a trainer's rank (0)")
    return errors


def profile_plan_errors(config: Config, plan: Plan) -> list[str]:
    """List the steps and engines of a profile that the plan does not have; the flags are right in themselves."""
    order = ProfileOrder.of(config)
    if order is None:
        return []
    errors = [
        f"--profile-steps {first}: the run ends with step {plan.num_rollout}"
        for first, _ in order.steps
        if first > plan.num_rollout > 0
    ]
    over = sorted(index for index in order.engines or () if index >= plan.num_engines)
    if over and plan.num_engines:
        errors.append(f"--profile-ranks engine-{over[0]}: the last of the engines is engine-{plan.num_engines - 1}")
    return errors
