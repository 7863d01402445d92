"""Checks of --rollout-external-engine-addrs: engines that others have started."""

from __future__ import annotations

import os

from fusionrl.base.environment import ENGINE_KEY
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import has_pairs
from fusionrl.config.run_parts import uses_engines
from fusionrl.observe.engine_list import engine_url


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
