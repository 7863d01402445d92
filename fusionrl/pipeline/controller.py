"""The rules of all pipelines: `apply` notes what has happened, `decide` says what to do next.

Three questions, answered from the state alone: may the trainers start something, may weights be pushed, may the engines
get more groups. Where the answer is no, a `Wait` gives the reason and the groups, so that a stalled run can show why.
"""

from collections import Counter
from collections.abc import Iterable

from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import (
    Action,
    Admit,
    Admitted,
    Drop,
    Event,
    Fetch,
    Group,
    GroupFailed,
    GroupReady,
    Parked,
    Push,
    Pushed,
    SampleDone,
    Started,
    State,
    Stop,
    StreamEnd,
    TrainDone,
    Wait,
    update_group,
)


def decide(state: State, knobs: Knobs) -> tuple[Action, ...]:
    """Return the actions that may start now, in this order, or what the run waits for; never nothing.

    The caller applies each `Started` action when it starts it, and for `Admit` an `Admitted` event per group. Then it
    asks again, until only waits or the end are left.
    """
    if state.failure:
        return (Stop(state.failure),)
    trainers = trainer_actions(state, knobs)
    if not all(isinstance(action, Wait) for action in trainers):
        return trainers  # the engines' actions depend on these
    return (*trainers, *engine_actions(state, knobs))


# ------------------------------------------------------------------------------------------------------------ trainers
def trainer_actions(state: State, knobs: Knobs) -> tuple[Action, ...]:
    """Return what the trainers start: a push that is due, the next fetch, or the end."""
    if state.lease:
        return (Wait("trainers", "they train", state.lease),)
    if state.pushing:
        return (Wait("trainers", "weights are being pushed"),)
    if push_is_due(state, knobs):
        return push_actions(state, knobs)
    if knobs.num_fetches is not None and state.num_trained >= knobs.num_fetches:
        return (Stop(),)
    return fetch_actions(state, knobs)


def all_fetched(state: State, knobs: Knobs) -> bool:
    return knobs.num_fetches is not None and state.num_fetched >= knobs.num_fetches


def push_is_due(state: State, knobs: Knobs) -> bool:
    """Return whether the trainers' weights are a version ahead of the engines'."""
    return state.num_trained // knobs.update_weights_interval > state.version


def push_actions(state: State, knobs: Knobs) -> tuple[Action, ...]:
    """Return the push, or the samples in flight that it waits for (`in_flight` drain)."""
    if knobs.in_flight == "drain" and (running := state.of("running")):
        return (Wait("trainers", "a push waits until no sample is in flight", _ordinals(running)),)
    return (Push(state.version + 1),)


def fetch_actions(state: State, knobs: Knobs) -> tuple[Action, ...]:
    """Return the next fetch, with drops of the groups that it leaves behind for good, or what it waits for."""
    ready = in_dispatch_order(state.of("ready"))
    unready = state.unready()
    # A pending group beyond the bound may never be admitted again.
    busy = [group for group in unready if not (group.is_spare and group.phase == "pending")]
    if knobs.exclusive and busy:
        return (Wait("trainers", "the engines have the devices", _ordinals(busy)),)
    if len(ready) < knobs.groups_per_fetch:
        if not unready and state.stream_ended and not state.of("pending"):
            return (Stop(_ended_early(state, knobs, len(ready))),)
        why = f"{len(ready)} of {knobs.groups_per_fetch} groups are ready"
        return (Wait("trainers", why, _ordinals(unready), "batch"),)
    chosen, rest = ready[: knobs.groups_per_fetch], ready[knobs.groups_per_fetch :]
    late = latecomers(state, knobs, [*rest, *unready])
    if late and knobs.at_deadline == "wait":
        unready_late = [group for group in late if group.phase != "ready"]
        return (Wait("trainers", "groups that are due are not ready", _ordinals(unready_late or late), "deadline"),)
    fetch = Fetch(state.num_fetched, _ordinals(chosen), state.version)
    return (*left_behind(state, knobs, [*rest, *unready]), fetch)


def in_dispatch_order(groups: Iterable[Group]) -> list[Group]:
    """Return the groups, the longest admitted first: the order of fetches does not depend on how long a group took."""
    return sorted(groups, key=lambda group: group.order)


def latecomers(state: State, knobs: Knobs, left: Iterable[Group]) -> list[Group]:
    """Return the groups of `left` that no fetch can train in time if the next one goes without them.

    For each version d, the groups due by d must fit into the fetches up to the end of d; spare groups need not.
    """
    left = [group for group in left if not group.is_spare]
    allowed = surplus(state, knobs)
    slots = slots_after_fetch(state, knobs)
    by_due = Counter(group.born + knobs.max_staleness for group in left)
    count = 0
    for due in sorted(by_due):
        count += by_due[due]
        room = max(0, slots + (due - state.version) * knobs.groups_per_version)
        if count > room + allowed:
            return in_dispatch_order(group for group in left if group.born + knobs.max_staleness <= due)
    return []


def slots_after_fetch(state: State, knobs: Knobs) -> int:
    """Return the groups that this version still trains after the next fetch."""
    left = knobs.update_weights_interval - state.num_fetched % knobs.update_weights_interval - 1
    return left * knobs.groups_per_fetch


def surplus(state: State, knobs: Knobs) -> int:
    """Return how many of the groups are spare: more than this version and its lead need."""
    beyond = sum(group.is_spare and group.phase != "leased" for group in state.groups.values())
    return min(knobs.spare_groups, max(0, state.committed - beyond - base_limit(state, knobs)))


def base_limit(state: State, knobs: Knobs) -> int:
    """Return how many groups may be committed without spare ones: those of all versions so far, and the lead."""
    limit = int((state.version + 1 + knobs.admission_lead) * knobs.groups_per_version)
    return limit if knobs.num_fetches is None else min(limit, knobs.num_fetches * knobs.groups_per_fetch)


def left_behind(state: State, knobs: Knobs, left: Iterable[Group]) -> list[Drop]:
    """Return drops of the groups that are too old after a version's last fetch, or left over by the run's last one."""
    is_last = knobs.num_fetches is not None and state.num_fetched + 1 >= knobs.num_fetches
    if slots_after_fetch(state, knobs) and not is_last:
        return []
    due = [group for group in left if is_last or group.born + knobs.max_staleness <= state.version]
    latest_first = [group for group in reversed(in_dispatch_order(due)) if not group.is_spare]
    spare = {group.ordinal for group in latest_first[: surplus(state, knobs)]}
    spare |= {group.ordinal for group in due if group.is_spare}
    if is_last and knobs.at_deadline == "wait":  # groups beyond the bound were trained instead
        spare |= {group.ordinal for group in due}
    return [Drop(group.ordinal, "surplus" if group.ordinal in spare else "deadline") for group in due]


def _ended_early(state: State, knobs: Knobs, num_ready: int) -> str:
    if knobs.num_fetches is None:
        return ""
    return (
        f"the data ended after {state.num_trained} of {knobs.num_fetches} fetches; {num_ready} groups are left, a fetch"
        f" takes {knobs.groups_per_fetch}"
    )


# ------------------------------------------------------------------------------------------------------------- engines
def engine_actions(state: State, knobs: Knobs) -> tuple[Action, ...]:
    """Return the groups that the engines start, or why they get none."""
    count, why = permits(state, knobs)
    if not count:
        return (Wait("engines", why, _ordinals(state.of("running"))),)
    count = min(count, trainable(state, knobs))
    pending = sorted(state.of("pending"), key=lambda group: group.ordinal)[:count]
    num_new = 0 if state.stream_ended else min(count - len(pending), new_permits(state, knobs))
    if not pending and not num_new:
        return (Wait("engines", "the data ended" if state.stream_ended else "enough groups are admitted"),)
    return (Admit(_ordinals(pending), num_new),)


def permits(state: State, knobs: Knobs) -> tuple[int, str]:
    """Return (groups that the engines may start now, by their concurrency; why none)."""
    if state.pushing:
        return 0, "weights are being pushed"
    if knobs.in_flight == "drain" and push_is_due(state, knobs):
        return 0, "they drain for a push"
    if knobs.exclusive and state.lease:
        return 0, "the trainers have the devices"
    in_flight = state.samples_in_flight
    room = (knobs.max_samples_in_flight - in_flight) // knobs.samples_per_group
    if room < 1:
        # A group that is larger than the limit would never start.
        return (1, "") if not in_flight else (0, f"{in_flight} samples are in flight")
    return room, ""


def new_permits(state: State, knobs: Knobs) -> int:
    """Return how many more groups of the data stream may be committed without breaking the bound on staleness."""
    return max(0, base_limit(state, knobs) + spare_now(state, knobs) - state.committed)


def trainable(state: State, knobs: Knobs) -> int:
    """Return how many groups that start now would be trained in time, in addition to all live ones."""
    slots = slots_after_fetch(state, knobs) + knobs.groups_per_fetch
    if version_is_fetched(state, knobs):
        slots = 0
    room = slots + knobs.max_staleness * knobs.groups_per_version + spare_now(state, knobs)
    return max(0, room - sum(not group.is_spare for group in state.of("running", "scoring", "ready")))


def spare_now(state: State, knobs: Knobs) -> int:
    """Return the spare groups that may be committed; none once the fetch that drops them has started."""
    return 0 if version_is_fetched(state, knobs) or all_fetched(state, knobs) else knobs.spare_groups


def version_is_fetched(state: State, knobs: Knobs) -> bool:
    return state.num_fetched >= (state.version + 1) * knobs.update_weights_interval


def _ordinals(groups: Iterable[Group]) -> tuple[int, ...]:
    return tuple(group.ordinal for group in groups)


# ------------------------------------------------------------------------------------------------------------- events
GroupEvent = SampleDone | GroupReady | GroupFailed | Parked


def apply(state: State, knobs: Knobs, event: Event | Started) -> State:
    """Change `state` by an event, or by an action that starts. Returns the same object.

    An event that cannot happen in this state is a defect of the caller: AssertionError, and the state is unchanged.
    A late event of a dropped group is ignored.
    """
    match event:
        case Admitted():
            _admit(state, event)
        case SampleDone() | GroupReady() | GroupFailed() | Parked():
            assert event.ordinal in state.groups or event.ordinal in state.ended, event
            if event.ordinal in state.groups:  # else the group was dropped, and the event comes late
                _advance(state, knobs, state.groups[event.ordinal], event)
        case Drop():
            assert state.groups[event.ordinal].phase != "leased", event
            _end(state, event.ordinal, dropped=True)
        case Fetch():
            _lease(state, knobs, event)
        case TrainDone():
            assert state.lease, "nothing is being trained"
            for ordinal in state.lease:
                _end(state, ordinal, dropped=False)
            state.lease = ()
            state.num_trained += 1
        case Push():
            assert not state.pushing and not state.lease and event.version == state.version + 1, event
            state.pushing = True
        case Pushed():
            assert state.pushing
            state.pushing = False
            state.version += 1
        case StreamEnd():
            state.stream_ended = True
        case _:
            raise AssertionError(event)
    return state


def _admit(state: State, event: Admitted) -> None:
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
    if isinstance(event, SampleDone):
        assert group.phase == "running" and group.num_running > 0, (event, group)
        left = group.num_running - 1
        update_group(state, event.ordinal, num_running=left, phase="running" if left else "scoring")
    elif isinstance(event, GroupReady):
        assert group.phase == "scoring", (event, group)
        born = group.born if event.oldest is None else min(group.born, event.oldest)
        update_group(state, event.ordinal, phase="ready", born=born)
        state.failures = 0
    elif isinstance(event, Parked):
        # Without tokens it is sampled again from its prompt, so its age starts again too.
        has_tokens = event.oldest is not None
        born = state.version if event.oldest is None else min(group.born, event.oldest)
        update_group(state, event.ordinal, phase="pending", born=born, num_running=0, has_tokens=has_tokens)
    elif group.num_tries < knobs.max_group_tries:  # it is sampled again from its prompt
        tries = group.num_tries + 1
        update_group(state, event.ordinal, phase="pending", born=state.version, num_running=0, num_tries=tries)
    else:
        _end(state, event.ordinal, dropped=True)
        state.failures += 1
        if state.failures == knobs.max_failed_groups:  # later failures change nothing
            state.failure = f"{state.failures} groups failed one after the other; the last one: {event.reason}"


def _lease(state: State, knobs: Knobs, event: Fetch) -> None:
    assert not state.lease and event.fetch == state.num_fetched, event
    for ordinal in event.ordinals:
        group = state.groups[ordinal]
        assert group.phase == "ready", group
        # The bound on staleness holds when trainers fetch; they check it again before the optimizer.
        born, version = (push * knobs.update_weights_interval for push in (group.born, event.version))
        error = knobs.staleness_error(f"group {ordinal} is", born, version)
        assert error is None, error
    for ordinal in event.ordinals:
        update_group(state, ordinal, phase="leased")
    state.lease = event.ordinals
    state.num_fetched += 1


def _end(state: State, ordinal: int, *, dropped: bool) -> None:
    group = state.groups.pop(ordinal)
    state.ended.add(ordinal)
    state.num_dropped += dropped
    state.num_spare -= dropped and group.is_spare
