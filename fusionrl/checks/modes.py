"""Checks of modes, of --in-process, and of engines that only evaluate or that others start."""

import contextlib
import os
import sys
from pathlib import Path

from fusionrl.base.environment import ENGINE_KEY
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import has_pairs
from fusionrl.config.run_parts import estimator_of, has_own_source, is_streamed
from fusionrl.data.rows import FORMATS
from fusionrl.observe.run_dir import engine_url


def missing_flags(config: Config) -> list[str]:
    """List flags that a run cannot do without; a plan for a cluster elsewhere can."""
    errors: list[str] = []
    run, mode = config.run, config.run.mode
    if mode != "eval":
        if config.data.prompt_data is None and not has_own_source(config) and run.load_debug_rollout_data is None:
            errors.append(f"--prompt-data is required in --mode {mode}: {FORMATS}")
        if config.rollout.rollout_batch_size is None:
            errors.append(f"--rollout-batch-size is required in --mode {mode}: prompts of one step")
        if run.num_rollout is None and run.num_epoch is None:
            errors.append(f"--num-rollout or --num-epoch is required in --mode {mode}")
    own_sets = mode == "eval" and config.eval.eval_config is not None  # each has to name its own
    if mode != "sft" and not run.debug_train_only and not own_sets and config.rollout.rollout_max_response_len is None:
        errors.append(f"--rollout-max-response-len is required in --mode {mode}")
    if mode == "eval" and not config.eval.has_sets:
        errors.append("--eval-prompt-data is required in --mode eval: pairs of name and file (or --eval-config)")
    return errors


def mode_errors(config: Config) -> list[str]:
    """List flags that do not go together with the mode, or with one another."""
    run, mode = config.run, config.run.mode
    errors = []
    if run.debug_train_only and run.debug_rollout_only:
        errors.append("--debug-train-only and --debug-rollout-only exclude each other")
    elif mode == "eval" and (run.debug_train_only or run.debug_rollout_only):
        flag = "--debug-train-only" if run.debug_train_only else "--debug-rollout-only"
        errors.append(f"{flag}: --mode eval runs the engines alone, on its sets; leave it out")
    if run.debug_train_only and mode == "rl" and run.load_debug_rollout_data is None:
        errors.append("--debug-train-only in --mode rl needs --load-debug-rollout-data")
    if config.model.megatron_checkpoint is not None and (mode == "eval" or config.reject_sampling.no_trainer):
        errors.append("--megatron-checkpoint: no trainer pushes its weights; convert it with tools/convert.py to-hf")
    return errors


_REPLAY = ", or replay a whole run's --save-debug-rollout-data (--debug-train-only --load-debug-rollout-data)"


def in_process_errors(config: Config) -> list[str]:
    """List settings that need several trainers, or a run ahead of them."""
    run, cluster = config.run, config.cluster
    if not run.in_process:
        return []
    role, num_ranks = estimator_of(config.algorithm).role, cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    errors = []
    if num_ranks > 1:
        cure = "give --actor-num-nodes 1 --actor-num-gpus-per-node 1"
        errors.append(f"--in-process: it runs one trainer rank, not {num_ranks}; {cure}{_REPLAY}")
    if role is not None and run.mode == "rl":
        flag = f"--advantage-estimator {config.algorithm.advantage_estimator}"
        errors.append(f"--in-process: {flag} trains a {role}, too; leave one out")
    if is_streamed(config):
        flag = f"--pipeline {run.pipeline}"
        errors.append(f"--in-process: {flag} generates while it trains; give --pipeline on-policy{_REPLAY}")
    return errors


def place_errors(config: Config, prefix: str = sys.prefix, package: str = str(Path(__file__).parents[1])) -> list[str]:
    """List folders with white space in their path; a run in one process has no workers of Ray."""
    if config.run.in_process:
        return []
    places = {"the Python environment": prefix, "fusionrl": package}
    return [
        f"{name} is in {path!r}: Ray starts no worker from a path with white space; move it, or use --in-process"
        for name, path in places.items()
        if any(character.isspace() for character in path)
    ]


def eval_engine_errors(config: Config) -> list[str]:
    """List what does not go together with engines of evaluation's own."""
    best = config.checkpoint.keep_best
    if not config.eval.eval_num_gpus:
        return []
    flag, errors = f"--eval-num-gpus {config.eval.eval_num_gpus}", []
    if config.run.mode == "eval":
        return [f"{flag}: in --mode eval all engines evaluate; give --rollout-num-gpus"]
    if config.cluster.colocate:
        errors.append(f"{flag}: with --colocate an evaluation has the engines to itself; leave one out")
    if config.weights.update_weight_transport == "ipc":
        errors.append(f"{flag}: --update-weight-transport ipc only reaches engines on trainers' devices; take disk")
    if best is not None:
        errors.append(f"{flag}: its results come too late for --keep-best {best}; leave one out")
    return errors


def guest_errors(config: Config) -> list[str]:
    """List what is wrong with the addresses and with their key. No engine is asked."""
    errors, seen = [], set[str]()
    flag, addresses = "--rollout-external-engine-addrs", config.cluster.rollout_external_engine_addrs
    if addresses and config.run.in_process:
        return [f"{flag} {addresses[0]}: --in-process takes no engines of others; leave one out"]
    with contextlib.suppress(ValueError):  # another check reports a group that cannot be read
        if addresses and has_pairs(config.cluster.engine_group):
            return [f"{flag} {addresses[0]}: not with --engine-group of role prefill (pairs); leave one out"]
    for address in addresses:
        try:
            url = engine_url(address)
        except ValueError as error:
            errors.append(f"{flag} {address}: {error}")
            continue
        if url in seen:
            errors.append(f"{flag} {address}: it is there twice; leave one out")
        seen.add(url)
    if os.environ.get(ENGINE_KEY, "").startswith("-"):
        errors.append(f"{ENGINE_KEY} begins with a dash, which SGLang reads as a flag; give the engines another key")
    return errors
