"""Invariants of every state of the controller."""

from __future__ import annotations

from fusionrl.pipeline import events
from fusionrl.pipeline.decide import base_limit, surplus
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import State


def violations(state: State, knobs: Knobs) -> list[str]:
    """Return what is wrong with a state, as "I<number>: …"; [] of a sound one."""
    problems = []
    spare = knobs.spare_groups
    # Groups that a user's function took beyond the bound are not bounded.
    beyond = [group for group in state.groups.values() if group.is_spare]
    committed = state.committed - state.num_spare
    if committed > base_limit(state, knobs) + spare:
        problems.append(f"I1: {committed} groups are committed, {base_limit(state, knobs)} + {spare} may be")
    most = max(knobs.max_samples_in_flight, knobs.samples_per_group)
    in_flight = state.samples_in_flight - sum(group.num_running for group in beyond)
    if in_flight > most:
        problems.append(f"I1: {in_flight} samples are in flight, {most} may be")
    problems += [f"I2: {text}" for text in infeasible(state, knobs)]
    ended_or_live = len(state.ended) + len(state.groups)
    overlap = [ordinal for ordinal in state.groups if ordinal in state.ended]
    if overlap or ended_or_live != state.next_ordinal or any(o >= state.next_ordinal for o in state.groups):
        problems.append(f"I6: {ended_or_live} groups live or ended of {state.next_ordinal}; both: {overlap}")
    leased = {group.ordinal for group in state.of("leased")}
    if leased != set(state.lease):
        problems.append(f"I6: leased {sorted(leased)}, in the fetch {sorted(state.lease)}")
    return problems


def infeasible(state: State, knobs: Knobs) -> list[str]:
    """Return the versions by which more groups are due than can be trained; [] where any may be dropped."""
    if knobs.at_deadline == "drop":
        return []
    trained_in_version = state.num_fetched - state.version * knobs.fetches_per_push
    slots = (knobs.fetches_per_push - trained_in_version) * knobs.groups_per_fetch
    spare = surplus(state, knobs)
    live = [group for group in [*state.unready(), *state.of("ready")] if not group.is_spare]
    problems = []
    for due in sorted({group.born + knobs.max_staleness for group in live}):
        count = sum(group.born + knobs.max_staleness <= due for group in live)
        room = max(0, slots + (due - state.version) * knobs.groups_per_version)
        if count > room + spare:
            problems.append(f"{count} groups are due by version {due}, {room} + {spare} can be trained by then")
    return problems


def wrong_begin(state: State, knobs: Knobs, action: events.Started) -> list[str]:
    """Return what is wrong with an action that is about to begin in `state`."""
    problems = []
    if isinstance(action, events.Fetch):
        groups = [state.groups[ordinal] for ordinal in action.ordinals]
        ready = sorted((group for group in state.of("ready")), key=lambda group: group.order)
        if [group.ordinal for group in ready[: len(groups)]] != list(action.ordinals):
            problems.append(f"I3: fetch of {action.ordinals}, ready are {[group.ordinal for group in ready]}")
        last = not (state.num_fetched + 1) % knobs.fetches_per_push
        live = [*state.unready(), *state.of("ready")]
        due = [g.ordinal for g in live if g.born + knobs.max_staleness <= state.version and not g.is_spare]
        missed = set(due) - set(action.ordinals)
        if last and missed:
            problems.append(f"I4: the last fetch of version {state.version} leaves {sorted(missed)}, which are due")
        old = [group.ordinal for group in groups if state.version - group.born > knobs.max_staleness]
        if old or action.version != state.version:
            problems.append(f"I5: groups {old} are older than {knobs.max_staleness} versions")
    if isinstance(action, events.Drop) and action.reason == "deadline" and knobs.at_deadline == "wait":
        problems.append(f"I4: group {action.ordinal} is dropped where it is to be waited for")
    if isinstance(action, events.Push) and knobs.in_flight == "drain" and state.samples_in_flight:
        problems.append(f"I7: {state.samples_in_flight} samples are in flight at a push")
    return problems
