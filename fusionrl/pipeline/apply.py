"""Apply an event to the controller's state."""

from __future__ import annotations

from functools import singledispatch

from fusionrl.pipeline import events
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Group, State, update_group


def apply(state: State, knobs: Knobs, event: events.Event | events.Started) -> State:
    """Change `state` by an event, or by an action that starts. Returns the same object.

    An event that cannot happen in this state is a defect of the caller: AssertionError, and the state is unchanged.
    A late event of a dropped group is ignored.
    """
    _apply(event, state, knobs)
    return state


@singledispatch
def _apply(event: object, state: State, knobs: Knobs) -> None:
    raise AssertionError(event)


@_apply.register
def _(event: events.Admitted, state: State, knobs: Knobs) -> None:
    born = state.version if event.oldest is None else min(state.version, event.oldest)
    known = state.groups.get(event.ordinal)
    if known is None:
        assert event.ordinal == state.next_ordinal, (event, state.next_ordinal)
        state.next_ordinal += 1
        spare = event.is_spare
        state.num_spare += spare
        state.groups[event.ordinal] = Group(event.ordinal, "running", born, event.num_samples, is_spare=spare)
        return
    assert known.phase == "pending", known
    update_group(state, event.ordinal, phase="running", born=born, num_running=event.num_samples, has_tokens=False)


@_apply.register
def _(event: events.SampleDone, state: State, knobs: Knobs) -> None:
    group = _living(state, event.ordinal)
    if group is None:
        return
    assert group.phase == "running" and group.num_running > 0, (event, group)
    left = group.num_running - 1
    update_group(state, event.ordinal, num_running=left, phase="running" if left else "scoring")


@_apply.register
def _(event: events.GroupReady, state: State, knobs: Knobs) -> None:
    group = _living(state, event.ordinal)
    if group is None:
        return
    assert group.phase == "scoring", (event, group)
    born = group.born if event.oldest is None else min(group.born, event.oldest)
    update_group(state, event.ordinal, phase="ready", born=born)
    state.failures = 0


@_apply.register
def _(event: events.GroupFailed, state: State, knobs: Knobs) -> None:
    group = _living(state, event.ordinal)
    if group is None:
        return
    assert group.phase in ("running", "scoring"), (event, group)
    if group.num_tries < knobs.max_tries:
        # It is sampled again from its prompt, so its age starts again too.
        update_group(
            state, event.ordinal, phase="pending", born=state.version, num_running=0, num_tries=group.num_tries + 1
        )
        return
    _end(state, event.ordinal, dropped=True)
    state.failures += 1
    if state.failures == knobs.max_failures_in_row:  # later failures change nothing
        state.failure = f"{state.failures} groups failed one after the other; the last one: {event.reason}"


@_apply.register
def _(event: events.Parked, state: State, knobs: Knobs) -> None:
    group = _living(state, event.ordinal)
    if group is None:
        return
    assert group.phase in ("running", "scoring"), (event, group)
    # Without tokens it is sampled again from its prompt, so its age starts again too.
    born = state.version if event.oldest is None else min(group.born, event.oldest)
    update_group(state, event.ordinal, phase="pending", born=born, num_running=0, has_tokens=event.oldest is not None)


@_apply.register
def _(event: events.Drop, state: State, knobs: Knobs) -> None:
    assert state.groups[event.ordinal].phase != "leased", event
    _end(state, event.ordinal, dropped=True)


@_apply.register
def _(event: events.Fetch, state: State, knobs: Knobs) -> None:
    assert not state.lease and event.fetch == state.num_fetched, event
    for ordinal in event.ordinals:
        group = state.groups[ordinal]
        assert group.phase == "ready", group
        # The bound on staleness is enforced here, at the optimizer.
        staleness = event.version - group.born
        assert staleness <= knobs.max_staleness, f"group {ordinal} is {staleness} versions old"
    for ordinal in event.ordinals:
        update_group(state, ordinal, phase="leased")
    state.lease = event.ordinals
    state.num_fetched += 1


@_apply.register
def _(event: events.TrainDone, state: State, knobs: Knobs) -> None:
    assert state.lease, "nothing is being trained"
    for ordinal in state.lease:
        _end(state, ordinal, dropped=False)
    state.lease = ()
    state.num_trained += 1


@_apply.register
def _(event: events.Push, state: State, knobs: Knobs) -> None:
    assert not state.pushing and not state.lease and event.version == state.version + 1, event
    state.pushing = True


@_apply.register
def _(event: events.Pushed, state: State, knobs: Knobs) -> None:
    assert state.pushing
    state.pushing = False
    state.version += 1


@_apply.register
def _(event: events.StreamEnd, state: State, knobs: Knobs) -> None:
    state.stream_ended = True


def _living(state: State, ordinal: int) -> Group | None:
    """Return the group; None: it has ended, and the event comes late."""
    assert ordinal in state.groups or ordinal in state.ended, ordinal
    return state.groups.get(ordinal)


def _end(state: State, ordinal: int, *, dropped: bool) -> None:
    group = state.groups.pop(ordinal)
    state.ended.add(ordinal)
    state.num_dropped += dropped
    state.num_spare -= dropped and group.is_spare
