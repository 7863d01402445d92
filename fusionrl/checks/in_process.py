"""Checks of --in-process, which runs one trainer rank and no Ray."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.plan.pipeline_knobs import is_streamed

_REPLAY = (
    "; or save the rollouts of the whole run (--save-debug-rollout-data) and replay them in one process"
    " (--debug-train-only --load-debug-rollout-data)"
)


def in_process_errors(config: Config) -> list[str]:
    """List flags that need several trainers or Ray."""
    run, cluster = config.run, config.cluster
    if not run.in_process:
        return ["--pdb needs --in-process: a debugger cannot open in other processes"] if run.pdb else []
    errors = []
    num_ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if num_ranks > 1:
        errors.append(
            f"--in-process: it runs one trainer rank, and the flags ask for {num_ranks}; give --actor-num-nodes 1"
            f" --actor-num-gpus-per-node 1{_REPLAY}"
        )
    role = estimator_of(config.algorithm).role
    if role is not None and run.mode == "rl":
        flag = f"--advantage-estimator {config.algorithm.advantage_estimator}"
        errors.append(f"--in-process: {flag} trains a {role}, too; choose another estimator, or leave --in-process out")
    if is_streamed(config):
        flag = f"--pipeline {run.pipeline}"
        errors.append(f"--in-process: {flag} generates while it trains; give --pipeline on-policy{_REPLAY}")
    for flag, is_given in (
        ("--ray-address", cluster.ray_address is not None),
        ("--dashboard", run.dashboard),
        ("--async-save", config.checkpoint.async_save),
        ("--use-fault-tolerance", config.rollout.use_fault_tolerance),
        ("--eval-num-gpus", bool(config.eval.eval_num_gpus)),
    ):
        if is_given:
            errors.append(f"--in-process: {flag} needs other processes than this one; leave it out")
    return errors
