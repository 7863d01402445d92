"""`BufferHandle`: the driver's end of the Buffer actor. Starting a rollout is apart from waiting for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

import ray

from fusionrl.base.wording import headline
from fusionrl.buffer.evaluation import MixedVersions
from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.user_code import HookError
from fusionrl.pipeline.knobs import Knobs
from fusionrl.runtime.buffer_calls import BufferCalls, PendingCall
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.supervisor import Supervisor, root_cause
from fusionrl.weights.remote_calls import get, wait

logger = logging.getLogger(__name__)

_ADD_TIMEOUT_S = 5.0  # for the Buffer to write the last of what training found out about samples


class EvaluationLost(RuntimeError):
    """An evaluation failed because its engines died."""

    def __init__(self, num_died: int, cause: BaseException) -> None:
        # After the first line comes a user's traceback.
        first_line = next(iter(headline(str(cause)).splitlines()), type(cause).__name__)
        super().__init__(f"{num_died} of its engines died: {first_line:.300}")
        self.num_died = num_died


def _is_fault_of_code(error: BaseException) -> bool:
    """Return whether an evaluation would end with `error` on any engine."""
    return error.is_own_fault if isinstance(error, HookError) else isinstance(error, MixedVersions | ValueError)


class BufferHandle(BufferCalls):
    """Rollouts and evaluations, with what dies meanwhile; other methods of `actor` are called without it."""

    def __init__(self, engines: EnginePool, supervisor: Supervisor, launcher: Launcher, knobs: Knobs | None) -> None:
        """`knobs`: of a pipeline that runs ahead."""
        super().__init__(launcher)
        self._engines, self._supervisor, self._knobs = engines, supervisor, knobs
        self._adding: PendingCall | None = None  # the last `add_trained`
        self._bring_weights: Callable[[int], None] | None = None

    # ------------------------------------------------------------------------------------ rounds
    def start_rollout(self, rollout_id: int, version: int) -> PendingCall:
        """Begin a rollout; the engines have to be ready for it, with weights of `version`. Does not wait."""
        self.last_done = rollout_id - 1
        return self._begin("generate", rollout_id, version)

    def next_rollout(self, rollout_id: int) -> PendingCall:
        """Begin to wait for a rollout of the stream (`fusionrl.buffer.stream`)."""
        return self._begin("next_rollout", rollout_id)

    def wait_rollout(self, started: PendingCall) -> Rollout:
        """Wait for a rollout. If an engine dies meanwhile, its death is raised and not the consequences."""
        try:
            rollout = cast("Rollout", self.wait(started, self._supervisor.wait))
        finally:  # a function that was refused may well have failed
            self._warn_of_refusals()
        self._cursors.add(rollout.rollout_id, rollout.cursor)
        _add_faults(rollout.metrics, "rollout", started.faults, self._engines.count_faults())
        for text in rollout.warnings:
            logger.warning("%s", text)
        return rollout

    def start_evaluation(self, step: int, version: int | None) -> PendingCall:
        """Begin an evaluation on every set, of weights of `version` (None: as loaded). Does not wait."""
        if self._engines.evaluation.engines:  # a round of its own
            return replace(self.ask("evaluate", step, version), faults=self._engines.evaluation.count_faults())
        return self._begin("evaluate", step, version)

    def wait_evaluation(self, started: PendingCall) -> dict[str, float]:
        """Wait for the metrics of an evaluation, as of a rollout.

        Raises EvaluationLost if an engine that only evaluates died meanwhile, no other took over, and a new one starts.
        HookError and ValueError come in Ray's wrapping: a fault of a user's function, which would fail again.
        """
        has_own = bool(self._engines.evaluation.engines)
        if has_own:
            self._engines.begin_round()  # a health check may have met the last push
        try:
            metrics = cast("dict[str, float]", self.wait(started, self._supervisor.wait))
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

    def _begin(self, method: str, *numbers: int | None) -> PendingCall:
        """Start a method of the actor that uses the engines. Does not wait."""
        faults = self._engines.count_faults()

        def begin() -> ray.ObjectRef:
            if method == "next_rollout":
                self._stream()
            return getattr(self.actor, method).remote(*numbers)

        started = PendingCall(begin(), self._actor, begin, faults)
        self._engines.begin_round()
        return started

    def _warn_of_refusals(self) -> None:
        for router in (self._engines.router, self._engines.evaluation.router):
            if router is not None:
                router.warn_of_refusals()

    # ------------------------------------------------------------------------------------ a stream
    def begin_stream(self, bring_weights: Callable[[int], None]) -> None:
        """Begin to generate without pause; `bring_weights(version)` lets the engines have weights of that version."""
        self._bring_weights = bring_weights
        self._stream()

    def _stream(self) -> None:
        """Begin the stream after the last rollout that is done, where a Buffer does not have it yet."""
        while not self._is_streaming:
            assert self._bring_weights is not None
            self._bring_weights(self.last_done + 1)
            self.call("begin_stream", self.last_done + 1)
            self._is_streaming = True

    def rollout_trained(self) -> bool:
        """Note that the last rollout is trained. Return whether a push is due; if so, wait until it may begin."""
        assert self._knobs is not None
        if self._is_streaming:
            try:
                is_due: bool = self._supervisor.wait(self.actor.rollout_trained.remote())
                return is_due
            except ray.exceptions.RayActorError as error:
                self._replace(self._actor, error)
        return (self.last_done + 1) % self._knobs.update_weights_interval == 0  # nothing is in flight

    def weights_pushed(self, version: int) -> None:
        """Tell the stream that the engines have new weights; one that died begins with them."""
        if self._is_streaming:
            try:
                get(self.actor.weights_pushed.remote(version))
            except ray.exceptions.RayActorError as error:
                self._replace(self._actor, error)
        self._stream()

    def end_stream(self) -> None:
        """End what is under way; there is nothing left to train."""
        if self._is_streaming:
            with suppress(ray.exceptions.RayActorError):
                self._supervisor.wait(self.actor.end_stream.remote())

    # ------------------------------------------------------------------------------------ data
    def validation_shards(self) -> dict[str, list[ray.ObjectRef]]:
        """--mode sft: set → one shard a rank."""
        return cast("dict[str, list[ray.ObjectRef]]", self.call("validation_shards"))

    def add_trained(self, rollout_id: int, columns: Sequence[ray.ObjectRef]) -> None:
        """Let the Buffer write what training found out about single samples; does not wait for it."""
        if self._adding is not None:
            self.wait(self._adding)  # a Buffer that replaced one that died does not know the rollout
        self._adding = self.ask("add_trained", rollout_id, list(columns))

    def forget_columns(self) -> None:
        """Do not wait for the last `add_trained`: the trainers that had the columns are gone."""
        self._adding = None

    def close(self) -> None:
        """Give the Buffer some seconds to write the last samples that it received."""
        if self._adding is not None:
            wait([self._adding.ref], timeout=_ADD_TIMEOUT_S)  # its failure may be the consequence of another
        self._actor = self._adding = None


def _add_faults(metrics: dict[str, float], prefix: str, before: dict[str, float], now: dict[str, float]) -> None:
    """Add the faults since `before`; the rollout has counted the retries of its own client."""
    for name, count in now.items():
        key = f"{prefix}/{name}"
        metrics[key] = metrics.get(key, 0.0) + count - before.get(name, count)
