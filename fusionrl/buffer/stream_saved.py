"""State of a stream in a checkpoint: which groups have ended, and the samples of the others.

settings  the knobs on which places and versions depend
state     of the controller (`State.to_dict`)
groups    ordinal → {"blank": samples as they came from the data, "made": with answers and rewards, or "parked"}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from fusionrl.buffer.staleness import oldest_version
from fusionrl.data.sample import Sample
from fusionrl.data.sample_json import pack_sample, unpack_sample
from fusionrl.pipeline.controller import apply
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Drop, EndedGroups, Group, State


class SavedStream(TypedDict):
    """See the module's docstring. Values for JSON."""

    settings: list[int]
    state: dict[str, Any]
    groups: dict[str, dict[str, list[dict[str, object]]]]


@dataclass
class StreamGroup:
    """A group that has not ended.

    blank     as it came from the data
    finished  as it is when it is ready
    parked    as a function handed it back, with a part of its answers
    """

    blank: list[Sample]
    finished: list[Sample] = field(default_factory=list)
    parked: list[Sample] = field(default_factory=list)


def packed(state: Mapping[str, Any], held: Mapping[int, StreamGroup], knobs: Knobs) -> SavedStream:
    """Return what a checkpoint keeps; of each group in `state` there is one in `held`."""
    groups = {}
    for ordinal, phase, *_ in state["groups"]:
        group = held[ordinal]
        groups[str(ordinal)] = {"blank": [pack_sample(sample) for sample in group.blank]}
        if phase == "ready":
            groups[str(ordinal)]["made"] = [pack_sample(sample) for sample in group.finished]
        elif group.parked:
            groups[str(ordinal)]["parked"] = [pack_sample(sample) for sample in group.parked]
    return {"settings": _settings(knobs), "state": dict(state), "groups": groups}


def unpacked(saved: SavedStream, knobs: Knobs, num_trained: int) -> tuple[State, dict[int, StreamGroup]]:
    """Return the controller's state and the groups, for a run that resumes after `num_trained` fetches.

    If the settings differ from the checkpoint's, its versions and places have another meaning: then the groups are
    generated again, before any other. ValueError: it is not a saved stream.
    """
    try:
        held = {
            int(ordinal): StreamGroup(*(_unpacked(group.get(name, [])) for name in ("blank", "made", "parked")))
            for ordinal, group in saved["groups"].items()
        }
        if saved["settings"] != _settings(knobs) or saved["state"]["num_trained"] != num_trained:
            return _anew(list(held.values()), knobs, num_trained)
        born = {group[0]: group[2] for group in saved["state"]["groups"]}
        if born.keys() != held.keys():
            raise ValueError(f"its groups are {sorted(born)}, and there are samples of {sorted(held)}")
        ages = {}
        for ordinal, group in held.items():
            oldest = oldest_version(group.finished or group.parked, knobs.fetches_per_push)
            if group.finished or oldest is not None:
                ages[ordinal] = born[ordinal] if oldest is None else min(born[ordinal], oldest)
        state = State.from_dict(saved["state"], knobs.fetches_per_push, ages)
        for ordinal in [ordinal for ordinal, group in held.items() if not group.finished and not group.blank]:
            # A function had it from elsewhere, and was training on it: it cannot come again.
            apply(state, knobs, Drop(ordinal, "surplus"))
            del held[ordinal]
        return state, held
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        raise ValueError(
            f"what the checkpoint holds of the stream cannot be read ({error!r:.300}); resume from another one"
        ) from error


def blanks(saved: SavedStream) -> list[list[Sample]]:
    """Return the groups as they came from the data, in its order: for a run without a stream."""
    in_order = sorted(saved["groups"].items(), key=lambda item: int(item[0]))
    return [_unpacked(group["blank"]) for _, group in in_order if group["blank"]]


def fresh_state(knobs: Knobs, num_trained: int) -> State:
    """Return the state after `num_trained` fetches, where nothing is under way."""
    num_groups = num_trained * knobs.groups_per_fetch
    return State(
        ended=EndedGroups(num_groups),
        next_ordinal=num_groups,
        version=num_trained // knobs.fetches_per_push,
        num_fetched=num_trained,
        num_trained=num_trained,
    )


def _anew(groups: list[StreamGroup], knobs: Knobs, num_trained: int) -> tuple[State, dict[int, StreamGroup]]:
    state = fresh_state(knobs, num_trained)
    held = {}
    for group in (group for group in groups if group.blank):
        ordinal, state.next_ordinal = state.next_ordinal, state.next_ordinal + 1
        state.groups[ordinal] = Group(ordinal, "pending", state.version)
        held[ordinal] = StreamGroup(group.blank)
    return state, held


def _unpacked(group: list[dict[str, object]]) -> list[Sample]:
    return [unpack_sample(sample) for sample in group]


def _settings(knobs: Knobs) -> list[int]:
    return [knobs.groups_per_fetch, knobs.fetches_per_push, knobs.max_staleness, knobs.samples_per_group]
