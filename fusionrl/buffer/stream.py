"""The stream: groups are generated without pause, as the controller admits them, one client and one loop for the run.

It runs in a thread with an event loop of its own, and owns the controller's state. The driver asks for what is next
(`next_batch`, `trained`, `pushed`); generation and rewards continue meanwhile.
"""

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from fusionrl.buffer.collect import HookBorder
from fusionrl.buffer.cursor import Cursor, cursor_of
from fusionrl.buffer.data_source import PromptSource, images_in_states
from fusionrl.buffer.loop_thread import ScheduledLoop
from fusionrl.buffer.schedule import Schedule
from fusionrl.buffer.stream_state import (
    SavedStream,
    StreamClock,
    StreamGroup,
    TokenCounts,
    check_bound,
    check_not_older,
    fresh_state,
    oldest_version,
    packed,
    reason_of,
    state_numbers,
    unpacked,
    without_answer,
)
from fusionrl.config.engine_groups import has_pairs
from fusionrl.data.images import ImageRef
from fusionrl.data.sample import Sample, Status
from fusionrl.pipeline.controller import decide, engine_actions
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import (
    Action,
    Admit,
    Admitted,
    Drop,
    Fetch,
    GroupFailed,
    GroupReady,
    Push,
    Pushed,
    SampleDone,
    Started,
    Stop,
    StreamEnd,
    TrainDone,
    Wait,
)
from fusionrl.rollout.generate import SampleContext, flat_group, generate_group
from fusionrl.rollout.generate_state import request_counts, rollout_client, sampling_params
from fusionrl.rollout.request_seeds import SEEDED_BY_INDEX
from fusionrl.rollout.sglang_rollout import GroupFilter, open_teacher
from fusionrl.rollout.turn_versions import Turns, noting_turns

_STARTED = get_args(Started)
_FOR_DRIVER = (Fetch, Push, Stop)
_AT_ONCE = 64  # samples that begin in one turn of the loop: each takes half a millisecond, and answers wait meanwhile
_SHORT_S, _LONGEST_REST_S = 0.001, 0.05
Groups = list[list[Sample]]


@dataclass
class Batch:
    """What one fetch takes out of the stream.

    version  of the weights that train it, as engines and samples call it
    refused  groups that the filter refused since the batch before, where a hook wants to see them
    cursor   for a Buffer that takes this one's place; None: none can
    """

    groups: Groups
    version: int
    metrics: dict[str, float] = field(default_factory=dict)
    refused: Groups = field(default_factory=list)
    cursor: Cursor | None = None


class Stream(ScheduledLoop):
    """See the module. It ends with `stop`, or with the first error, which the driver's next call raises."""

    def __init__(
        self,
        knobs: Knobs,
        border: HookBorder,
        source: PromptSource,
        first_version: int = 0,
        saved: SavedStream | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        """Begin after `first_version` fetches; the engines' weights have it as their name. `saved`: by then.

        schedule  what happens is written there, and follows its record
        """
        super().__init__(fresh_state(knobs, first_version), knobs, schedule, first_version)
        self._border, self._source = border, source
        self._live: dict[int, StreamGroup] = {}
        if saved is not None:
            self.state, self._live = unpacked(saved, knobs, first_version)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._dropped: Counter[str] = Counter()  # since the last batch
        self._filter = GroupFilter(knobs.groups_per_fetch)
        self._refused: Groups | None = [] if border.hook("rollout_all_samples_process_path") else None
        self._retries: dict[str, float] = {}  # until the last batch
        self._wanted: tuple[type, ...] = ()
        self._answer: Future[Action | Batch] | None = None
        self._label = first_version  # of the engines' weights
        self._clock, self._token_counts = StreamClock(), TokenCounts()

    # ------------------------------------------------------------------------------------ the driver's end
    def next_batch(self) -> Batch:
        """Wait for the next fetch, and take its groups.

        Raises what a group raised, or ValueError if the data ended before the run, or too many groups failed.
        """
        batch = self._ask(Fetch, Stop)
        if isinstance(batch, Stop):
            raise ValueError(self.state.failure or f"--num-rollout: {batch.reason or 'there is nothing left to train'}")
        assert isinstance(batch, Batch)
        return batch

    def trained(self) -> bool:
        """Note that the last batch is trained. Returns whether weights are to be pushed now; after it call `pushed`."""

        def note() -> None:
            for ordinal in self.state.lease:
                del self._live[ordinal]
            self._happen(TrainDone())

        self._call(note, start=partial(self._when_due, TrainDone()))
        if self.state.num_trained % self.knobs.update_weights_interval:
            return False
        if isinstance(self._ask(Push, Stop), Stop):
            raise ValueError(self.state.failure)  # no other end comes before a push that is due
        return True

    def pushed(self, version: int) -> None:
        """Note that the engines have new weights, of the name `version`."""

        def note() -> None:
            self._label = version
            self._args.pushed_version = version
            self._happen(Pushed())

        self._call(note, start=partial(self._when_pushed, version))

    def waits_for(self) -> str:
        """Return which groups the trainers wait for and why; "" if they do not wait."""
        return self._call(lambda: describe_waits(decide(self.state, self.knobs), self._live))

    def set_engines(self, urls: Sequence[str]) -> None:
        """Send requests to these engines from now on: one that died is back at another address."""

        def change() -> None:
            self._args.engine_urls = list(urls)
            self._context = SampleContext.of_args(self._args)
            if not has_pairs(getattr(self._args, "engine_group", ())):  # none of which answers without the router
                self._client.set_engines(urls)

        self._call(change)

    def snapshot(self, rollout_id: int) -> tuple[dict[str, Any] | None, SavedStream, list[ImageRef]]:
        """Return the data source's state and what a checkpoint holds of the stream, after rollout `rollout_id`; images.

        That rollout is trained, and a later one is not: where one was fetched, its prompts come again. After an
        error has ended the stream, too: unfinished groups are generated again.
        """

        def now() -> tuple[dict[str, Any] | None, list[ImageRef], dict[str, Any], dict[int, StreamGroup]]:
            source = self._source.state_at(rollout_id)
            return source, images_in_states(source), self.state.to_dict(rollout_id + 1), dict(self._live)

        source, images, state, held = self._read(now)
        stream = packed(state, held, self.knobs)
        return source, stream, [*images, *images_in_states(stream)]

    # ------------------------------------------------------------------------------------ its own thread
    async def _main(self, started: Future[None]) -> None:
        args = self._border.args()
        args.rollout_id = self.state.num_trained
        setattr(args, SEEDED_BY_INDEX, True)  # the rollout changes with a batch, at no fixed place among the requests
        self._failed: list[BaseException] = []
        async with rollout_client(args) as client, open_teacher(args) as teacher:
            self._args, self._context, self._teacher = args, SampleContext.of_args(args), teacher
            self._client = client
            started.set_result(None)
            try:
                while not self._is_ending:
                    await asyncio.sleep(_rest_after(self._proceed))  # those that begin do so now
                    await self._wake.wait()
                    self._wake.clear()
                    if self._failed:
                        raise self._failed[0]
            finally:
                tasks = list(self._tasks.values())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _proceed(self) -> None:
        """Start all actions that may start; those for the driver only when it waits for one."""
        while True:
            self._release()
            actions = decide(self.state, self.knobs)
            for_driver = [action for action in actions if isinstance(action, _FOR_DRIVER)]
            is_asked = self._answer is not None and bool(for_driver) and isinstance(for_driver[0], self._wanted)
            if for_driver and not (is_asked and self._is_due(actions[0])):
                actions = engine_actions(self.state, self.knobs)  # meanwhile
            begun = False
            for action in actions:
                if isinstance(action, Admit):
                    self._admit(action)
                elif isinstance(action, Drop):
                    self._drop(action)
                    begun = True
                elif isinstance(action, _FOR_DRIVER):
                    begun |= self._tell(action)
            if not begun:
                reason = reason_of(actions) if self._answer is not None else None
                has_work = self.state.samples_in_flight > 0 and not self.state.pushing
                self._clock.note(time.monotonic(), reason, has_work)
                return

    def _tell(self, action: Action) -> bool:
        answer = self._answer
        assert answer is not None
        if isinstance(action, Fetch):  # before it is applied, so that the message names the sample
            check_bound([self._live[ordinal].finished for ordinal in action.ordinals], self._label, self.knobs)
        if isinstance(action, _STARTED):
            self._apply(action)
        self._answer = None
        # A batch is taken now, or its metrics would depend on when the driver's thread runs.
        answer.set_result(self._taken(action) if isinstance(action, Fetch) else action)
        return isinstance(action, _STARTED)

    def _admit(self, action: Admit) -> None:
        """Begin the first of the groups that may begin; the others in the loop's next turn."""
        most = max(1, _AT_ONCE // self.knobs.samples_per_group)
        if self._schedule is not None and self._schedule.next is not None:
            most = min(most, self._schedule.num_admitted_next())
            if not most:
                return
        pending = action.pending[:most]
        for ordinal in pending:
            self._begin(ordinal, self._live[ordinal].blank)
        for group in self._draw_new(min(action.num_new, most - len(pending))):
            self._begin(self.state.next_ordinal, group)
        self._wake.set()

    def _draw_new(self, num_groups: int) -> Groups:
        """Draw the next groups; where there are fewer, the data have ended."""
        drawn = self._source.draw(num_groups) if num_groups else []
        groups = [[without_answer(sample) for sample in group] for group in drawn]
        if len(groups) < num_groups:
            self._apply(StreamEnd())
        return groups

    def _begin(self, ordinal: int, blank: list[Sample]) -> None:
        group = copy.deepcopy(blank)
        num_samples = len(group) + self._context.needs_greedy_answer
        self._apply(Admitted(ordinal, num_samples))
        self._live[ordinal] = StreamGroup(blank)
        self._token_counts.began(ordinal, group)
        self._tasks[ordinal] = task = asyncio.create_task(self._make(ordinal, group, num_samples))

        def ended(task: asyncio.Task[None]) -> None:
            if self._tasks.get(ordinal) is task:  # else it is tried again meanwhile
                del self._tasks[ordinal]
            if not task.cancelled() and (error := task.exception()) is not None:  # the run ends with it
                self._failed.append(error)
                self._wake.set()

        task.add_done_callback(ended)

    async def _make(self, ordinal: int, group: list[Sample], num_samples: int) -> None:
        left = num_samples

        def generated() -> None:
            nonlocal left
            if left > 0 and ordinal in self.state.groups:
                left -= 1
                event = SampleDone(ordinal)
                self._when_due(event, lambda: self._happen(event))

        context = replace(self._context, on_generated=generated)
        turns = None if self._versions is None else self._versions.of_group(ordinal)
        try:
            with noting_turns(turns):
                samples = flat_group(await generate_group(context, group, sampling_params(self._args)))
            record = None if turns is None else turns.to_record()
            while left > 0 and ordinal in self.state.groups:  # samples that needed no engine
                generated()
            await self._end_is_due(ordinal)
            failure = why_failed(samples, replaces=self._args.failed_samples == "replace")
            refused = "" if failure else self._filter.refuses(context, samples)
            if not failure and not refused:
                if self._teacher is not None:
                    await self._teacher.add_log_probs(samples)
                if ordinal in self._live:
                    # By this version the controller has counted on it.
                    check_not_older(samples, self.state.groups[ordinal].born * self.knobs.update_weights_interval)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_ending or ordinal not in self._live or (task is not None and task.cancelling()):
                raise
            # Else the group would be under way for ever.
            raise RuntimeError(f"sample {group[0].index} and its siblings were cancelled from within") from None
        except Exception:  # of a user's function, or of the engines
            if ordinal in self._live:
                raise
            return  # a group that was dropped matters no more
        if ordinal not in self._live:
            return
        self._token_counts.generated(ordinal, samples)
        if failure:
            self._fail(ordinal, failure)
        elif refused:
            if self._refused is not None:
                self._refused.append(samples)
            self._drop(Drop(ordinal, "filtered"), refused, record)
        else:
            self._live[ordinal].finished = samples
            self._happen(GroupReady(ordinal, oldest_version(samples, self.knobs.update_weights_interval)), record)

    def _fail(self, ordinal: int, reason: str) -> None:
        """Note that a group cannot be trained: it is retried, or another group replaces it."""
        self._token_counts.dropped(ordinal)
        self._happen(GroupFailed(ordinal, reason))
        self._live[ordinal].parked = []  # it is tried again from its prompt
        if ordinal not in self.state.groups:
            self._dropped["failed"] += 1
            del self._live[ordinal]

    def _drop(self, action: Drop, reason: str | None = None, turns: Turns | str | None = None) -> None:
        self._dropped[reason or action.reason] += 1
        del self._live[action.ordinal]
        self._token_counts.dropped(action.ordinal)
        task = self._tasks.pop(action.ordinal, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._happen(action, turns)

    def _taken(self, fetch: Fetch) -> Batch:
        groups = []
        for ordinal in fetch.ordinals:
            held = self._live[ordinal]
            groups.append(held.finished)
            # One from elsewhere cannot be generated again: until it is trained, a checkpoint has it as it is now.
            kept = [] if held.blank else copy.deepcopy(held.finished)
            self._live[ordinal] = StreamGroup(held.blank, kept)
        counts = {f"rollout/dropped_{reason}": float(count) for reason, count in self._dropped.items()}
        self._dropped.clear()
        tokens = self._token_counts.take(
            dict(zip(fetch.ordinals, groups, strict=True)), self.knobs.in_flight != "in_place"
        )
        state = state_numbers(self.state, self.knobs) | tokens | self._clock.take(time.monotonic())
        self._args.rollout_id = fetch.fetch + 1  # hooks read it
        refused, self._refused = self._refused, None if self._refused is None else []
        cursor = cursor_of(self._source, self.state, self._live)
        return Batch(groups, self._label, self._new_metrics() | counts | state, refused or [], cursor)

    def _new_metrics(self) -> dict[str, float]:
        retries = request_counts(self._args, self._client, "rollout")
        new = {name: count - self._retries.get(name, 0.0) for name, count in retries.items()}
        self._retries = retries
        return new

    def _ask(self, *kinds: type) -> Action | Batch:
        """Wait until the controller decides on one of these kinds of action; for a fetch, return its batch."""
        answer: Future[Action | Batch] = Future()

        def ask() -> None:
            self._wanted, self._answer = kinds, answer
            self._wake.set()

        self._post(ask, answer)
        return answer.result()


def _rest_after(proceed: Callable[[], None]) -> float:
    """Decide, and return how long answers and requests have the loop to themselves after it, in seconds.

    A decision looks at every group: with thousands of them it takes milliseconds, and many answers wait for one.
    """
    start = time.perf_counter()
    proceed()
    spent = time.perf_counter() - start
    return min(4 * spent, _LONGEST_REST_S) if spent > _SHORT_S else 0.0


def why_failed(samples: list[Sample], *, replaces: bool) -> str:
    """Return why a group cannot be trained, "" where it can; `replaces`: one failed sample is enough."""
    failed = [sample for sample in samples if sample.status in (Status.FAILED, Status.ABORTED)]
    if not failed or not (replaces or len(failed) == len(samples)):
        return ""
    return f"{len(failed)} of {len(samples)} samples of prompt {samples[0].prompt!r:.60} failed"


_MOST_NAMED = 5  # groups


def describe_waits(actions: Iterable[Action], live: Mapping[int, StreamGroup]) -> str:
    """Return why the trainers wait and for which samples, and why the engines get nothing new; "" without a wait.

    live  ordinal → the samples of a group
    """
    why = {action.who: action for action in actions if isinstance(action, Wait)}
    trainers, engines = why.get("trainers"), why.get("engines")
    if trainers is None:
        return ""
    firsts = [live[ordinal].blank[0].index for ordinal in trainers.on if ordinal in live and live[ordinal].blank]
    named = ", ".join(map(str, firsts[:_MOST_NAMED])) + ", …" * (len(firsts) > _MOST_NAMED)
    plural = "s" * (len(firsts) != 1)
    groups = f" (waited for: {len(firsts)} group{plural}, of sample{plural} {named})" if firsts else ""
    return trainers.why + groups + (f"; engines get nothing new: {engines.why}" if engines is not None else "")
