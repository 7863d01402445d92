"""The start of a run's processes, in the order that the plan has for devices that several of them use."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fusionrl.plan.plan import Plan
from fusionrl.runtime.buffer_handle import BufferHandle
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.ray_cluster import gather
from fusionrl.runtime.trainers import TrainerGroups

logger = logging.getLogger(__name__)


def start_all(
    plan: Plan,
    launcher: Launcher,
    engines: EnginePool,
    trainers: TrainerGroups,
    buffer: BufferHandle,
    check_stop: Callable[[], None],
) -> dict[str, int]:
    """Start engines, trainers and the Buffer; on devices of their own at the same time. Returns facts of the data.

    Processes of trainers take no memory of a device before they are set up, so they start at once in any case.
    """
    order = plan.start_order
    if order != "trainers first":
        engines.start()
    trainers.actors, trainers.auxiliaries = launcher.make_trainers()
    prepared = buffer.start(launcher.make_buffer())
    if order == "together":
        ready = launcher.setup_trainers([trainers.actors, trainers.auxiliaries])
        buffer_ready = buffer.setup(engines.finish_start())
        if ready:
            logger.info("trainers: %s", gather(ready, check_stop)[0])
    elif order == "engines first":
        endpoints = engines.finish_start()
        engines.release_memory()
        buffer_ready = buffer.setup(endpoints)
        _setup_in_turn(launcher, trainers, check_stop)
    else:
        _setup_in_turn(launcher, trainers, check_stop)
        trainers.offload()
        engines.start()
        buffer_ready = buffer.setup(engines.finish_start())
    facts: dict[str, int] = gather([prepared, buffer_ready], check_stop)[1]
    return facts


def _setup_in_turn(launcher: Launcher, trainers: TrainerGroups, check_stop: Callable[[], None]) -> None:
    """Set up one group of trainers after the other: one that shares its devices gives its memory away for the next."""
    groups = [group for group in (trainers.actors, trainers.auxiliaries) if group]
    for number, group in enumerate(groups):
        logger.info("trainers: %s", gather(launcher.setup_trainers([group]), check_stop)[0])
        if number + 1 < len(groups):
            trainers.make_room(group)
