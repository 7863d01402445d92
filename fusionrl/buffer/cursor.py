"""`Cursor`: what a Buffer needs that replaces one that died. Each rollout brings one to the driver.

It has the state of data source and controller when the rollout was handed over, with that rollout counted as trained: a
checkpoint without answers. Prompts that were admitted by then come again under their places, and those that were drawn
since are drawn again; so none is lost or trained twice, and what engines had answered of them is generated again.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusionrl.buffer.data_source import PromptSource
    from fusionrl.buffer.stream_state import SavedStream, StreamGroup
    from fusionrl.pipeline.knobs import Knobs
    from fusionrl.pipeline.state import State


@dataclass
class Cursor:
    """The state after a rollout.

    source  of the data source
    stream  of the controller (`State.to_dict`); None without a stream
    groups  ordinal → group, pickled: that takes a sixth of the time of `pack_sample`. A Buffer sends those that are new
            since its cursor before, and `Cursors` adds the others
    """

    source: dict[str, object] | None
    stream: dict[str, Any] | None = None
    groups: dict[str, bytes] = field(default_factory=dict)

    def saved_stream(self, knobs: Knobs | None) -> SavedStream | None:
        """Return the stream as a checkpoint has it; None without one."""
        if self.stream is None:
            return None
        from fusionrl.buffer.stream_state import packed

        assert knobs is not None
        return packed(self.stream, {int(ordinal): pickle.loads(group) for ordinal, group in self.groups.items()}, knobs)


def cursor_of(source: PromptSource, state: State, live: Mapping[int, StreamGroup]) -> Cursor | None:
    """Return the state of now, where the groups that are fetched count as trained; None: no Buffer could take it."""
    if not source.can_be_restored:
        return None
    from fusionrl.buffer.stream_state import StreamGroup

    stream, groups = state.to_dict(state.num_trained + 1), {}
    for ordinal, *_ in stream["groups"]:
        group = live[ordinal]
        if not group.is_in_cursor:
            try:  # with its answers, if the data cannot give it again
                groups[str(ordinal)] = pickle.dumps(StreamGroup(group.blank, [] if group.blank else group.finished))
            except (pickle.PicklingError, TypeError, AttributeError):  # what a user's data source put there
                return None
            group.is_in_cursor = True
    return Cursor(source.state(), stream, groups)


@dataclass
class BufferStart:
    """Where a Buffer continues that replaces a dead one.

    rollout_id  the last that is done; -1: none
    cursor      of that rollout; None: no rollout is done since the process started
    checkpoint  file that the run resumed from, without a cursor
    """

    rollout_id: int
    cursor: Cursor | None = None
    checkpoint: str | None = None


class Cursors:
    """The driver's: those of the newest two rollouts, as the newest may not be trained."""

    def __init__(self) -> None:
        self._held: dict[int, Cursor] = {}

    def add(self, rollout_id: int, cursor: Cursor | None) -> None:
        """Take that of a rollout; None: the Buffer cannot be replaced after it."""
        self._held = {held: self._held[held] for held in self._held if held == rollout_id - 1}
        if cursor is None:
            return
        if cursor.stream is not None:
            before = self._held.get(rollout_id - 1)
            known = cursor.groups if before is None else before.groups | cursor.groups
            live = [str(ordinal) for ordinal, *_ in cursor.stream["groups"]]
            if not known.keys() >= set(live):  # a cursor before was lost
                return
            cursor.groups = {ordinal: known[ordinal] for ordinal in live}
        self._held[rollout_id] = cursor

    def get(self, rollout_id: int) -> Cursor | None:
        """Return that of a rollout, with all its groups."""
        return self._held.get(rollout_id)
