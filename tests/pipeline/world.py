"""A world that the controller runs in, with invariants of every state.

It begins what is decided, and everything else happens in a random order.
"""

import random
from dataclasses import dataclass, field
from typing import get_args

from fusionrl.pipeline import controller
from fusionrl.pipeline.controller import apply, base_limit, surplus
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import (
    Action,
    Admit,
    Admitted,
    Drop,
    Event,
    Fetch,
    GroupFailed,
    GroupReady,
    Parked,
    Push,
    Pushed,
    SampleDone,
    Started,
    State,
    Stop,
    TrainDone,
)

STARTED = get_args(Started)


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class World:
    """A state with its knobs, and the next events that may come."""

    knobs: Knobs
    state: State = field(default_factory=State)
    waits: tuple[Action, ...] = ()
    stopped: Stop | None = None
    trained: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    save_interval: int | None = None  # fetches between checkpoints
    checkpoint: dict | None = None
    num_before: int = 0  # of `trained`, at the checkpoint
    log: list[object] = field(default_factory=list)  # what has happened, in order
    slow: int = 5
    watched: tuple[str, ...] = ()  # beginnings of the invariants' texts that count, () all

    def complain(self, wrong: list[str]) -> None:
        found = [text for text in wrong if text.startswith(self.watched or ("",))]
        if found:
            raise Broken("; ".join(found))

    def settle(self) -> None:
        """Begin whatever may begin, until all that is left are waits or the end."""
        for _ in range(100_000):
            self.save_if_due()
            actions = controller.decide(self.state, self.knobs)
            if not actions:
                raise Broken("nothing is decided, not even a wait")
            begun = False
            for action in actions:
                begun |= self.begin(action)
            self.check()
            if self.stopped or not begun:
                self.waits = actions
                return
        raise Broken("it decides without end")

    def save_if_due(self) -> None:
        """Take a checkpoint after every `save_interval` fetches, as the driver does, before the push."""
        last, trained = (self.checkpoint or {"num_trained": 0})["num_trained"], self.state.num_trained
        if self.save_interval and not self.state.lease and trained // self.save_interval > last // self.save_interval:
            self.checkpoint, self.num_before = self.state.to_dict(), len(self.trained)

    def begin(self, action: Action) -> bool:
        """Begin one action; returns whether that changed anything."""
        if isinstance(action, Stop):
            self.stopped = action
        elif isinstance(action, Admit):
            self.admit(action)
        elif isinstance(action, STARTED):
            self.complain(wrong_begin(self.state, self.knobs, action))
            if isinstance(action, Fetch):
                self.staleness += [action.version - self.state.groups[o].born for o in action.ordinals]
            self.do(action)
        return isinstance(action, (Admit, *STARTED))

    def admit(self, action: Admit) -> None:
        new = range(self.state.next_ordinal, self.state.next_ordinal + action.num_new)
        for ordinal in (*action.pending, *new):
            known = self.state.groups.get(ordinal)
            oldest = known.born if known is not None and known.has_tokens else None
            self.do(Admitted(ordinal, self.knobs.samples_per_group, oldest))

    def do(self, event: Event | Started) -> None:
        self.log.append(event)
        apply(self.state, self.knobs, event)

    def check(self) -> None:
        self.complain(violations(self.state, self.knobs))

    def happen(self, event: Event | Drop) -> None:
        """One thing happens, and what it allows begins."""
        if isinstance(event, TrainDone):
            self.trained += self.state.lease
        self.do(event)
        self.settle()

    def possible(self) -> list[Event | Drop]:
        """What may happen next, of what goes well."""
        state = self.state
        found: list[Event | Drop] = [SampleDone(group.ordinal) for group in state.of("running")]
        found += [GroupReady(group.ordinal) for group in state.of("scoring")]
        found += [TrainDone()] if state.lease else []
        found += [Pushed()] if state.pushing else []
        return found

    def mishap(self, choose: random.Random) -> Event | Drop | None:
        """Something that goes wrong."""
        state = self.state
        groups = state.of("running", "scoring")
        if not groups:
            return None
        group = choose.choice(groups)
        found = [
            GroupFailed(group.ordinal, "it raised"),
            Drop(group.ordinal, "filtered"),
            Parked(group.ordinal, choose.choice([None, group.born])),
        ]
        if not state.stream_ended and not state.pushing:
            found.append(Admitted(state.next_ordinal, self.knobs.samples_per_group, is_spare=True))
        return choose.choice(found)

    def restart(self) -> None:
        """Killed, and resumed from the last checkpoint; ready groups were saved with it."""
        assert self.checkpoint is not None
        kept = {
            ordinal: born for ordinal, phase, born, *_ in self.checkpoint["groups"] if phase in ("ready", "running")
        }
        self.state = State.from_dict(self.checkpoint, self.knobs.update_weights_interval, kept)
        del self.trained[self.num_before :]
        self.settle()


def run(
    world: World,
    choose: random.Random,
    mishaps: float = 0.0,
    restarts: float = 0.0,
    stragglers: float = 0.0,
    limit: int = 50_000,
) -> int:
    """Let things happen until the run stops; returns how many did.

    stragglers  how seldom something happens to one group of `World.slow`, while anything else can
    """
    world.settle()
    for count in range(limit):
        if world.stopped:
            return count
        if restarts and world.checkpoint is not None and choose.random() < restarts:
            world.restart()
            continue
        event = world.mishap(choose) if choose.random() < mishaps else None
        possible = world.possible()
        if event is None and not possible:
            raise Broken(f"I8: nothing can happen any more: {world.waits}")
        quick = [one for one in possible if getattr(one, "ordinal", 1) % world.slow]
        world.happen(event or choose.choice(quick if quick and choose.random() < stragglers else possible))
    raise Broken(f"I8: no end after {limit} events")


# ------------------------------------------------------------------------------------ invariants of every state
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
    trained_in_version = state.num_fetched - state.version * knobs.update_weights_interval
    slots = (knobs.update_weights_interval - trained_in_version) * knobs.groups_per_fetch
    spare = surplus(state, knobs)
    live = [group for group in [*state.unready(), *state.of("ready")] if not group.is_spare]
    problems = []
    for due in sorted({group.born + knobs.max_staleness for group in live}):
        count = sum(group.born + knobs.max_staleness <= due for group in live)
        room = max(0, slots + (due - state.version) * knobs.groups_per_version)
        if count > room + spare:
            problems.append(f"{count} groups are due by version {due}, {room} + {spare} can be trained by then")
    return problems


def wrong_begin(state: State, knobs: Knobs, action: Started) -> list[str]:
    """Return what is wrong with an action that is about to begin in `state`."""
    problems = []
    if isinstance(action, Fetch):
        groups = [state.groups[ordinal] for ordinal in action.ordinals]
        ready = sorted((group for group in state.of("ready")), key=lambda group: group.order)
        if [group.ordinal for group in ready[: len(groups)]] != list(action.ordinals):
            problems.append(f"I3: fetch of {action.ordinals}, ready are {[group.ordinal for group in ready]}")
        last = not (state.num_fetched + 1) % knobs.update_weights_interval
        live = [*state.unready(), *state.of("ready")]
        due = [g.ordinal for g in live if g.born + knobs.max_staleness <= state.version and not g.is_spare]
        missed = set(due) - set(action.ordinals)
        if last and missed:
            problems.append(f"I4: the last fetch of version {state.version} leaves {sorted(missed)}, which are due")
        old = [group.ordinal for group in groups if state.version - group.born > knobs.max_staleness]
        if old or action.version != state.version:
            problems.append(f"I5: groups {old} are older than {knobs.max_staleness} versions")
    if isinstance(action, Drop) and action.reason == "deadline" and knobs.at_deadline == "wait":
        problems.append(f"I4: group {action.ordinal} is dropped where it is to be waited for")
    if isinstance(action, Push) and knobs.in_flight == "drain" and state.samples_in_flight:
        problems.append(f"I7: {state.samples_in_flight} samples are in flight at a push")
    return problems
