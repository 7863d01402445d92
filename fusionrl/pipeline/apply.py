"""Apply an event to the controller's state."""

from fusionrl.pipeline import events
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Group, State, update_group

GroupEvent = events.SampleDone | events.GroupReady | events.GroupFailed | events.Parked


def apply(state: State, knobs: Knobs, event: events.Event | events.Started) -> State:
    """Change `state` by an event, or by an action that starts. Returns the same object.

    An event that cannot happen in this state is a defect of the caller: AssertionError, and the state is unchanged.
    A late event of a dropped group is ignored.
    """
    match event:
        case events.Admitted():
            _admit(state, event)
        case events.SampleDone() | events.GroupReady() | events.GroupFailed() | events.Parked():
            assert event.ordinal in state.groups or event.ordinal in state.ended, event
            if event.ordinal in state.groups:  # else the group was dropped, and the event comes late
                _advance(state, knobs, state.groups[event.ordinal], event)
        case events.Drop():
            assert state.groups[event.ordinal].phase != "leased", event
            _end(state, event.ordinal, dropped=True)
        case events.Fetch():
            _lease(state, knobs, event)
        case events.TrainDone():
            assert state.lease, "nothing is being trained"
            for ordinal in state.lease:
                _end(state, ordinal, dropped=False)
            state.lease = ()
            state.num_trained += 1
        case events.Push():
            assert not state.pushing and not state.lease and event.version == state.version + 1, event
            state.pushing = True
        case events.Pushed():
            assert state.pushing
            state.pushing = False
            state.version += 1
        case events.StreamEnd():
            state.stream_ended = True
        case _:
            raise AssertionError(event)
    return state


def _admit(state: State, event: events.Admitted) -> None:
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


def _advance(state: State, knobs: Knobs, group: Group, event: GroupEvent) -> None:
    """Take a group that is being sampled or scored to its next phase."""
    assert group.phase in ("running", "scoring"), (event, group)
    if isinstance(event, events.SampleDone):
        assert group.phase == "running" and group.num_running > 0, (event, group)
        left = group.num_running - 1
        update_group(state, event.ordinal, num_running=left, phase="running" if left else "scoring")
    elif isinstance(event, events.GroupReady):
        assert group.phase == "scoring", (event, group)
        born = group.born if event.oldest is None else min(group.born, event.oldest)
        update_group(state, event.ordinal, phase="ready", born=born)
        state.failures = 0
    elif isinstance(event, events.Parked):
        # Without tokens it is sampled again from its prompt, so its age starts again too.
        has_tokens = event.oldest is not None
        born = state.version if event.oldest is None else min(group.born, event.oldest)
        update_group(state, event.ordinal, phase="pending", born=born, num_running=0, has_tokens=has_tokens)
    elif group.num_tries < knobs.max_tries:  # it is sampled again from its prompt
        tries = group.num_tries + 1
        update_group(state, event.ordinal, phase="pending", born=state.version, num_running=0, num_tries=tries)
    else:
        _end(state, event.ordinal, dropped=True)
        state.failures += 1
        if state.failures == knobs.max_failures_in_row:  # later failures change nothing
            state.failure = f"{state.failures} groups failed one after the other; the last one: {event.reason}"


def _lease(state: State, knobs: Knobs, event: events.Fetch) -> None:
    assert not state.lease and event.fetch == state.num_fetched, event
    for ordinal in event.ordinals:
        group = state.groups[ordinal]
        assert group.phase == "ready", group
        # The bound on staleness holds when trainers fetch; they check it again before the optimizer.
        staleness = event.version - group.born
        assert staleness <= knobs.max_staleness, f"group {ordinal} is {staleness} versions old"
    for ordinal in event.ordinals:
        update_group(state, ordinal, phase="leased")
    state.lease = event.ordinals
    state.num_fetched += 1


def _end(state: State, ordinal: int, *, dropped: bool) -> None:
    group = state.groups.pop(ordinal)
    state.ended.add(ordinal)
    state.num_dropped += dropped
    state.num_spare -= dropped and group.is_spare
