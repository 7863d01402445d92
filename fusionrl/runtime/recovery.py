"""Trainers come back within the run: where a rank dies, or hangs past --stall-timeout-s, all ranks are started again.

They get the newest state, a snapshot or a checkpoint, and train the rollouts since again, whose shards are kept until a
state has them. Engines, Buffer and all that was generated stay; the next push sends all weights over new groups. A
device whose node is gone, or on which a rank cannot start, is left out where the layout allows a smaller data-parallel
size: each rank then trains the shards of several, so the batch stays the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import ray

from fusionrl.base.wording import counted
from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.engines.process import ChildExited
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.remaining import remaining_plan
from fusionrl.runtime.buffer_handle import BufferHandle
from fusionrl.runtime.checkpoints import Checkpoint, Saver
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.ray_cluster import devices_gone, end_on_nodes
from fusionrl.runtime.snapshots import Snapshots
from fusionrl.runtime.supervisor import FAILURES, actor_of, chain, root_cause
from fusionrl.runtime.trainers import TrainerGroups
from fusionrl.weights.remote_calls import waiting

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 1.0
_MOST_FAILED = 3  # snapshots in a row
_START_S = 300.0  # for the processes of all ranks to be there: a disk that many read at once takes minutes
# Errors that torch raises in a rank: its peers or its device are gone, and no code of the run is to blame.
_OF_PEERS = ("gloo/transport", "NCCL error", "Connection closed by peer")
_BROKEN = (*_OF_PEERS, "CUDA error")
# Errors of a device that a new start meets again: memory outside torch's allocator, and a kernel's wrong index.
_OF_CODE = ("CUDA error: out of memory", "device-side assert", "illegal memory access")
_BROKEN_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "AcceleratorError"}
_OF_USERS = (ValueError, ChildExited, FloatingPointError)  # these name their cause; so does a HookError


class NoStart(RuntimeError):
    """On some devices no process of a rank has started, or its state is gone."""


class TrainerRecovery:
    """Trains, takes snapshots, and brings the trainers back after a failure."""

    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        trainers: TrainerGroups,
        buffer: BufferHandle,
        engines: EnginePool,
    ) -> None:
        self._config, self._launcher, self._trainers = config, launcher, trainers
        self._buffer, self._engines, options = buffer, engines, config.checkpoint
        # In one process nothing comes back.
        self._can_return = not config.run.in_process and config.run.max_restarts > 0
        self._interval = options.snapshot_interval if self._can_return else 0
        self._kept: dict[int, Rollout] = {}  # those that no state has
        self._num_replaced = 0  # Buffers
        self._snapshots = Snapshots(trainers, launcher)
        self._saver: Saver | None = None
        self._start: Checkpoint | None = None
        self._last = -1  # the last rollout whose training is finished
        self._gone: set[int] = set()  # devices (bundles) of nodes that are dead
        self._failed_starts = Counter[int]()  # device → how often its rank died while it started
        self._open = 0  # calls in which trainers that are ended come back
        self._stalled = ""  # what the watchdog said of the trainers that it ended
        self._is_setting_up = False
        self.is_behind = False
        """The ranks may have older weights than those of the last finished step: they did not come back."""

    @property
    def _keeps(self) -> bool:
        """Whether a state will have the rollouts, so that their shards are kept until then."""
        options = self._config.checkpoint
        return bool(self._interval) or (self._can_return and bool(options.save_interval) and not options.no_save)

    def begin(self, saver: Saver, start: Checkpoint | None) -> None:
        """The run is set up, from this checkpoint or from its beginning."""
        self._saver, self._start = saver, start
        if self._interval and (lacking := self._snapshots.lacking(self._config)):
            self._take_no_more(lacking)
        self._last = -1 if start is None else start.rollout_id

    def _take_no_more(self, why: str) -> None:
        logger.warning("no snapshots are taken: %s; trainers come back from the last checkpoint", why)
        self._interval = 0
        self._snapshots.stop()
        if not self._keeps:
            self._kept = {}

    # ------------------------------------------------------------------------------------ steps
    def train(self, rollout: Rollout) -> dict[str, float]:
        """Take the optimizer steps of a rollout; see `TrainerGroups.train`."""
        if self._keeps:
            self._forget_lost_shards()
            self._kept[rollout.rollout_id] = replace(rollout, cursor=None)  # its prompts are not needed
        metrics = self.retry(lambda: self._train(rollout))
        self._last = rollout.rollout_id
        return metrics

    def _forget_lost_shards(self) -> None:
        if self._num_replaced != self._buffer.num_replaced:  # with a Buffer go the shards that it made
            self._num_replaced, self._kept = self._buffer.num_replaced, {}

    def _train(self, rollout: Rollout) -> dict[str, float]:
        return self._trainers.train(rollout.rollout_id, rollout.shards, rollout.auxiliary_shards)

    def take_snapshot_if_due(self, rollout_id: int) -> None:
        """Begin to take one after every --snapshot-interval rollouts; does not wait."""
        if self._interval and (rollout_id + 1) % self._interval == 0 and self._trainers.trained:
            self._snapshots.begin(rollout_id)
            if self._snapshots.num_failed >= _MOST_FAILED:  # else all shards since the last one would be kept
                self._take_no_more(f"{_MOST_FAILED} in a row failed")
        newest = self._newest_id()
        self._snapshots.forget_before(newest)
        self._kept = {number: rollout for number, rollout in self._kept.items() if number > newest}

    def _newest_id(self) -> int:
        """The last rollout that a snapshot or a checkpoint has; -1: the beginning of the run."""
        ids = [state.rollout_id for state in (self._snapshots.newest, self._newest_checkpoint) if state is not None]
        return max(ids, default=-1)

    @property
    def _newest_checkpoint(self) -> Checkpoint | None:
        return (self._saver.published if self._saver is not None else None) or self._start

    # ------------------------------------------------------------------------------------ failures
    def retry(self, call: Callable[[], T], *, of_engines: bool = False) -> T:
        """Return what `call` returns; where trainers fail in it, they come back and it is called again.

        Raises its error where they do not: another process or a user's function has failed, too many restarts, or no
        state from which the trained rollouts can be trained again. `of_engines`: engines work in the call, or
        have the devices that trainers share with them, so that trainers would have no room to start.
        """
        may_come_back = self._can_return and not (of_engines and self._trainers.plan.takes_turns)
        self._open += may_come_back
        try:
            while True:
                try:
                    return call()
                except FAILURES as error:
                    if not may_come_back:
                        raise
                    self._bring_back(error, of_engines)
        finally:
            self._open -= may_come_back

    def end_stalled(self, line: str) -> bool:
        """End trainers for which the driver has waited too long: its wait fails, and they come back. For any thread.

        Returns False where they would not come back, or cannot be ended.
        """
        if not self._open:
            return False
        self._stalled = line
        try:
            end_on_nodes(self._launcher.registry.processes(self._trainers.policy + self._trainers.auxiliaries))
        except FAILURES:
            logger.exception("the trainers that stall could not be ended")
            return False
        return True

    def _bring_back(self, error: Exception, of_engines: bool) -> None:
        is_starting = False
        while (cause := self._cause(error, is_starting, of_engines and not is_starting)) is not None:
            self._check_state(error)
            self._launcher.restarts.begin("trainers", cause, self._last)
            self.is_behind = True
            try:
                with phase("bring trainers back"):
                    self._restart()
                self.is_behind = False
                return
            except FAILURES as again:
                error, is_starting = again, True
        raise error

    def _cause(self, error: Exception, is_starting: bool, of_engines: bool) -> Exception | None:
        """Return what has failed in the trainers, if `error` follows from it.

        Where the rank of a device died twice while it started, or failed in its setup, the next start does without that
        device. Where engines take part, a connection that broke may be theirs.
        """
        stalled, self._stalled = self._stalled, ""
        if isinstance(error, NoStart):
            return error
        if stalled:
            from fusionrl.runtime.watchdog import Stalled  # not where a run is in one process

            return Stalled(stalled)
        raised, is_in_setup = root_cause(error), is_starting and self._is_setting_up
        if not self._launcher.is_running or isinstance(raised, HookError):
            return None
        if isinstance(raised, _OF_USERS) and not is_in_setup:  # the same setup succeeded at the start of the run
            return None
        everyone = self._trainers.everyone
        death = self._launcher.registry.explain(error, among=[rank for group in everyone.values() for rank in group])
        answered = is_in_setup and death is None and isinstance(error, ray.exceptions.RayTaskError)
        if is_in_setup and not (answered and _is_of_peers(error)):
            actor = actor_of(error) if death is None else death.member.id
            for name, group in everyone.items():
                places = zip(group, self._trainers.bundles[name], strict=True)
                self._failed_starts.update(bundle for rank, bundle in places if rank._actor_id.hex() == actor)
        if answered:
            return NoStart(f"a trainer does not start again: {raised}")
        if death is None:
            return error if self._is_away(error) or (not of_engines and _is_broken(error)) else None
        return death

    def _check_state(self, error: Exception) -> None:
        """Raise `error` where no state leads to the weights that were lost."""
        self._snapshots.settle()
        self._forget_lost_shards()
        missing = set(range(self._newest_id() + 1, self._last + 1)) - self._kept.keys()
        if missing:
            logger.error(
                "the trainers cannot come back: no snapshot or checkpoint has step %d, and its samples are gone"
                " (--snapshot-interval 1 keeps one after every step)",
                min(missing) + 1,
            )
            raise error

    def _restart(self) -> None:
        start, groups, launcher = time.perf_counter(), self._trainers, self._launcher
        ended = groups.policy + groups.auxiliaries
        end_on_nodes(launcher.registry.processes(ended))
        for trainer in ended:
            ray.kill(trainer)
        launcher.registry.forget(ended)
        self._gone = launcher.find_places(self._gone)
        if groups.plan.backend == "gloo":  # NCCL may wait for the ranks that are gone
            for engine in self._engines.everyone:
                engine.leave_groups.remote()
        self._buffer.forget_columns()
        assert self._saver is not None, "begin comes first"
        self._saver.reset()
        groups.plan = self._plan_of_rest()
        self._is_setting_up = True
        with phase("start trainers again"):
            groups.policy, groups.auxiliaries = launcher.make_trainers(groups.plan)
            self._wait_for_processes()
            groups.start()
        self._is_setting_up = False
        with phase("restore trainers"):
            newest = self._put_state()
        again = [self._kept[number] for number in range(newest + 1, self._last + 1)]
        for rollout in again:
            with phase("train again", step=rollout.rollout_id + 1):
                self._train(rollout)
            if self._config.run.mode == "rl":
                self._buffer.add_trained(rollout.rollout_id, groups.sample_columns(rollout.rollout_id))
        self._failed_starts.clear()
        logger.warning(
            "the trainers are back after %.1f s, on %s, with the weights of step %d%s",
            time.perf_counter() - start,
            counted(len(groups), "device"),
            newest + 1,
            f"; trained again: {counted(len(again), 'step')}" if again else "",
        )

    def _plan_of_rest(self) -> Plan:
        """Return the plan without devices whose ranks do not start, if one fits on the others; else with them.

        Raises RuntimeError where none fits on the devices of nodes that live.
        """
        plan, doubtful = self._trainers.plan, {device for device, count in self._failed_starts.items() if count > 1}
        with suppress(ValueError):
            return remaining_plan(plan, self._gone | doubtful)
        try:
            return remaining_plan(plan, self._gone)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def _wait_for_processes(self) -> None:
        """Raise NoStart where one does not start; its device is left out from here on, if a smaller layout fits."""
        limit_s, stall_s = _START_S, self._config.run.stall_timeout_s
        if stall_s is not None:  # after which the watchdog would end them, and their devices stay
            limit_s = min(limit_s, 0.8 * stall_s)
        places: dict[ray.ObjectRef, int] = {}
        for name, group in self._trainers.everyone.items():
            for trainer, bundle in zip(group, self._trainers.bundles[name], strict=True):
                places[trainer.hardware_facts.remote()] = bundle
        deadline, late = time.monotonic() + limit_s, list(places)
        with waiting(lambda: late):
            while late and time.monotonic() < deadline:
                _, late = ray.wait(list(places), num_returns=len(places), timeout=_LOOK_S)
                gone = devices_gone(self._launcher.bundles) if late else set()
                if not gone.isdisjoint(places.values()):  # Ray would wait for another node
                    raise NoStart("a node died while trainers started on it")
        if late:
            self._failed_starts.update({places[reference]: 2 for reference in late})
            raise NoStart(f"no trainer has started on {counted(len(late), 'device')} within {limit_s:.0f} s")

    def _put_state(self) -> int:
        """Give the trainers the newest state, and return its rollout."""
        groups, snapshot, checkpoint = self._trainers, self._snapshots.newest, self._newest_checkpoint
        newest = self._newest_id()
        if snapshot is not None and snapshot.rollout_id == newest:
            try:
                groups.restore(snapshot.plan, snapshot.states)
                return newest
            except ray.exceptions.RayTaskError as error:
                if not isinstance(root_cause(error), ray.exceptions.ObjectLostError):
                    raise
                self._snapshots.newest = None
                # Other ranks have their part, and wait for all in a collective: no rank can take another state now.
                raise NoStart(f"the snapshot after step {newest + 1} is lost with its node") from error
        if checkpoint is not None:
            groups.finish("load", checkpoint.path, wait=groups.wait_for)
        return newest

    def _is_away(self, error: BaseException) -> bool:
        """Return whether the node of a trainer does not answer, before it is known to be dead."""
        ids = {trainer._actor_id.hex() for group in self._trainers.everyone.values() for trainer in group}
        errors = (link for link in chain(error) if isinstance(link, ray.exceptions.ActorUnavailableError))
        return any(link.actor_id in ids for link in errors)


def _is_of_peers(error: BaseException) -> bool:
    """Return whether a rank has failed because another one did."""
    types = _BROKEN_TYPES - {"AcceleratorError"}
    cause = root_cause(error)
    return type(cause).__name__ in types or any(words in f"{error} {cause}" for words in _OF_PEERS)


def _is_broken(error: BaseException) -> bool:
    """Return whether torch's communication, or a device, has failed in a rank that is still alive."""
    text, cause = str(error), root_cause(error)
    if any(words in text for words in _OF_CODE):
        return False
    return type(cause).__name__ in _BROKEN_TYPES or any(words in text for words in _BROKEN)
