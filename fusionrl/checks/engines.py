"""Checks of engines that only evaluate (--eval-num-gpus) and of external ones (--rollout-external-engine-addrs)."""

from __future__ import annotations

import os

from fusionrl.base.environment import ENGINE_KEY
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import has_pairs
from fusionrl.observe.engine_list import engine_url


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
    flag = "--rollout-external-engine-addrs"
    addresses = config.cluster.rollout_external_engine_addrs
    if addresses and config.run.in_process:
        return [f"{flag} {addresses[0]}: --in-process takes no engines of others; leave one out"]
    if addresses and _has_pairs(config):
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


def _has_pairs(config: Config) -> bool:
    try:
        return has_pairs(config.cluster.engine_group)
    except ValueError:  # another check reports a group that cannot be read
        return False
