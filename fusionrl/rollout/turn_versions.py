"""Weight versions of a group's turns: noted for the record of a run and, with the record of another run, repeated.

Under --in-flight retract a push takes back the requests under way, and engines continue them with the new weights. An
engine draws each token by the request's seed and the token's position, so an answer of several versions is that of
several requests, one a version, whose prompts end with the tokens so far. A replay sends these requests. Each waits
until engines have its version, and a push waits until all requests of the versions so far have ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import numpy as np

from fusionrl.data.sample_fields import as_version
from fusionrl.engines.answers import sampling_params
from fusionrl.engines.client import GenerateClient, Generation, continued, uncontinuable

Runs = list[list[int]]  # [version, number of tokens], one after the other: an answer's
Turns = list[Any]  # [seed of the request, Runs of its answer], by seeds


class EngineVersions:
    """The version that engines have, and how many requests of a record have yet to end, by version.

    Thread-safe: functions of a user's may ask engines from loops of their own.
    """

    def __init__(self, version: int, record: Mapping[int, Turns], on_end: Callable[[], None]) -> None:
        """`record`: ordinal of a group → its turns; `on_end` is called when a request of the record has ended."""
        self._version, self._record, self._on_end = version, record, on_end
        self._lock = threading.Lock()
        answers = (runs for group in record.values() for _, runs in group)
        self._num_left = Counter(version for runs in answers for version, _ in runs)  # version → requests
        self._waiting: list[tuple[int, Future[None]]] = []

    def of_group(self, ordinal: int) -> GroupTurns:
        """Return where a group that begins notes its turns; it repeats those that the record has of it."""
        return GroupTurns(self, self._record.get(ordinal))

    def are_needed(self) -> bool:
        """Return whether requests of the record have yet to end before the next push."""
        with self._lock:
            return any(number and version <= self._version for version, number in self._num_left.items())

    def push(self, version: int) -> None:
        """Note that engines have these weights now."""
        with self._lock:
            self._version = version
            due = [future for needed, future in self._waiting if needed <= version]
            self._waiting = [(needed, future) for needed, future in self._waiting if needed > version]
        for future in due:
            if not future.done():  # else its sample was cancelled
                future.set_result(None)

    async def reach(self, version: int) -> None:
        """Wait until engines have this version."""
        with self._lock:
            if version <= self._version:
                return
            self._waiting.append((version, due := Future[None]()))
        await asyncio.wrap_future(due)

    def end(self, version: int) -> None:
        """Note that a request of this version has ended."""
        with self._lock:
            self._num_left[version] -= 1
        self._on_end()


class GroupTurns:
    """The turns of one group, by the seeds of their requests."""

    def __init__(self, engines: EngineVersions, recorded: Turns | None) -> None:
        self._engines = engines
        self._recorded: dict[int, Runs] | None = None if recorded is None else dict(recorded)
        self._noted: dict[int, Runs] = {}
        self._obstacle = ""

    def forbid_replay(self, why: str) -> None:
        """Note why no record of this group can be repeated."""
        self._obstacle = self._obstacle or why

    def to_record(self) -> Turns | str:
        """Return the turns of a group whose samples have ended, or why they do not repeat.

        Raises:
            ValueError: the record that is followed has other turns.
        """
        if self._recorded is not None and (missing := self._recorded.keys() - self._noted.keys()):
            raise ValueError(f"{_DIFFERS}: the record has {len(missing)} more turns of a group")
        return self._obstacle or [[seed, self._noted[seed]] for seed in sorted(self._noted)]

    async def generate(
        self, client: GenerateClient, payload: Mapping[str, object], routing_key: str | None = None
    ) -> Generation:
        """Call `client.generate`; where a record is followed, once for each version that its answer has there."""
        params = sampling_params(payload)
        seed = cast("int", params["sampling_seed"])
        try:
            if self._recorded is None:
                answer = await client.generate(payload, routing_key)
            elif seed in self._recorded:
                answer = await self._repeat(client, payload, routing_key, self._recorded[seed])
            else:
                raise ValueError(f"{_DIFFERS}: the record has no turn with seed {seed}")
        except BaseException:  # a cancellation, too; it is raised again
            self.forbid_replay("a turn had no answer")
            raise
        runs = _runs(answer)
        if not runs:
            self.forbid_replay("a turn had no token")
        if seed in self._noted:
            self.forbid_replay("two turns had the same sampling_seed")
        experts = ["return_routed_experts"] * bool(payload.get("return_routed_experts"))  # not tried in parts
        if len(runs) > 1 and (names := [*uncontinuable(params), *experts]):
            self.forbid_replay(f"a push came within an answer that depends as a whole on {', '.join(names)}")
        self._noted[seed] = runs
        return answer

    async def _repeat(
        self, client: GenerateClient, payload: Mapping[str, object], routing_key: str | None, runs: Runs
    ) -> Generation:
        parts: list[Generation] = []
        for place, (version, count) in enumerate(runs, 1):
            await self._engines.reach(version)
            request = _part_of(payload, parts, None if place == len(runs) else count)
            part = await client.generate(request, routing_key)
            if _runs(part) != [[version, count]]:
                raise ValueError(
                    f"{_DIFFERS}: the record has an answer of [version, tokens] {runs}, of which number {place} is"
                    f" {_runs(part)} in this run"
                )
            self._engines.end(version)
            parts.append(part)
        return _joined(parts)


_DIFFERS = "--replay-schedule: this run does not repeat the recorded one"
_turns: ContextVar[GroupTurns | None] = ContextVar("turns", default=None)


def turns_in_context() -> GroupTurns | None:
    """Return the turns of the group that this code generates; None where no stream records them."""
    return _turns.get()


@contextmanager
def noting_turns(turns: GroupTurns | None) -> Iterator[None]:
    """Note the turns within the block, also those of tasks that are started in it."""
    token = _turns.set(turns)
    try:
        yield
    finally:
        _turns.reset(token)


def forbid_replay(function: str) -> None:
    """Note that the group in context asks engines by a function whose answers no replay repeats."""
    if (turns := _turns.get()) is not None:
        turns.forbid_replay(f"engines were asked by {function}, not by generate_turn")


def _runs(answer: Generation) -> Runs:
    each = groupby(answer.weight_versions, key=lambda span: as_version(span[0]))
    return [[version, sum(count for _, count in spans)] for version, spans in each]


def _part_of(payload: Mapping[str, object], before: Sequence[Generation], count: int | None) -> Mapping[str, object]:
    """Return the request for the tokens after those of `before`; `count`: how many, None: to the end of the answer."""
    request = continued(payload, [token for part in before for token in part.tokens.tolist()])
    if count is None:
        return request
    params = {**sampling_params(request), "max_new_tokens": count}
    if isinstance(least := params.get("min_new_tokens"), int):
        params["min_new_tokens"] = min(least, count)
    return {**request, "sampling_params": params}


def _joined(parts: Sequence[Generation]) -> Generation:
    return replace(
        parts[-1],
        tokens=np.concatenate([part.tokens for part in parts]),
        log_probs=np.concatenate([part.log_probs for part in parts]),
        text="".join(part.text for part in parts),
        weight_versions=[span for part in parts for span in part.weight_versions],
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        part=sum(part.part for part in parts),
    )
