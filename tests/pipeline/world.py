"""A world that the controller runs in: it begins what is decided, and everything else happens in a random order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import get_args

from fusionrl.pipeline import decide as rules
from fusionrl.pipeline import events
from fusionrl.pipeline.apply import apply
from fusionrl.pipeline.events import Action
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import State
from tests.pipeline.invariants import violations, wrong_begin

STARTED = get_args(events.Started)


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class World:
    """A state with its knobs, and the next events that may come."""

    knobs: Knobs
    state: State = field(default_factory=State)
    waits: tuple[Action, ...] = ()
    stopped: events.Stop | None = None
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
            actions = rules.decide(self.state, self.knobs)
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
        if isinstance(action, events.Stop):
            self.stopped = action
        elif isinstance(action, events.Admit):
            self.admit(action)
        elif isinstance(action, STARTED):
            self.complain(wrong_begin(self.state, self.knobs, action))
            if isinstance(action, events.Fetch):
                self.staleness += [action.version - self.state.groups[o].born for o in action.ordinals]
            self.do(action)
        return isinstance(action, (events.Admit, *STARTED))

    def admit(self, action: events.Admit) -> None:
        new = range(self.state.next_ordinal, self.state.next_ordinal + action.num_new)
        for ordinal in (*action.pending, *new):
            known = self.state.groups.get(ordinal)
            oldest = known.born if known is not None and known.has_tokens else None
            self.do(events.Admitted(ordinal, self.knobs.samples_per_group, oldest))

    def do(self, event: events.Event | events.Started) -> None:
        self.log.append(event)
        apply(self.state, self.knobs, event)

    def check(self) -> None:
        self.complain(violations(self.state, self.knobs))

    def happen(self, event: events.Event | events.Drop) -> None:
        """One thing happens, and what it allows begins."""
        if isinstance(event, events.TrainDone):
            self.trained += self.state.lease
        self.do(event)
        self.settle()

    def possible(self) -> list[events.Event | events.Drop]:
        """What may happen next, of what goes well."""
        state = self.state
        found: list[events.Event | events.Drop] = [events.SampleDone(group.ordinal) for group in state.of("running")]
        found += [events.GroupReady(group.ordinal) for group in state.of("scoring")]
        found += [events.TrainDone()] if state.lease else []
        found += [events.Pushed()] if state.pushing else []
        return found

    def mishap(self, choose: random.Random) -> events.Event | events.Drop | None:
        """Something that goes wrong."""
        state = self.state
        groups = state.of("running", "scoring")
        if not groups:
            return None
        group = choose.choice(groups)
        found = [
            events.GroupFailed(group.ordinal, "it raised"),
            events.Drop(group.ordinal, "filtered"),
            events.Parked(group.ordinal, choose.choice([None, group.born])),
        ]
        if not state.stream_ended and not state.pushing:
            found.append(events.Admitted(state.next_ordinal, self.knobs.samples_per_group, is_spare=True))
        return choose.choice(found)

    def restart(self) -> None:
        """Killed, and resumed from the last checkpoint; ready groups were saved with it."""
        assert self.checkpoint is not None
        kept = {
            ordinal: born for ordinal, phase, born, *_ in self.checkpoint["groups"] if phase in ("ready", "running")
        }
        self.state = State.from_dict(self.checkpoint, self.knobs.fetches_per_push, kept)
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
