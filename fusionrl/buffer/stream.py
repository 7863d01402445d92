"""The stream: groups are generated without pause, as the controller admits them, one client and one loop for the run.

It runs in a thread with an event loop of its own, and owns the controller's state. The driver asks for what is next
(`next_batch`, `trained`, `pushed`); everything else, engines' work and rewards, goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, get_args

import numpy as np

from fusionrl.buffer.border import HookBorder
from fusionrl.config.hooks import HookError
from fusionrl.control import events
from fusionrl.control.apply import apply
from fusionrl.control.decide import decide, engine_actions
from fusionrl.control.knobs import Knobs
from fusionrl.control.state import Ended, State
from fusionrl.data.sample import UNKNOWN_VERSION, Sample, response_mask
from fusionrl.rollout.client import RolloutClient
from fusionrl.rollout.samples import GroupContext, apply_filter, generate_group
from fusionrl.rollout.sglang_rollout import check_filter_keeps
from fusionrl.rollout.state import sampling_params
from fusionrl.rollout.teacher import Teacher

_BEGUN = get_args(events.Begun)
_FOR_DRIVER = (events.Fetch, events.Push, events.Stop)
_AT_ONCE = 64  # samples that begin in one turn of the loop: each takes half a millisecond, and answers wait meanwhile
_JOIN_S = 30.0  # for the tasks under way to end when they are cancelled
_ENDED = "the stream has ended"
Groups = list[list[Sample]]
T = TypeVar("T")


class GroupSource(Protocol):
    """The part of the prompt source that the stream uses, in its own thread alone."""

    def draw(self, num_groups: int) -> Groups:
        """Return the next groups; fewer where the data have ended."""

    def state(self) -> dict[str, object] | None:
        """Return the state of now."""


@dataclass
class Batch:
    """What one fetch takes out of the stream.

    version  of the weights that train it, as engines and samples call it
    ahead    the groups that are under way or ready, as they came from the data, in its order
    state    of the data source at that moment
    """

    groups: Groups
    version: int
    ahead: Groups
    state: dict[str, object] | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Live:
    """A group under way: as it came from the data, and its task."""

    blank: list[Sample]
    task: asyncio.Task[None] | None = None
    made: list[Sample] = field(default_factory=list)


class Stream:
    """See the module. It ends with `stop`, or with the first error, which the driver's next call raises."""

    def __init__(self, knobs: Knobs, border: HookBorder, source: GroupSource, first_version: int = 0) -> None:
        """`first_version`: fetches that were trained before this run; the engines' weights have it as their name."""
        self.knobs = knobs
        num_before = first_version * knobs.groups_per_fetch
        self.state = State(
            ended=Ended(num_before),
            next_ordinal=num_before,
            version=first_version // knobs.fetches_per_push,
            num_fetched=first_version,
            num_trained=first_version,
        )
        self._border, self._source = border, source
        self._live: dict[int, _Live] = {}
        self._dropped: Counter[str] = Counter()  # since the last batch
        self._num_dropped: Counter[str] = Counter()  # by the filter, of the whole run
        self._num_kept = 0
        self._retries: dict[str, float] = {}  # until the last batch
        self._wanted: tuple[type, ...] = ()
        self._answer: Future[events.Action] | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._lock = threading.RLock()  # of the two that follow; a future that ends takes itself off
        self._has_ended = False
        self._asked: set[Future[Any]] = set()  # what the driver waits for
        self._label = first_version  # of the engines' weights

    # ------------------------------------------------------------------------------------ the driver's end
    def start(self) -> None:
        """Begin to generate; the engines have to have their weights."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="stream", daemon=True)
        self._thread.start()
        started.result()

    def next_batch(self) -> Batch:
        """Wait for the next fetch, and take its groups.

        Raises:
            ValueError: the data ended before the run.
            HookError, RuntimeError: what a group raised.
        """
        fetch = self._ask(events.Fetch, events.Stop)
        if isinstance(fetch, events.Stop):
            raise ValueError(f"--num-rollout: {fetch.reason or 'there is nothing left to train'}")
        assert isinstance(fetch, events.Fetch)
        return self._call(self._taken, fetch)

    def trained(self) -> bool:
        """Note that the last batch is trained. Returns whether weights are to be pushed now; after it call `pushed`."""
        self._call(self._happen, events.TrainDone())
        if self.state.num_trained % self.knobs.fetches_per_push:
            return False
        self._ask(events.Push)
        return True

    def pushed(self, version: int) -> None:
        """Note that the engines have new weights, of the name `version`."""
        self._label = version
        self._call(self._happen, events.Pushed())

    def stop(self) -> None:
        """End everything that is under way."""
        if self._thread is not None and self._thread.is_alive():
            self._is_ending = True
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._wake.set)
            self._thread.join(_JOIN_S)  # a function that ignores its end is ended with the process

    # ------------------------------------------------------------------------------------ its own thread
    def _run(self, started: Future[None]) -> None:
        self._asked.add(started)
        try:
            asyncio.run(self._main(started))
        except BaseException as error:  # raised again by the driver's next call
            self._error = error
        with self._lock:
            self._has_ended = True
            for asked in list(self._asked):
                if not asked.done():
                    asked.set_exception(self._error or RuntimeError(_ENDED))

    async def _main(self, started: Future[None]) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        args = self._border.args()
        args.rollout_id = self.state.num_trained
        self._failed: list[BaseException] = []
        async with RolloutClient(args) as client, Teacher.of_args(args) as teacher:
            self._args, self._context, self._teacher = args, GroupContext.of_args(args), teacher
            self._client = client
            started.set_result(None)
            try:
                while not self._is_ending:
                    self._proceed()
                    await asyncio.sleep(0)  # those that begin do so now, also where more are to come at once
                    await self._wake.wait()
                    self._wake.clear()
                    if self._failed:
                        raise self._failed[0]
            finally:
                tasks = [one.task for one in self._live.values() if one.task is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _proceed(self) -> None:
        """Begin all that may begin; what is for the driver, when it asks for it."""
        while True:
            actions = decide(self.state, self.knobs)
            for_driver = [action for action in actions if isinstance(action, _FOR_DRIVER)]
            if for_driver and (self._answer is None or not isinstance(for_driver[0], self._wanted)):
                actions = engine_actions(self.state, self.knobs)  # meanwhile
            begun = False
            for action in actions:
                if isinstance(action, events.Admit):
                    self._admit(action)
                    self._wake.set()  # the next ones in the loop's next turn
                elif isinstance(action, events.Drop):
                    self._drop(action)
                    begun = True
                elif isinstance(action, _FOR_DRIVER):
                    begun |= self._tell(action)
            if not begun:
                return

    def _tell(self, action: events.Action) -> bool:
        """Give the driver the action that it waits for; returns whether it began."""
        answer = self._answer
        assert answer is not None
        if isinstance(action, _BEGUN):
            apply(self.state, self.knobs, action)
        self._answer = None
        answer.set_result(action)
        return isinstance(action, _BEGUN)

    def _admit(self, action: events.Admit) -> None:
        """Begin the first of the groups that may begin; the caller asks again."""
        most = max(1, _AT_ONCE // self.knobs.samples_per_group)
        pending = action.pending[:most]
        for ordinal in pending:
            self._begin(ordinal, self._live[ordinal].blank)
        num_new = min(action.num_new, most - len(pending))
        if num_new:
            groups = self._source.draw(num_new)
            for group in groups:
                self._begin(self.state.next_ordinal, group)
            if len(groups) < num_new:
                apply(self.state, self.knobs, events.StreamEnd())

    def _begin(self, ordinal: int, blank: list[Sample]) -> None:
        group = copy.deepcopy(blank)
        apply(self.state, self.knobs, events.Admitted(ordinal, len(group)))
        self._live[ordinal] = live = _Live(blank)
        live.task = asyncio.create_task(self._make(ordinal, group))

    async def _make(self, ordinal: int, group: list[Sample]) -> None:
        """Generate and score one group, and note what became of it."""
        left = len(group)

        def generated() -> None:
            nonlocal left
            if left > 0 and ordinal in self.state.groups:
                left -= 1
                self._happen(events.SampleDone(ordinal))

        context = replace(self._context, samples=replace(self._context.samples, on_generated=generated))
        try:
            made = await generate_group(context, group, sampling_params(self._args))
            verdict = apply_filter(context.filter_path, self._args, made)
            if verdict.keep:
                await self._teacher.score(made)
                if ordinal in self._live:
                    # By this version the controller has counted on it.
                    check_not_older(made, self.state.groups[ordinal].born * self.knobs.fetches_per_push)
            elif ordinal in self._live:
                self._num_dropped[verdict.reason or "filtered"] += 1
                check_filter_keeps(context.filter_path, self._num_kept, self._num_dropped, self.knobs.groups_per_fetch)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of a user's function, or of the engines: the run ends with it
            if ordinal in self._live:  # a group that was dropped matters no more
                self._failed.append(error)
                self._wake.set()
            return
        if ordinal not in self._live:
            return
        while left > 0:  # samples that needed no engine
            generated()
        if verdict.keep:
            self._num_kept += 1
            self._live[ordinal].made = made
            self._happen(events.GroupReady(ordinal, oldest_version(made, self.knobs.fetches_per_push)))
        else:
            self._dropped[verdict.reason or "filtered"] += 1
            self._forget(events.Drop(ordinal, "filtered"))

    def _drop(self, action: events.Drop) -> None:
        self._dropped[action.reason] += 1
        self._forget(action)

    def _forget(self, action: events.Drop) -> None:
        live = self._live.pop(action.ordinal)
        if live.task is not None and live.task is not asyncio.current_task():
            live.task.cancel()
        self._happen(action)

    def _happen(self, event: events.Event | events.Drop) -> None:
        apply(self.state, self.knobs, event)
        self._wake.set()

    def _taken(self, fetch: events.Fetch) -> Batch:
        groups = [self._live.pop(ordinal).made for ordinal in fetch.ordinals]
        check_bound(groups, self._label, self.knobs)
        counts = {f"rollout/dropped_{reason}": float(count) for reason, count in self._dropped.items()}
        self._dropped.clear()
        state = self.state
        told = {
            "pipeline/in_flight": float(state.samples_in_flight),
            "pipeline/running": float(len(state.of("running"))),
            "pipeline/ready": float(len(state.of("ready"))),
            "pipeline/admitted": float(state.committed),
        }
        ahead = [self._live[ordinal].blank for ordinal in sorted(self._live)]
        retries = self._client.retries("rollout")
        new = {name: count - self._retries.get(name, 0.0) for name, count in retries.items()}
        self._retries = retries
        self._args.rollout_id = fetch.fetch + 1  # hooks read it
        return Batch(groups, self._label, ahead, self._source.state(), counts | told | new)

    # ------------------------------------------------------------------------------------ between the threads
    def _ask(self, *wanted: type) -> events.Action:
        """Wait until the controller decides on one of `wanted`."""
        answer: Future[events.Action] = Future()

        def ask() -> None:
            self._wanted, self._answer = wanted, answer
            self._wake.set()

        self._post(ask, answer)
        return answer.result()

    def _call(self, function: Callable[..., T], *given: object) -> T:
        """Run a function in the stream's thread, and return its result."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(function(*given))
            except BaseException as error:  # the caller's
                done.set_exception(error)

        self._post(call, done)
        return done.result()

    def _post(self, function: Callable[[], None], answer: Future[Any]) -> None:
        """Run a function in the stream's thread; `answer` gets an error where it has ended, or ends before."""
        with self._lock:
            if self._has_ended or self._thread is None:
                answer.set_exception(self._error or RuntimeError(_ENDED))
                return
            self._asked.add(answer)
            answer.add_done_callback(self._asked.discard)
            with suppress(RuntimeError):  # the loop has just been closed: `_run` tells who asks
                self._loop.call_soon_threadsafe(function)


def oldest_version(samples: Sequence[Sample], fetches_per_push: int) -> int | None:
    """Return the controller's version of the oldest token that is trained; None where none is known."""
    found = [versions.min() for sample in samples if len(versions := trained_versions(sample))]
    return int(min(found)) // fetches_per_push if found else None


def trained_versions(sample: Sample) -> np.ndarray:
    """[n] versions of the tokens of a sample that are trained on, those that are known."""
    if sample.weight_versions is None:
        return np.zeros(0, np.int64)
    versions = np.asarray(sample.weight_versions, np.int64)[response_mask(sample) > 0]
    return versions[versions != UNKNOWN_VERSION]


def check_not_older(samples: Sequence[Sample], born: int) -> None:
    """Refuse tokens of weights from before the group was begun, by version `born`.

    Raises:
        HookError: names the sample; a function has put them into it.
    """
    for sample in samples:
        versions = trained_versions(sample)
        if len(versions) and versions.min() < born:
            raise HookError(
                f"--max-staleness: sample {sample.index} has a token of version {versions.min()}, but its prompt was"
                f" begun under version {born}; a function must bring tokens of now",
                [sample],
            )


def check_bound(groups: Groups, version: int, knobs: Knobs) -> None:
    """Hold every sample and token that is about to be trained to --max-staleness.

    Raises:
        HookError: names the sample; a function has put tokens of older weights into it.
    """
    for sample in (sample for group in groups for sample in group):
        versions = trained_versions(sample)
        if (
            len(versions)
            and version // knobs.fetches_per_push - versions.min() // knobs.fetches_per_push > knobs.max_staleness
        ):
            raise HookError(
                f"--max-staleness {knobs.max_staleness}: sample {sample.index} has a token of version"
                f" {versions.min()}, and version {version} would train it",
                [sample],
            )
