"""Checks of engines that only evaluate (--eval-num-gpus) and of external ones (--rollout-external-engine-addrs)."""

from __future__ import annotations

import os

from fusionrl.base.environment import ENGINE_KEY
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import has_pairs
from fusionrl.config.run_parts import uses_engines
from fusionrl.observe.engine_list import engine_url


def eval_engine_errors(config: Config) -> list[str]:
    """List what does not go together with engines of evaluation's own."""
    run, evaluation = config.run, config.eval
    if not evaluation.eval_num_gpus:
        return []
    flag = f"--eval-num-gpus {evaluation.eval_num_gpus}"
    if run.mode == "eval":
        return [f"{flag}: in --mode eval all engines evaluate; give --rollout-num-gpus"]
    if run.mode != "rl":
        return [f"{flag}: no engine evaluates in --mode {run.mode}; leave it out"]
    for name in ("debug_rollout_only", "debug_train_only"):
        if getattr(run, name):
            return [f"{flag}: with --{name.replace('_', '-')} nothing is evaluated; leave one out"]
    errors = []
    if config.cluster.colocate:
        errors.append(
            f"{flag}: with --colocate engines and trainers share their devices and work in turn, so evaluation has"
            " the engines to itself; leave one out"
        )
    if not evaluation.has_sets or (evaluation.eval_interval is None and evaluation.skip_eval_before_train):
        errors.append(f"{flag}: nothing is evaluated; give --eval-prompt-data (or --eval-config) and --eval-interval")
    if config.weights.update_weight_transport == "ipc":
        errors.append(
            f"{flag}: --update-weight-transport ipc reaches engines on the trainers' devices alone; take broadcast or"
            " disk"
        )
    if config.checkpoint.keep_best is not None:
        errors.append(
            f"{flag}: its results come after a checkpoint is saved, too late for --keep-best"
            f" {config.checkpoint.keep_best}; leave one out"
        )
    return errors


def guest_errors(config: Config) -> list[str]:
    """List what is wrong with the addresses and with their key. No engine is asked."""
    errors, seen = [], set[str]()
    flag = "--rollout-external-engine-addrs"
    addresses = config.cluster.rollout_external_engine_addrs
    if addresses and not uses_engines(config):
        return [f"{flag} {addresses[0]}: this run has no engines; leave it out"]
    if addresses and config.run.in_process:
        return [f"{flag} {addresses[0]}: not with --in-process, where engines of others are not looked after"]
    if addresses and _has_pairs(config):
        return [f"{flag} {addresses[0]}: not with --engine-group of role prefill; its router sends to pairs alone"]
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


def _has_pairs(config: Config) -> bool:
    try:
        return has_pairs(config.cluster.engine_group)
    except ValueError:  # another check reports a group that cannot be read
        return False
