"""The controller's invariants, whatever happens and in whatever order."""

import random

import pytest

from fusionrl.pipeline import controller
from fusionrl.pipeline.knobs import PIPELINES, Knobs
from fusionrl.pipeline.state import Push, State, Stop, StreamEnd, Wait
from tests.pipeline.world import World, run

NUM_EVENTS = 20_000


def some_knobs(choose: random.Random, **fixed: object) -> Knobs:
    """A pipeline's preset, and anything else at random."""
    values: dict = {**PIPELINES[choose.choice(list(PIPELINES))], "groups_per_fetch": choose.randint(1, 4)}
    values |= {"num_fetches": choose.randint(1, 12), "samples_per_group": choose.randint(1, 3)}
    values |= {"max_group_tries": choose.randint(1, 3), "max_samples_in_flight": choose.choice([1, 4, 9, 1000])}
    if choose.random() < 0.5:
        values["update_weights_interval"] = choose.randint(1, 4)
    if values["max_staleness"]:
        if choose.random() < 0.5:
            values["max_staleness"] = choose.randint(1, 4)
            most = values["max_staleness"]
            values["admission_lead"] = choose.choice([most, choose.uniform(0, most)])
    else:
        values["spare_groups"] = choose.choice([0, 0, 1, 4])
        values["exclusive"] = choose.random() < 0.3
    if choose.random() < 0.3:
        values["at_deadline"] = "drop"
    return Knobs(**values | fixed)


def whole_run(
    seed: int, watched: tuple[str, ...] = (), save_interval: int | None = None, **fixed: object
) -> tuple[World, int]:
    """A run of random knobs to its end, with mishaps and restarts."""
    choose = random.Random(seed)
    interval = choose.choice([None, 1, 2, 3]) if save_interval is None else save_interval
    world = World(some_knobs(choose, **fixed), slow=choose.choice([2, 5]), watched=watched, save_interval=interval)
    rates = {"mishaps": choose.choice([0, 0.05, 0.3]), "restarts": choose.choice([0, 0.02])}
    count = run(world, choose, **rates, stragglers=choose.choice([0, 0.9, 0.99]))
    return world, count


def test_every_run_ends_with_all_that_was_asked_for() -> None:
    """Filtered groups give their place back (SkyRL), the end needs no further version (prime-rl#2912), no staleness is
    none (verl#4449), and groups as old as the bound are trained (prime-rl#1901).
    """
    count = seed = 0
    names, exact = set(), set[int]()
    while count < NUM_EVENTS:
        world, added = whole_run(seed)
        knobs = world.knobs
        assert world.stopped == Stop() and knobs.num_fetches is not None, seed
        assert len(world.trained) == len(set(world.trained)) == knobs.num_fetches * knobs.groups_per_fetch, seed
        assert max(world.staleness) <= knobs.max_staleness, seed
        exact |= {knobs.max_staleness} & {max(world.staleness)}
        names |= {(knobs.in_flight, knobs.at_deadline, knobs.max_staleness > 0)}
        count, seed = count + added, seed + 1
    assert len(names) >= 5 and exact >= {0, 1, 2, 3}


def test_without_mishaps_the_data_are_trained_as_they_come() -> None:
    """With `wait` nothing is dropped, so long answers are trained as often as short ones (tinker#822). A resume skips
    no prompt (NeMo-RL#3599) and counts none twice (verl#7933).
    """
    for seed in range(40):
        choose = random.Random(seed)
        world = World(some_knobs(choose, at_deadline="wait", spare_groups=0), save_interval=choose.choice([None, 1, 2]))
        run(world, choose, restarts=0.02, stragglers=choose.choice([0, 0.99]))
        assert sorted(world.trained) == list(range(len(world.trained))) and not world.state.num_dropped


def test_the_data_may_end_at_any_time() -> None:
    for seed in range(100):
        choose = random.Random(seed)
        world = World(some_knobs(choose), save_interval=choose.choice([None, 1, 2, 3]))
        world.settle()
        for _ in range(choose.randrange(80)):
            mishap = world.mishap(choose) if choose.random() < 0.1 else None
            if not world.stopped:
                world.happen(mishap or choose.choice(world.possible()))
        if not world.stopped:
            world.happen(StreamEnd())
        run(world, choose, restarts=0.02)
        assert isinstance(controller.decide(world.state, world.knobs)[0], Stop), "it stays ended"
        assert max(world.staleness, default=0) <= world.knobs.max_staleness
        assert len(world.trained) == len(set(world.trained))


# --- each invariant notices the defect that it is there for ---


def drain_all(state: State, knobs: Knobs):
    """Waits for ready groups as well, which are trained after the push only."""
    live = [ordinal for ordinal, group in state.groups.items() if group.phase != "pending"]
    return (Wait("trainers", "", tuple(live)),) if live else (Push(state.version + 1),)


def lose_the_unready(cls, data, update_weights_interval, kept=None):
    state = ORIGINAL(data, update_weights_interval, kept)
    state.groups = {ordinal: group for ordinal, group in state.groups.items() if group.phase == "ready"}
    return state


def late_for_this_version_only(state: State, knobs: Knobs, left):
    late = LATECOMERS(state, knobs, left)
    return [group for group in late if group.born + knobs.max_staleness <= state.version]


TWO_AHEAD = {"max_staleness": 2, "admission_lead": 2.0, "in_flight": "retract", "at_deadline": "wait"}
TWO_AHEAD |= {"spare_groups": 0, "exclusive": False}
ORIGINAL, LATECOMERS = State.from_dict, controller.latecomers
NEW_PERMITS, IN_ORDER = controller.new_permits, controller.in_dispatch_order
MUTANTS = {
    "I1 one group too many": (controller, "new_permits", lambda *given: NEW_PERMITS(*given) + 1, {}),
    "I1 any number of samples": (controller, "permits", lambda state, knobs: (1000, ""), {"max_samples_in_flight": 4}),
    "I2 due later is not due": (controller, "latecomers", late_for_this_version_only, TWO_AHEAD),
    "I3 the newest first": (controller, "in_dispatch_order", lambda groups: IN_ORDER(groups)[::-1], {}),
    "I4 nobody is late": (controller, "latecomers", lambda state, knobs, left: [], {"at_deadline": "wait"}),
    "I5 kept too long": (controller, "left_behind", lambda state, knobs, left: [], {"at_deadline": "drop"}),
    "I6 forgotten": (controller, "_end", lambda state, ordinal, *, dropped: state.groups.pop(ordinal), {}),
    "I6 lost at a resume": (State, "from_dict", classmethod(lose_the_unready), {"save_interval": 1}),
    "I7 no drain": (controller, "push_actions", lambda state, _: (Push(state.version + 1),), {"in_flight": "drain"}),
    "I8 drained for ever": (controller, "push_actions", drain_all, {}),
}


def test_every_invariant_has_a_mutant() -> None:
    assert {name[:2] for name in MUTANTS} == {f"I{number}" for number in range(1, 9)}


def what_breaks(seed: int, label: str, fixed: dict) -> str:
    try:
        whole_run(seed, watched=(label,), **fixed)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    label, (owner, attribute, mutant, fixed) = name[:2], MUTANTS[name]
    for seed in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, mutant)
            said = what_breaks(seed, label, fixed)
        if label in said or (label == "I5" and "versions later" in said):  # which is asserted where it matters
            whole_run(seed, **fixed)  # all is well without it
            return
    raise AssertionError(f"nobody noticed: {name}")
