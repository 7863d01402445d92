"""`BufferCalls`: calls of the Buffer actor, which outlive it.

A Buffer that dies is found by the next call of it, or by the one that waits. Another one takes its place, after the
last rollout that is done, and gets the call again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.buffer.cursor import BufferStart, Cursors
from fusionrl.weights.remote_calls import get

if TYPE_CHECKING:
    from fusionrl.runtime.launcher import Launcher


@dataclass
class PendingCall:
    """A call of the Buffer that is under way.

    begin   makes the call again, of a Buffer that replaced `actor`
    faults  counted until it began
    """

    ref: ray.ObjectRef
    actor: ActorHandle | None
    begin: Callable[[], ray.ObjectRef]
    faults: dict[str, float] = field(default_factory=dict)


class BufferCalls:
    """Makes the actor and calls it. `--max-restarts` says how often another one may take its place."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._actor: ActorHandle | None = None
        self._endpoints = EngineEndpoints()
        self._start, self._cursors = BufferStart(-1), Cursors()
        self._is_streaming = False
        self.last_done = -1
        """The last rollout that is trained, or done where nothing is trained: after it a new Buffer continues."""
        self.num_replaced = 0
        """Buffers that died: what they had put into the object store is gone."""

    @property
    def is_started(self) -> bool:
        return self._actor is not None

    @property
    def actor(self) -> ActorHandle:
        assert self._actor is not None, "the Buffer has not been started"
        return self._actor

    def start(self) -> ray.ObjectRef:
        """Make the actor, and start the preparation that needs no engines. Return its reference."""
        self._actor = self._launcher.make_buffer()
        return self._actor.prepare.remote()

    def setup(self, endpoints: EngineEndpoints) -> ray.ObjectRef:
        """Start to set the actor up. Return the reference."""
        self._endpoints = endpoints
        return self.actor.setup.remote(endpoints)

    def load(self, path: str, rollout_id: int) -> ray.ObjectRef:
        """Start to continue after a rollout, of whose checkpoint `path` is the Buffer's file. Return the reference."""
        self._start, self.last_done = BufferStart(rollout_id, checkpoint=path), rollout_id
        return self.actor.load.remote(path)

    def set_engines(self, urls: Sequence[str], eval_urls: Sequence[str]) -> None:
        """Tell it where the engines are."""
        self._endpoints = replace(self._endpoints, engine_urls=tuple(urls), eval_urls=tuple(eval_urls))
        try:
            get(self.actor.set_engines.remote(urls, eval_urls))
        except ray.exceptions.RayActorError as error:
            # One that is dead is replaced by the next call, which may come after a rollout that is being trained now.
            if not self._has_died(error, self._actor):
                raise

    @staticmethod
    def _has_died(error: ray.exceptions.RayActorError, actor: ActorHandle | None) -> bool:
        """Return whether `error` is the death of `actor`, and not that of an actor that was asked in the meantime."""
        dead = actor is not None and error.actor_id in (None, actor._actor_id.hex())
        return dead and not isinstance(error, ray.exceptions.RayTaskError)

    def _replace(self, dead: ActorHandle | None, error: ray.exceptions.RayActorError) -> None:
        """Replace the Buffer `dead` by another one, unless that was done already.

        Raises what it died of where --max-restarts is used up, or it had more than another one can continue with.
        """
        if not self._has_died(error, dead):
            raise error
        if dead is not self._actor:
            return
        cause = self._launcher.registry.explain(error, among=[dead]) or error
        cursor = self._cursors.get(self.last_done)
        if cursor is None and self.last_done != self._start.rollout_id:
            raise cause
        self._launcher.restarts.begin("buffer", cause, self.last_done)
        ray.kill(dead)
        self._is_streaming = False
        self.num_replaced += 1
        self._actor = self._launcher.make_buffer()
        place = self._start if cursor is None else BufferStart(self.last_done, cursor)
        try:
            get(self._actor.setup.remote(self._endpoints, place))
        except ray.exceptions.RayActorError as again:
            self._replace(self._actor, again)

    # ------------------------------------------------------------------------------------ calls
    def ask(self, method: str, *arguments: object) -> PendingCall:
        """Start a call. Does not wait."""

        def begin() -> ray.ObjectRef:
            return getattr(self.actor, method).remote(*arguments)

        return PendingCall(begin(), self._actor, begin)

    def wait(self, started: PendingCall, wait: Callable[[ray.ObjectRef], object] = get) -> object:
        """Wait for a call; where the Buffer dies, for that of the one that takes its place."""
        while True:
            try:
                return wait(started.ref)
            except ray.exceptions.RayActorError as error:
                self._begin_again(started, error)

    def _begin_again(self, started: PendingCall, error: ray.exceptions.RayActorError) -> None:
        self._replace(started.actor, error)
        started.ref = started.begin()
        started.actor = self._actor

    def is_done(self, started: PendingCall) -> bool:
        """Return whether the wait for it would end at once. Of a Buffer that died in it, it begins again."""
        if not ray.wait([started.ref], timeout=0)[0]:
            return False
        try:
            get(started.ref)
        except ray.exceptions.RayTaskError:
            return True
        except ray.exceptions.RayActorError as error:
            self._begin_again(started, error)
            return False
        return True

    def check(self, timeout_s: float) -> None:
        """Raise TimeoutError if the Buffer hangs: it does not answer within `timeout_s` seconds."""
        try:
            self.wait(self.ask("prepare"), partial(get, timeout=timeout_s))
        except TimeoutError:
            raise TimeoutError(f"the Buffer does not answer within {timeout_s:.0f} s") from None

    def call(self, method: str, *arguments: object) -> object:
        """Make a call, and wait for it."""
        return self.wait(self.ask(method, *arguments))
