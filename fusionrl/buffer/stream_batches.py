"""The stream of a user's rollout function, which makes whole batches of the groups that it draws.

The function runs in a thread, call after call. What it draws is admitted by the controller (`get_samples` gives fewer
groups where the bound says so, or none), what it hands back is parked, and what it returns is ready to be trained, in
the order in which it was drawn. So a function that keeps groups under way from call to call keeps the bound as well.

A group belongs to the call that drew it: one that the call neither returns nor hands back is dropped when it returns.
All groups of a function that says `keeps_groups = True` stay with the function until it returns them. Where it says
nothing, so do those that a thread of its own drew, as long as the thread lives.
"""

import asyncio
import copy
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fusionrl.buffer.collect import HookBorder, RolloutFunctions
from fusionrl.buffer.data_source import PromptSource
from fusionrl.buffer.stream import Groups, Stream, why_failed
from fusionrl.buffer.stream_state import SavedStream, StreamGroup, check_bound, check_not_older, oldest_version
from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.pipeline.controller import all_fetched, apply, decide, engine_actions, permits, push_is_due, trainable
from fusionrl.pipeline.knobs import NO_LIMIT, Knobs
from fusionrl.pipeline.state import Admit, Admitted, Drop, Fetch, GroupReady, Parked, SampleDone, Stop, Wait
from fusionrl.rollout.turn_versions import Turns
from fusionrl.rollout.types import RolloutAborted, RolloutFnTrainOutput, keeps_draws

logger = logging.getLogger(__name__)

DROPPED = "rollout/dropped_"
# With a call that waits for prompts while others wait for it. Then it gets some beyond the bound, and the oldest may be
# dropped for them; a busy machine needs a second or two to answer.
_PATIENCE_S = 3.0
MOST_CALLS = 10  # that return without a group that the trainers wait for, before it is given up
_LOOK_S = 0.05  # between two questions of a thread that waits
_MOST_EMPTY = 100  # answers without a group, in one turn of the asker's event loop, before it gets what it wants
IsKept = Callable[[], bool]  # whether a group stays with the function when a call returns
Draw = Callable[[int, IsKept, bool], Groups]  # at most as many groups; all of them, whatever the bound says, for True


# Whether the code that runs is part of a call: also in an event loop that the call hands a coroutine to, and not in a
# thread that it starts, which may outlive it.
_in_call: ContextVar[bool] = ContextVar("in_call", default=False)


class AdmissionSource:
    """Data source for a rollout function under a stream; `get_samples` and `add_samples` ask the controller.

    If no group may be admitted, `get_samples`
    - gives nothing to an event loop, which continues with its groups and asks again. A loop that only keeps asking
      would hang: it gets what it wants.
    - gives the thread of the call what it wants: it has dropped groups and cannot return without others.
    - makes any other thread wait.
    Groups given beyond the bound are dropped once they are too old.
    """

    def __init__(self, draw: Draw, park: Callable[[Groups], None], hooked: Any, keeps_groups: bool | None) -> None:
        """`draw` and `park` are the stream's; the latter gives groups that were not drawn here to the data source.

        `keeps_groups`: as the function says; one that keeps groups may get none at any time, and asks again.
        """
        self._draw, self._park, self._hooked, self._keeps_groups = draw, park, hooked, keeps_groups
        self._is_ending = threading.Event()
        self._caller: int | None = None  # thread of the call that is under way
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooked, name)

    def __len__(self) -> int:
        return len(self._hooked)

    def begin_call(self) -> None:
        """Note that the thread that calls this runs the function now."""
        self._caller = threading.get_ident()
        _in_call.set(True)

    def end(self) -> None:
        """End all waits."""
        self._is_ending.set()

    def get_samples(self, num_samples: int) -> Groups:
        """Return at most `num_samples` groups; see the class. RolloutAborted: the run ends."""
        if num_samples <= 0:
            return []
        keeps_all = bool(self._keeps_groups) or keeps_draws()
        is_kept: IsKept = lambda: keeps_all  # noqa: E731
        if not keeps_all and self._keeps_groups is None and not _in_call.get():
            is_kept = threading.current_thread().is_alive  # the thread of a pool ends with the call
        while True:
            if self._is_ending.is_set():
                raise RolloutAborted("the run ends")
            groups = self._draw(num_samples, is_kept, False)
            if groups or keeps_all:
                return groups
            loop = _running_loop()
            if loop is not None and not self._spins(loop):
                return []
            if loop is not None or threading.get_ident() == self._caller:
                groups = self._draw(num_samples, is_kept, True)
                if groups or loop is not None:
                    return groups
            time.sleep(_LOOK_S)

    def add_samples(self, samples: Groups) -> None:
        """Hand groups back, with what they have; they are given again first."""
        self._park(samples)

    def _spins(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the loop's thread has got nothing again and again without a turn of the loop."""
        seen = self._local
        if getattr(seen, "num_empty", 0) == 0:
            seen.num_empty = 0
            loop.call_soon(setattr, seen, "num_empty", 0)  # in its next turn
        seen.num_empty += 1
        if seen.num_empty < _MOST_EMPTY:
            return False
        seen.num_empty = 0
        return True


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@dataclass
class DrawnGroup:
    """A group that the function has."""

    ordinal: int
    group_index: int | None
    samples: list[weakref.ref[Sample]]  # as the function got them; it alone holds them
    is_kept: IsKept  # it stays with the function when a call returns
    num_calls: int = 0  # calls of the function that have returned without it while the trainers waited for it

    def holds_any(self, samples: list[Sample]) -> bool:
        return any(mine() is sample for mine in self.samples for sample in samples)


class DrawnGroups:
    """All groups that the function has, by their ordinals.

    keeps_all  the function has returned a group later than in the call that drew it, so it may keep any
    """

    def __init__(self) -> None:
        self.keeps_all = False
        self._drawn: dict[int, DrawnGroup] = {}
        self._ended: list[DrawnGroup] = []

    def __iter__(self) -> Iterator[DrawnGroup]:
        return iter(list(self._drawn.values()))

    def num_among(self, ordinals: Container[int]) -> int:
        return sum(ordinal in ordinals for ordinal in self._drawn)

    def add(self, ordinal: int, group: list[Sample], is_kept: IsKept) -> None:
        samples = [weakref.ref(sample) for sample in group]
        self._drawn[ordinal] = DrawnGroup(ordinal, group[0].group_index, samples, is_kept)

    def take(self, group: list[Sample]) -> DrawnGroup | None:
        """Forget the group that was drawn as this one, and return it; None: there is none. It may be other objects."""
        index = group[0].group_index
        for drawn in self:
            if drawn.holds_any(group):
                return self._drawn.pop(drawn.ordinal)
        for drawn in self:
            if index is not None and drawn.group_index == index:
                return self._drawn.pop(drawn.ordinal)
        return None

    def is_late(self, group: list[Sample]) -> bool:
        """Return whether it was forgotten when a call returned, by the samples themselves: numbers may be anybody's."""
        return any(drawn.holds_any(group) for drawn in self._ended)

    def end_call(self) -> list[DrawnGroup]:
        """Forget the groups that belong to the call that returns, and return them."""
        ended = [drawn for drawn in self if not self.keeps_all and not drawn.is_kept()]
        for drawn in ended:
            del self._drawn[drawn.ordinal]
        self._ended = [drawn for drawn in self._ended + ended if any(sample() is not None for sample in drawn.samples)]
        return ended


Call = Callable[[int, AdmissionSource], RolloutFnTrainOutput]
"""Calls the function for a rollout; returns its groups, scored and filtered."""


class BatchStream(Stream):
    """See the module."""

    def __init__(
        self,
        knobs: Knobs,
        border: HookBorder,
        source: PromptSource,
        first_version: int,
        saved: SavedStream | None,
        functions: RolloutFunctions,
        call: Call,
        abort: threading.Event,
    ) -> None:
        """As `Stream`; `call` calls the function of `functions`, and `abort` tells it that the run ends."""
        # A call makes a whole batch, so a lead of half a batch is one of a batch. The function's own limit of
        # requests holds.
        lead = float(min(math.ceil(knobs.admission_lead), knobs.max_staleness))
        knobs = replace(knobs, admission_lead=lead, max_samples_in_flight=NO_LIMIT)
        super().__init__(knobs, border, source, first_version, saved)
        self._made_by, self._where, self._abort = call, functions.where, abort
        draw, park = partial(self._call, self._draw_groups), partial(self._call, self._park_groups)
        self._permits = AdmissionSource(draw, park, source.hooked, functions.keeps_groups)
        self._drawn_groups = DrawnGroups()
        self._metrics: dict[str, float] = {}
        self._waits_since, self._patience_s = 0.0, _PATIENCE_S
        self._is_calling, self._num_empty = False, 0  # calls without a group, one after the other
        self._may_call = threading.Event()
        self._caller = threading.Thread(target=self._call_on, name="rollout function", daemon=True)

    def set_engines(self, urls: Sequence[str]) -> None:
        """Change nothing: each call gets new `args`, and its clients are its own."""

    # ------------------------------------------------------------------------------------ the function's thread
    def stop(self) -> None:
        """End everything; a function that ignores it ends with the process."""
        self._abort.set()
        self._permits.end()
        self._is_ending = True
        self._may_call.set()
        super().stop()
        if self._caller.is_alive():
            self._caller.join(5.0)

    def _call_on(self) -> None:
        self._permits.begin_call()
        try:
            while True:
                self._may_call.wait()
                if self._is_ending:
                    return
                self._may_call.clear()
                self._call(self._take, self._made_by(self._call(self._next_batch), self._permits))
        except BaseException as error:  # of a user's function: the run ends with it
            self._failed.append(error)
            with self._lock:
                if not self._has_ended:
                    self._loop.call_soon_threadsafe(self._wake.set)

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

    def _admit(self, action: Admit) -> None:
        """Begin nothing: the function asks (`_draw_groups`)."""

    def _next_batch(self) -> int:
        """The rollout that the next call is for: the first that no groups are there for."""
        state = self.state
        num_groups = len(state.ended) - state.num_dropped + len(state.of("ready", "leased"))
        return num_groups // self.knobs.groups_per_fetch

    def _wants_call(self) -> bool:
        state, knobs = self.state, self.knobs
        if all_fetched(state, knobs):
            return False
        num_drawn = self._drawn_groups.num_among(self.state.groups)
        if state.stream_ended and not num_drawn and not state.of("pending"):
            return False  # there is nothing to make a batch of
        if push_is_due(state, knobs) and knobs.in_flight == "drain" and num_drawn:
            return True  # the push waits for what a call can return
        if not permits(state, knobs)[0]:
            return False
        if self._is_starving():
            return True
        batch = self._next_batch()
        is_last = knobs.num_fetches is not None and batch >= knobs.num_fetches
        return not is_last and batch // knobs.update_weights_interval <= state.version + knobs.admission_lead

    def _is_starving(self) -> bool:
        if self._answer is None or Fetch not in self._wanted:
            return False
        return not any(isinstance(action, Fetch | Stop) for action in decide(self.state, self.knobs))

    def _draw_groups(self, num_groups: int, is_kept: IsKept, beyond: bool) -> Groups:
        state, knobs = self.state, self.knobs
        if all_fetched(state, knobs):
            return []  # the run needs no more
        must_return = self._is_starving() or (self._is_calling and push_is_due(state, knobs))
        if must_return:  # trainers wait for this call: it may start all groups that can be trained in time
            knobs = replace(knobs, admission_lead=float(knobs.max_staleness))
        pending, num_new = list[int](), 0
        for action in engine_actions(state, knobs):
            if isinstance(action, Admit):
                pending, num_new = list(action.pending[:num_groups]), action.num_new
        num_new = num_sound = min(num_new, num_groups - len(pending))
        if not pending and not num_new and not state.stream_ended and not state.pushing:
            # A call that waits for a whole batch has to have one under way, or it never returns.
            missing = self._num_missing() if must_return else 0
            num_new = num_groups if beyond else min(num_groups, missing)
            num_sound = trainable(state, knobs)
        groups = [self._give(ordinal, self._live[ordinal], is_kept) for ordinal in pending]
        for place, group in enumerate(self._draw_new(num_new)):
            groups.append(self._give(self.state.next_ordinal, StreamGroup(group), is_kept, place >= num_sound))
        if groups:
            self._waits_since = 0.0
        self._wake.set()
        return groups

    def _num_missing(self) -> int:
        """Return how many groups the call may lack to a batch, once it has waited for a while; 0 before.

        It may have dropped some of the groups that it drew, which nothing tells before it returns: so it gets twice as
        many after another while, and then ever later.
        """
        now = time.monotonic()
        if not self._waits_since:
            self._waits_since = now
        if now < self._waits_since + self._patience_s:
            return 0
        missing = max(
            round(self._patience_s / _PATIENCE_S),
            self.knobs.groups_per_fetch - self._drawn_groups.num_among(self.state.groups),
        )
        self._waits_since, self._patience_s = 0.0, 2 * self._patience_s
        return missing

    def _drop(self, action: Drop, reason: str | None = None, turns: Turns | str | None = None) -> None:
        blank = self._live[action.ordinal].blank
        if action.reason == "surplus" and blank:
            self._source.take_in([blank])  # it was admitted for the function's sake: its prompt comes again
        super()._drop(action, reason, turns)

    def _give(self, ordinal: int, held: StreamGroup, is_kept: IsKept, is_spare: bool = False) -> list[Sample]:
        known = self.state.groups.get(ordinal)
        oldest = known.born if known is not None and known.has_tokens else None
        apply(self.state, self.knobs, Admitted(ordinal, len(held.blank), oldest, is_spare))
        self._live[ordinal] = held
        group = copy.deepcopy(held.parked or held.blank)
        self._drawn_groups.add(ordinal, group, is_kept)
        return group

    def _park_groups(self, groups: Groups) -> None:
        unreturned = []
        for group in groups:
            out = self._drawn_groups.take(group)
            if out is None:
                unreturned.append(group)
                continue
            if out.ordinal not in self.state.groups:
                continue  # it came too late
            self._live[out.ordinal].parked = copy.deepcopy(group)
            self._happen(Parked(out.ordinal, oldest_version(group, self.knobs.update_weights_interval)))
        if unreturned:
            self._source.take_in(unreturned)

    def _take(self, output: RolloutFnTrainOutput) -> None:
        groups, metrics = output.samples, output.metrics
        self._is_calling = False
        self._waits_since, self._patience_s = 0.0, _PATIENCE_S
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value if name.startswith(DROPPED) else value
        self._num_empty = 0 if groups or self._drawn_groups.num_among(self.state.groups) else self._num_empty + 1
        if self._num_empty >= MOST_CALLS:
            raise ValueError(f"{self._where}: {MOST_CALLS} calls in a row gave no group that passes the filter")
        for group in groups:
            self._take_group(group)
        is_told = any(name.startswith(DROPPED) for name in metrics)  # by the function or its filter
        refused = [out for group in output.refused if (out := self._drawn_groups.take(group)) is not None]
        for out in [*refused, *self._drawn_groups.end_call()]:
            if out.ordinal in self.state.groups:
                self._drop(Drop(out.ordinal, "filtered"))
                if is_told:
                    self._dropped["filtered"] -= 1
        self._give_up_lost()
        keeps_some = self._drawn_groups.num_among(self.state.groups) > 0
        if keeps_some and self.knobs.in_flight == "drain" and self.knobs.max_staleness:
            logger.warning("the rollout function keeps groups under way between its calls: pushes do not wait for them")
            self.knobs = replace(self.knobs, in_flight="retract")
        self._wake.set()

    def _take_group(self, group: list[Sample]) -> None:
        """Take over a group; one that was dropped meanwhile comes too late."""
        drawn, oldest = self._drawn_groups.take(group), oldest_version(group, self.knobs.update_weights_interval)
        if drawn is not None and drawn.ordinal not in self.state.groups:
            return
        is_late = drawn is None and self._drawn_groups.is_late(group)
        if is_late and not self._drawn_groups.keeps_all:
            self._drawn_groups.keeps_all = True
            logger.warning(
                "%s: it returned sample %s, whose group an earlier call drew and did not return; all groups that it"
                " draws are now kept for it. Give it the attribute keeps_groups = True",
                self._where,
                group[0].index,
            )
        failure = why_failed(group, replaces=self._args.failed_samples == "replace")
        if drawn is not None:
            ordinal = drawn.ordinal
            check_not_older(group, self.state.groups[ordinal].born * self.knobs.update_weights_interval)
        elif failure:  # the function has it from elsewhere, so it cannot be tried again
            self._dropped["failed"] += 1
            return
        else:
            try:
                check_bound([group], self._label, self.knobs)
            except HookError:
                if is_late:
                    return
                raise
            ordinal = self.state.next_ordinal
            apply(self.state, self.knobs, Admitted(ordinal, len(group), oldest, is_spare=True))
            self._live[ordinal] = StreamGroup([])
        self._token_counts.generated(ordinal, group)
        if failure:
            self._fail(ordinal, failure)
            return
        for _ in range(self.state.groups[ordinal].num_running):
            self._happen(SampleDone(ordinal))
        self._live[ordinal].finished = group
        self._happen(GroupReady(ordinal, oldest))

    def _give_up_lost(self) -> None:
        """Give up groups that are due, that trainers wait for, and that many calls since then did not return."""
        waits = (action for action in decide(self.state, self.knobs) if isinstance(action, Wait))
        late = {ordinal for wait in waits if wait.reason == "deadline" for ordinal in wait.on}
        for out in self._drawn_groups:
            out.num_calls = out.num_calls + 1 if out.ordinal in late else 0
            if out.num_calls < MOST_CALLS:
                continue
            index = self._live[out.ordinal].blank[0].index
            logger.warning("sample %s and its siblings: not returned in %d calls, so given up", index, out.num_calls)
            self._drop(Drop(out.ordinal, "filtered"), "lost")  # if it comes back, it is known as too late

    def _new_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics
