"""The stream of a rollout function of one's own: it makes whole batches, and its data source gives permits.

The function runs in a thread, call after call. What it draws is admitted by the controller (`get_samples` gives fewer
groups where the bound says so, or none), what it hands back is parked, and what it returns is ready to be trained, in
the order in which it was drawn. So a function that keeps groups under way from call to call keeps the bound as well.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from fusionrl.buffer.ages import check_bound, check_not_older, oldest_version
from fusionrl.buffer.border import HookBorder
from fusionrl.buffer.drawn import Drawn, DrawnGroups
from fusionrl.buffer.permits import PermitSource
from fusionrl.buffer.stream import Groups, GroupSource, Stream, why_failed
from fusionrl.buffer.stream_saved import Held, SavedStream
from fusionrl.control import events
from fusionrl.control.apply import apply
from fusionrl.control.decide import all_fetched, decide, engine_actions, latecomers, permits, push_is_due, trainable
from fusionrl.control.knobs import Knobs
from fusionrl.data.sample import Sample
from fusionrl.rollout.types import RolloutAborted

logger = logging.getLogger(__name__)

DROPPED = "rollout/dropped_"
MOST_CALLS = 10  # that return without a group that the trainers wait for, before it is given up
Call = Callable[[int, PermitSource], tuple[Groups, dict[str, float]]]
"""Calls the function for a rollout; returns its groups, scored and filtered, and its metrics."""


class BatchStream(Stream):
    """See the module."""

    def __init__(
        self,
        knobs: Knobs,
        border: HookBorder,
        source: GroupSource,
        call: Call,
        first_version: int = 0,
        saved: SavedStream | None = None,
        *,
        where: str,
        hooked: object,
        asks_again: bool,
        abort: threading.Event,
    ) -> None:
        """As `Stream`.

        call        of the user's function
        where       its flag and path, as messages begin
        hooked      the data source that the permits stand before
        asks_again  the function may get fewer groups than it wants, or none, and asks again later
        abort       tells the function that the run ends
        """
        # A call makes a whole batch, so a lead of half a batch is one of a batch. The function's own limit of
        # requests holds.
        lead = float(min(math.ceil(knobs.lead), knobs.max_staleness))
        super().__init__(replace(knobs, lead=lead, max_samples_in_flight=1 << 30), border, source, first_version, saved)
        self._made_by, self._where, self._abort = call, where, abort
        self._permits = PermitSource(self, hooked, asks_again=asks_again)
        self._drawn_groups = DrawnGroups()
        self._metrics: dict[str, float] = {}
        self._is_calling, self._num_empty = False, 0  # calls without a group, one after the other
        self._may_call = threading.Event()
        self._caller = threading.Thread(target=self._call_on, name="rollout function", daemon=True)

    # ------------------------------------------------------------------------------------ the function's thread
    def stop(self) -> None:
        """End everything; a function that does not hear of it is ended with the process."""
        self._abort.set()
        self._permits.end()
        self._is_ending = True
        self._may_call.set()
        super().stop()
        if self._caller.is_alive():
            self._caller.join(5.0)

    def _call_on(self) -> None:
        """Call the function whenever it may be."""
        self._permits.begin_call()
        try:
            while True:
                self._may_call.wait()
                if self._is_ending:
                    return
                self._may_call.clear()
                groups, metrics = self._made_by(self._call(self._next_batch), self._permits)
                if self._drawn_groups:
                    gc.collect()  # what it dropped may still hang in cycles of its tasks
                self._call(self._take, groups, metrics)
                del groups, metrics
        except RolloutAborted as error:
            if not self._is_ending:
                self._fail_with(error)
        except BaseException as error:  # of a user's function: the run ends with it
            self._fail_with(error)

    def _fail_with(self, error: BaseException) -> None:
        def fail() -> None:
            self._failed.append(error)
            self._wake.set()

        with self._lock:
            if not self._has_ended:
                self._loop.call_soon_threadsafe(fail)

    # ------------------------------------------------------------------------------------ the stream's thread
    async def _main(self, started: Future[None]) -> None:
        self._failed = []
        self._args = self._border.args()
        self._caller.start()
        started.set_result(None)
        while not self._is_ending:
            self._proceed()
            if not self._is_calling and self._wants_call():
                self._is_calling = True
                self._may_call.set()
            await self._wake.wait()
            self._wake.clear()
            if self._failed:
                raise self._failed[0]

    def _admit(self, action: events.Admit) -> None:
        """Begin nothing: the function asks (`granted`)."""

    def _next_batch(self) -> int:
        """The rollout that the next call is for: the first that no groups are there for."""
        state = self.state
        num_groups = len(state.ended) - state.num_dropped + len(state.of("ready", "leased"))
        return num_groups // self.knobs.groups_per_fetch

    def _wants_call(self) -> bool:
        state, knobs = self.state, self.knobs
        if all_fetched(state, knobs) or not permits(state, knobs)[0]:
            return False
        if self._is_starving():
            return True
        batch = self._next_batch()
        is_last = knobs.num_fetches is not None and batch >= knobs.num_fetches
        return not is_last and batch // knobs.fetches_per_push <= state.version + knobs.lead

    def _is_starving(self) -> bool:
        """Return whether the driver waits for groups that are not there."""
        if self._answer is None or events.Fetch not in self._wanted:
            return False
        return not any(isinstance(action, events.Fetch | events.Stop) for action in decide(self.state, self.knobs))

    def granted(self, num_groups: int, *, beyond: bool) -> Groups:
        """Admit at most `num_groups` groups and return them; `beyond`: all of them, whatever the bound says."""
        return self._call(self._granted, num_groups, beyond)

    def handed_back(self, groups: Groups) -> Groups:
        """Park groups that the function has begun; returns those that it did not get here."""
        return self._call(self._hand_back, groups)

    def _granted(self, num_groups: int, beyond: bool) -> Groups:
        state, knobs, must_return = self.state, self.knobs, self._must_return()
        if must_return:  # it may begin all that can be trained in time
            knobs = replace(knobs, lead=float(knobs.max_staleness))
        pending, num_new = list[int](), 0
        for action in engine_actions(state, knobs):
            if isinstance(action, events.Admit):
                pending, num_new = list(action.pending[:num_groups]), action.num_new
        num_new = num_sound = min(num_new, num_groups - len(pending))
        if not pending and not num_new and not state.stream_ended and not state.pushing:
            # A call that waits for a whole batch has to have one under way, or it never returns.
            num_out = sum(one.ordinal in state.groups for one in self._drawn_groups)
            missing = max(0, knobs.groups_per_fetch - num_out) if must_return else 0
            num_new = num_groups if beyond else min(num_groups, missing)
            num_sound = trainable(state, knobs)
        given = [self._give(ordinal, self._live[ordinal].blank) for ordinal in pending]
        for place, group in enumerate(self._drawn(num_new)):
            given.append(self._give(self.state.next_ordinal, group, is_spare=place >= num_sound))
        self._wake.set()
        return given

    def _must_return(self) -> bool:
        """Return whether somebody waits for the call that is under way."""
        return self._is_starving() or (self._is_calling and push_is_due(self.state, self.knobs))

    def _give(self, ordinal: int, blank: list[Sample], *, is_spare: bool = False) -> list[Sample]:
        known = self.state.groups.get(ordinal)
        oldest = known.born if known is not None and known.begun else None
        apply(self.state, self.knobs, events.Admitted(ordinal, len(blank), oldest, is_spare))
        self._live[ordinal] = Held(blank)
        group = copy.deepcopy(blank)
        self._drawn_groups.add(ordinal, group)
        return group

    def _hand_back(self, groups: Groups) -> Groups:
        others = []
        for group in groups:
            out = self._drawn_groups.take(group)
            if out is None:
                others.append(group)
                continue
            if out.ordinal not in self.state.groups:
                continue  # it came too late
            self._live[out.ordinal] = Held(copy.deepcopy(group))
            self._happen(events.Parked(out.ordinal, oldest_version(group, self.knobs.fetches_per_push)))
        return others

    def _take(self, groups: Groups, metrics: dict[str, float]) -> None:
        """Take over what a call has returned."""
        self._is_calling = False
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value if name.startswith(DROPPED) else value
        self._num_empty = 0 if groups else self._num_empty + 1
        if self._num_empty >= MOST_CALLS:
            raise ValueError(
                f"{self._where}: {MOST_CALLS} calls, one after the other, gave no group that passes the filter"
            )
        for group in groups:
            self._take_group(group)
        for out in self._drawn_groups:
            out.num_calls += 1
            if not out.is_held:
                self._give_up(out, "filtered")
        self._give_up_lost()
        if self._drawn_groups and self.knobs.in_flight == "drain" and self.knobs.max_staleness:
            logger.warning("the rollout function keeps groups under way between its calls: pushes do not wait for them")
            self.knobs = replace(self.knobs, in_flight="retract")
        self._wake.set()

    def _take_group(self, group: list[Sample]) -> None:
        """Take over a group; one that was dropped meanwhile comes too late."""
        drawn, oldest = self._drawn_groups.take(group), oldest_version(group, self.knobs.fetches_per_push)
        if drawn is not None and drawn.ordinal not in self.state.groups:
            return
        failure = why_failed(group, replaces=self._args.failed_samples == "replace")
        if drawn is not None:
            ordinal = drawn.ordinal
            check_not_older(group, self.state.groups[ordinal].born * self.knobs.fetches_per_push)
        elif failure:  # the function has it from elsewhere, so it cannot be tried again
            self._dropped["failed"] += 1
            return
        else:
            check_bound([group], self._label, self.knobs)
            ordinal = self.state.next_ordinal
            apply(self.state, self.knobs, events.Admitted(ordinal, len(group), oldest, is_spare=True))
            self._live[ordinal] = Held([])
        self._tally.generated(ordinal, group)
        if failure:
            self._fail(ordinal, failure)
            return
        for _ in range(self.state.groups[ordinal].num_running):
            self._happen(events.SampleDone(ordinal))
        self._live[ordinal].made = group
        self._happen(events.GroupReady(ordinal, oldest))

    def _give_up(self, out: Drawn, reason: str) -> None:
        self._drawn_groups.forget(out)
        if out.ordinal in self.state.groups:
            self._drop(events.Drop(out.ordinal, "filtered"), reason)

    def _give_up_lost(self) -> None:
        """Give up groups that trainers wait for and many calls did not return."""
        if not self._is_starving():
            return
        state = self.state
        late = {group.ordinal for group in latecomers(state, self.knobs, [*state.of("ready"), *state.unready()])}
        for out in [out for out in self._drawn_groups if out.ordinal in late and out.num_calls >= MOST_CALLS]:
            logger.warning(
                "prompt %s: the rollout function has not returned it in %d calls; it is given up",
                self._live[out.ordinal].blank[0].index,
                out.num_calls,
            )
            self._give_up(out, "lost")

    def _new_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics
