"""What broke elsewhere, replayed by the name of its report; `test_properties.py` has more of them."""

import math
import random
from typing import Any

import pytest

from fusionrl.pipeline.knobs import PIPELINES, Knobs
from fusionrl.pipeline.state import GroupFailed, GroupReady, Pushed, SampleDone, Stop, StreamEnd, TrainDone, Wait
from tests.pipeline.world import World, run


def world_of(pipeline: str, **values: Any) -> World:
    save_interval = values.pop("save_interval", None)
    world = World(Knobs(**{**PIPELINES[pipeline], "groups_per_fetch": 2, **values}), save_interval=save_interval)
    world.settle()
    return world


def finish(world: World, *ordinals: int) -> None:
    """Let these groups become ready."""
    for ordinal in ordinals:
        for _ in range(world.state.groups[ordinal].num_running):
            world.happen(SampleDone(ordinal))
        world.happen(GroupReady(ordinal))


def train(world: World) -> tuple[int, ...]:
    """Let the trainers end what they have, and the push that follows; returns the groups."""
    lease = world.state.lease
    assert lease, world.waits
    world.happen(TrainDone())
    if world.state.pushing:
        world.happen(Pushed())
    return lease


def why(world: World, who: str) -> Wait:
    return next(action for action in world.waits if isinstance(action, Wait) and action.who == who)


def test_areal_602_a_straggler_is_waited_for_by_name_and_holds_no_more_than_its_place() -> None:
    """There, and in AReaL#1722, a straggler holds its slot for ever."""
    world = world_of("async-partial", max_staleness=1, admission_lead=1.0, num_fetches=10)
    assert sorted(world.state.groups) == [0, 1, 2, 3]
    finish(world, 1, 2)
    assert train(world) == (1, 2)  # version 0 goes on without group 0, which is due by version 1
    finish(world, 3, 4)  # 4 was admitted by version 1
    assert not world.state.lease
    assert why(world, "trainers").on == (0,) and "due" in why(world, "trainers").why
    assert len(world.state.groups) == 4  # and the engines are not given more and more meanwhile
    finish(world, 0)
    assert world.state.lease == (0, 3) and world.staleness[-2:] == [1, 1]


def test_prime_rl_1372_after_a_push_every_free_place_is_filled_at_once() -> None:
    world = world_of("on-policy", groups_per_fetch=64, num_fetches=3)
    finish(world, *range(64))
    assert not world.state.of("running")
    train(world)
    assert len(world.state.of("running")) == 64


def test_miles_1673_places_are_freed_by_the_sample() -> None:
    world = world_of("async", samples_per_group=4, max_samples_in_flight=8, num_fetches=10, admission_lead=2.0)
    assert sorted(world.state.groups) == [0, 1]
    for ordinal in (0, 0, 1, 1):
        world.happen(SampleDone(ordinal))
    assert sorted(world.state.groups) == [0, 1, 2]  # though no group is whole
    assert world.state.samples_in_flight == 8


def test_nemo_rl_3938_a_prompt_that_always_fails_is_given_up_and_counted() -> None:
    world = world_of("on-policy", num_fetches=2, max_group_tries=3)
    for _ in range(3):
        assert world.state.groups[0].phase == "running"
        world.happen(GroupFailed(0, "the tool raised"))
    assert 0 not in world.state.groups and world.state.num_dropped == 1 and 2 in world.state.groups


def test_a_function_that_always_raises_ends_the_run_with_its_words() -> None:
    world = world_of("async", num_fetches=10, max_failed_groups=4)
    while not world.stopped:
        world.happen(GroupFailed(min(world.state.groups), "ValueError: no such tool"))
    assert "4 groups failed one after the other" in world.stopped.reason
    assert "no such tool" in world.stopped.reason


def test_nemo_rl_2899_the_end_of_the_data_ends_the_run_and_says_so() -> None:
    world = world_of("async", num_fetches=10, admission_lead=1.0)
    world.happen(StreamEnd())
    finish(world, *sorted(world.state.groups)[:3])
    train(world)
    while not world.stopped:
        world.happen(world.possible()[0])
    assert "the data ended after 2 of 10 fetches" in world.stopped.reason


def test_miles_2030_engines_that_are_faster_fill_no_queue_with_stale_data() -> None:
    """What is ready is bounded by the lead, and so is its age."""
    world = world_of("async-partial", num_fetches=30)
    most = int((1 + world.knobs.admission_lead) * 2)
    for _ in range(20):
        while running := sorted(group.ordinal for group in world.state.of("running")):
            finish(world, *running)
        assert len(world.state.groups) <= most
        train(world)
    assert max(world.staleness) <= math.ceil(world.knobs.admission_lead) <= world.knobs.max_staleness


def test_nemo_rl_3238_a_straggler_wedges_nothing_at_a_resume() -> None:
    """One of its samples was done at the kill; it begins again, and where it never ends another takes its place."""
    world = world_of("async", num_fetches=6, save_interval=1, samples_per_group=2, max_group_tries=1)
    finish(world, 1, 2)
    world.happen(SampleDone(0))
    world.happen(TrainDone())
    for _ in range(3):
        world.restart()
        assert world.state.groups[0].phase == "running" and world.state.groups[0].num_running == 2
    world.happen(GroupFailed(0, "its time limit"))
    run(world, random.Random(8))
    assert world.stopped == Stop() and sorted(world.trained) == list(range(1, 13))


def test_openrlhf_1322_spare_groups_are_kept_over_a_resume() -> None:
    world = world_of("stream", spare_groups=4, num_fetches=8, save_interval=1)
    finish(world, *range(7))
    train(world)
    assert world.checkpoint is not None and len(world.state.of("ready", "leased")) == 5
    world.restart()
    ready = [group.ordinal for group in world.state.of("ready", "leased")]
    assert sorted(ready) == [2, 3, 4, 5, 6] and world.state.next_ordinal == 12


def test_verl_7759_a_resume_submits_nothing_beside_what_was_submitted() -> None:
    """What was under way begins again, and the bound counts it: as much is drawn as without the kill."""
    worlds = [world_of("async-partial", num_fetches=6, save_interval=1) for _ in range(2)]
    for world in worlds:
        finish(world, 0, 1)
        world.happen(TrainDone())
    going_on, killed = worlds
    killed.restart()
    going_on.happen(Pushed())
    assert killed.state.next_ordinal == going_on.state.next_ordinal
    assert sorted(killed.state.groups) == sorted(going_on.state.groups)
    run(killed, random.Random(9))
    assert sorted(killed.trained) == list(range(12))


def test_labs_molt_124_no_tail_straddles_a_push_that_drains() -> None:
    world = world_of("async", num_fetches=10, samples_per_group=3)
    finish(world, 0, 1)
    world.happen(TrainDone())
    while running := world.state.of("running"):
        assert not world.state.pushing and why(world, "trainers").on == tuple(group.ordinal for group in running)
        world.happen(SampleDone(running[0].ordinal))
    assert world.state.pushing  # though rewards are missing yet
    assert not world.state.of("running")


def test_verl_7568_and_vllm_54443_a_group_is_as_old_as_its_oldest_token() -> None:
    """The version at its admission says little: engines get weights one after the other."""
    world = world_of("async-partial", num_fetches=10, admission_lead=1.0)
    finish(world, 0, 1)
    train(world)
    (young,) = [group.ordinal for group in world.state.of("running") if group.born == 1][:1]
    world.happen(SampleDone(young))
    world.happen(GroupReady(young, oldest=0))
    assert world.state.groups[young].born == 0


def test_one_step_off_generates_a_batch_while_it_trains_the_one_before() -> None:
    """slime's train_async: the next batch is on its way before the first one is trained, and is whole at the push."""
    world = world_of("one-step-off", num_fetches=3)
    finish(world, 0, 1)
    assert world.state.lease == (0, 1) and {g.ordinal for g in world.state.of("running")} == {2, 3}
    world.happen(TrainDone())
    assert why(world, "trainers").on == (2, 3)  # the push waits
    finish(world, 2, 3)
    world.happen(Pushed())
    assert world.state.lease == (2, 3) and world.staleness == [0, 0, 1, 1]


def test_trainers_and_engines_of_one_device_work_in_turn() -> None:
    world = world_of("stream", exclusive=True, num_fetches=8)
    finish(world, *range(7))
    assert not world.state.lease and "devices" in why(world, "trainers").why
    finish(world, 7)
    for fetch in range(4):
        assert world.state.lease == (2 * fetch, 2 * fetch + 1) and not world.state.of("running")
        world.happen(TrainDone())
    assert world.state.pushing


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"admission_lead": 1.0}, "--admission-lead is 1"),
        ({"max_staleness": 1, "admission_lead": 1.5}, "0 to --max-staleness"),
        ({"in_flight": "retract"}, "--max-staleness of at least 1"),
        ({"max_staleness": 1, "exclusive": True}, "share devices"),
        ({"max_staleness": 1, "spare_groups": 3}, "give --admission-lead"),
        ({"update_weights_interval": 0}, "--update-weights-interval is 0"),
        ({"num_fetches": 0}, "num_fetches is 0"),
    ],
)
def test_knobs_that_contradict_each_other(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Knobs(groups_per_fetch=2, **values)
