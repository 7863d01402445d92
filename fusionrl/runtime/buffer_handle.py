"""`BufferHandle`: the driver's end of the Buffer actor. Starting a rollout is apart from waiting for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from fusionrl.buffer.evaluation import MixedVersions
from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.user_code import HookError
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.supervisor import Supervisor, root_cause
from fusionrl.weights.remote_calls import get, wait

logger = logging.getLogger(__name__)

_ADD_TIMEOUT_S = 5.0  # for the Buffer to write the last of what training found out about samples


@dataclass(frozen=True)
class PendingRound:
    """A rollout or an evaluation that is under way; `BufferHandle.wait_…` waits for it, supervised."""

    ref: ray.ObjectRef
    faults: dict[str, float]  # counted until it began


class EvaluationLost(RuntimeError):
    """An evaluation failed because its engines died."""

    def __init__(self, num_died: int, cause: BaseException) -> None:
        first_line = next(iter(str(cause).splitlines()), type(cause).__name__)  # the rest is a user's traceback
        super().__init__(f"{num_died} of its engines died: {first_line:.300}")
        self.num_died = num_died


def _is_fault_of_code(error: BaseException) -> bool:
    """Return whether an evaluation would end with `error` on any engine."""
    return error.is_own_fault if isinstance(error, HookError) else isinstance(error, MixedVersions | ValueError)


class BufferHandle:
    """Rollouts and evaluations, with what dies meanwhile; other methods of `actor` are called without it."""

    def __init__(self, engines: EnginePool, supervisor: Supervisor) -> None:
        self._engines, self._supervisor = engines, supervisor
        self._actor: ActorHandle | None = None
        self._adding: ray.ObjectRef | None = None  # of the last `add_trained`

    @property
    def is_started(self) -> bool:
        return self._actor is not None

    @property
    def actor(self) -> ActorHandle:
        assert self._actor is not None, "the Buffer has not been started"
        return self._actor

    def start(self, actor: ActorHandle) -> ray.ObjectRef:
        """Take over the actor, and start the preparation that needs no engines. Return its reference."""
        self._actor = actor
        return actor.prepare.remote()

    # ------------------------------------------------------------------------------------ rounds
    def start_rollout(self, rollout_id: int, version: int) -> PendingRound:
        """Begin a rollout; the engines have to be ready for it, with weights of `version`. Does not wait."""
        return self._begin(self.actor.generate.remote, rollout_id, version)

    def next_rollout(self, rollout_id: int) -> PendingRound:
        """Begin to wait for a rollout of the stream (`fusionrl.buffer.stream`)."""
        return self._begin(self.actor.next_rollout.remote, rollout_id)

    def wait_rollout(self, started: PendingRound) -> Rollout:
        """Wait for a rollout. If an engine dies meanwhile, its death is raised and not the consequences."""
        try:
            rollout: Rollout = self._supervisor.wait(started.ref)
        finally:  # a function that was refused may well have failed
            self._warn_of_refusals()
        _add_faults(rollout.metrics, "rollout", started.faults, self._engines.count_faults())
        for text in rollout.warnings:
            logger.warning("%s", text)
        return rollout

    def start_evaluation(self, step: int, version: int | None) -> PendingRound:
        """Begin an evaluation on every set, of weights of `version` (None: as loaded). Does not wait."""
        if self._engines.evaluation.engines:  # a round of its own
            return PendingRound(self.actor.evaluate.remote(step, version), self._engines.evaluation.count_faults())
        return self._begin(self.actor.evaluate.remote, step, version)

    @staticmethod
    def is_done(started: PendingRound) -> bool:
        """Return whether the wait for it would end at once."""
        return bool(wait([started.ref], timeout=0)[0])

    def wait_evaluation(self, started: PendingRound) -> dict[str, float]:
        """Wait for the metrics of an evaluation, as of a rollout.

        Raises EvaluationLost if an engine that only evaluates died meanwhile, no other took over, and a new one starts.
        HookError and ValueError come in Ray's wrapping: a fault of a user's function, which would fail again.
        """
        has_own = bool(self._engines.evaluation.engines)
        if has_own:
            self._engines.begin_round()  # a health check may have met the last push
        try:
            metrics: dict[str, float] = self._supervisor.wait(started.ref)
        except ray.exceptions.RayTaskError as error:
            died = self._engines.evaluation.count_faults() if has_own else {}
            num_died = int(died.get("engines_died", 0.0) - started.faults.get("engines_died", 0.0))
            if not num_died or _is_fault_of_code(root_cause(error)):
                raise
            raise EvaluationLost(num_died, root_cause(error)) from error
        finally:
            self._warn_of_refusals()
        engines = self._engines.evaluation if has_own else self._engines
        _add_faults(metrics, "eval", started.faults, engines.count_faults())
        return metrics

    def _begin(self, method: ray.remote_function.RemoteFunction, *numbers: int | None) -> PendingRound:
        """Start a method of the actor that uses the engines. Does not wait."""
        faults = self._engines.count_faults()
        ref = method(*numbers)
        self._engines.begin_round()
        return PendingRound(ref, faults)

    def _warn_of_refusals(self) -> None:
        for router in (self._engines.router, self._engines.evaluation.router):
            if router is not None:
                router.warn_of_refusals()

    # ------------------------------------------------------------------------------------ data
    def add_trained(self, rollout_id: int, columns: Sequence[ray.ObjectRef]) -> None:
        """Let the Buffer write what training found out about single samples; does not wait for it."""
        if self._adding is not None:
            get(self._adding)
        self._adding = self.actor.add_trained.remote(rollout_id, list(columns))

    def close(self) -> None:
        """Give the Buffer some seconds to write the last samples that it received."""
        if self._adding is not None:
            wait([self._adding], timeout=_ADD_TIMEOUT_S)  # its failure may be the consequence of another
        self._actor = self._adding = None


def _add_faults(metrics: dict[str, float], prefix: str, before: dict[str, float], now: dict[str, float]) -> None:
    """Add the faults since `before`; the rollout has counted the retries of its own client."""
    for name, count in now.items():
        key = f"{prefix}/{name}"
        metrics[key] = metrics.get(key, 0.0) + count - before.get(name, count)
