"""The order of a stream's events: written to `schedule.a<attempt>.jsonl`, and with a record of another run followed.

Each line is an event or a started action: its name, and the groups that it is about. A stream that follows a record
holds back what comes before its place there, and starts nothing else, so its state passes through the same values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fusionrl.observe.formats import to_json
from fusionrl.pipeline.state import Drop, Event, Fetch, Started
from fusionrl.rollout.turn_versions import Turns

Entry = list[object]
_FLAG = "--replay-schedule"
_FILTERED = "filtered"  # a group is dropped at its end, where others are dropped in flight
_BEGAN_AGAIN = "BeganAgain"
_NOT_REPEATED = {
    _BEGAN_AGAIN: "the Buffer died and groups began again",
    "GroupFailed": "a group failed",
    "Parked": "a group was handed back",
    "StreamEnd": "the data ended",
}


def entry_of(event: Event | Started) -> Entry:
    """Return an event as a line of the record has it."""
    name = type(event).__name__
    match event:
        case Fetch():
            return [name, list(event.ordinals)]
        case Drop():
            return [name, event.ordinal, event.reason]
    ordinal = getattr(event, "ordinal", None)
    return [name] if ordinal is None else [name, ordinal]


def schedule_file(run: Path, attempt: int) -> Path:
    return run / f"schedule.a{attempt}.jsonl"


def outlasts_record(run: Path, record: Path) -> bool:
    """Return whether a run that followed the record of another one has had more events than it."""
    return schedule_file(run, 1).stat().st_size > schedule_file(record, 1).stat().st_size


def _turns_in(entry: Entry) -> Turns | str | None:
    """Return the versions of a group's turns, or why they do not repeat; None: the entry has none."""
    place = {"GroupReady": 2, "Drop": 3}.get(str(entry[0]))
    return None if place is None or len(entry) <= place else cast("Turns | str", entry[place])


def read_schedule(run: Path, needs_turns: bool = False) -> list[Entry]:
    """Return the events that a run recorded; a line that a kill cut off ends them.

    needs_turns  answers may have several weight versions, and the record must have those of each group

    Raises:
        ValueError: it has none, or some that no other run can repeat.
    """
    if schedule_file(run, 2).exists():
        raise ValueError(f"{_FLAG} {run}: it was resumed, and groups began again there; name a run without a resume")
    path = schedule_file(run, 1)
    if not path.is_file():
        raise ValueError(f"{_FLAG} {run}: it has no {path.name}; a run under a pipeline that runs ahead writes it")
    entries: list[Entry] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, list) or not entry:
            raise ValueError(f"{path}, line {number}: it is not an event")
        if why := _NOT_REPEATED.get(entry[0]):
            raise ValueError(f"{path}, line {number}: {why}, which does not repeat by order alone; name another run")
        if needs_turns and (entry[0] == "GroupReady" or entry[2:3] == [_FILTERED]):
            turns = _turns_in(entry)
            if isinstance(turns, str):
                raise ValueError(f"{path}, line {number}: {turns}, which no replay repeats; name another run")
            if turns is None:
                raise ValueError(f"{path}: it lacks the weight versions of answers; record a run of this fusionrl")
        entries.append(entry)
    return entries


class Schedule:
    """What has happened goes to `path`; with `record` it is also compared with what comes next there."""

    def __init__(self, path: Path, record: Sequence[Entry] = (), *, begins_again: bool = False) -> None:
        """`begins_again`: the file has what happened before the Buffer died."""
        self._record, self._place = record, 0
        self._file = path.open("ab", buffering=0)
        if begins_again:
            self._file.write(to_json([_BEGAN_AGAIN]) + b"\n")

    @property
    def turns(self) -> dict[int, Turns]:
        """Ordinal → weight versions of its turns, of each group that the record has to its end."""
        found = ((entry, _turns_in(entry)) for entry in self._record)
        return {cast("int", entry[1]): turns for entry, turns in found if isinstance(turns, list)}

    @property
    def next(self) -> Entry | None:
        """The event of the record that comes next; None without a record, or after its end."""
        return self._record[self._place] if self._place < len(self._record) else None

    def num_admitted_next(self) -> int:
        """Return how many groups the record admits before anything else."""
        following = (place for place in range(self._place, len(self._record)) if self._record[place][0] != "Admitted")
        return next(following, len(self._record)) - self._place

    def is_due(self, event: Event | Started) -> bool:
        """Return whether an action may start now.

        Raises:
            ValueError: the record has another action of its kind here: the runs are not the same.
        """
        entry, following = entry_of(event), self.next
        if following is not None and following != entry and following[0] == entry[0] and following[2:3] != [_FILTERED]:
            raise ValueError(f"{_FLAG}: {_differs(following, entry)}")
        return following is None or following == entry

    def note(self, event: Event | Started, turns: Turns | str | None = None) -> None:
        """Write an event that happens, with the turns of a group that it ends.

        Raises:
            ValueError: the record has another one here.
        """
        entry, following = [*entry_of(event), *([] if turns is None else [turns])], self.next
        if following is not None:
            if following != entry:
                raise ValueError(f"{_FLAG}: {_differs(following, entry)}")
            self._place += 1
        self._file.write(to_json(entry) + b"\n")

    def close(self) -> None:
        self._file.close()


def _differs(recorded: Entry, entry: Entry) -> str:
    return (
        f"the record has {_words(recorded)} where this run comes to {_words(entry)}: it does not repeat the recorded"
        " run; `fusionrl diff` names the first difference"
    )


def _words(entry: Entry) -> str:
    return " ".join(map(str, entry))
