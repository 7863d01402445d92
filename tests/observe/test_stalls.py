"""When the watchdog speaks, and what it says. Both are pure: the clock is told."""

from fusionrl.observe.rollouts import as_ranges
from fusionrl.observe.stalls import (
    EndedPhase,
    EngineLoad,
    Frame,
    LatePhase,
    Phase,
    ProcessState,
    StallClock,
    describe_ranks,
    join_names,
    read_stacks,
    stall_line,
)

IN_COLLECTIVE = """Current thread 0x00007f01 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2891 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/fusionrl/fusionrl/trainer/gradients.py", line 40 in reduce_gradients
  File "/home/me/fusionrl/fusionrl/trainer/steps.py", line 12 in take
"""
IN_HOOK = """[2026] a line of the log
Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
Current thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 706 in readinto
  File "/home/me/rewards/hooks.py", line 17 in my_loss
  File "/home/me/fusionrl/fusionrl/trainer/loss.py", line 9 in loss
another line
"""


def _seen(role: str, stacks: str = "", trouble: str = "", pid: int = 7) -> ProcessState:
    return ProcessState(role, pid, "n1", "python", trouble, stacks)


class _Run:
    """A driver whose phases follow one another, looked at once a second."""

    def __init__(self, floor_s: float = 60.0, **limits: float) -> None:
        self.clock, self.now = StallClock(floor_s, **limits), 0.0
        self.lasted: dict[str, list[float]] = {}

    def phase(self, name: str, seconds: int) -> list[LatePhase | EndedPhase]:
        begun, told = Phase(name, self.now), []
        for _ in range(seconds):
            told.append(self.clock.look(self.now, begun, self.lasted))
            self.now += 1.0
        self.lasted.setdefault(name, []).append(float(seconds))
        return [one for one in told if one is not None]


def test_a_phase_is_late_after_five_medians_and_never_before_the_floor() -> None:
    run = _Run()
    assert [run.phase("train", seconds) for seconds in (20, 21, 22)] == [[]] * 3
    assert [run.phase("push", 1) for _ in range(3)] == [[]] * 3
    assert [one.seconds for one in run.phase("push", 70)] == [60.0]
    ended, late = run.phase("train", 120)
    assert ended == EndedPhase("push", 70.0)
    assert isinstance(late, LatePhase) and (late.phase, late.seconds, late.usual_s) == ("train", 105.0, 21.0)


def test_it_speaks_with_pauses_that_double_and_of_the_end() -> None:
    """The first of its kind is given five times the floor."""
    run = _Run()
    (told,) = run.phase("train", 400)
    assert (told.seconds, told.usual_s) == (300.0, None)
    run = _Run()
    run.phase("train", 2)
    told = run.phase("train", 1000)
    assert [(one.seconds, one.number) for one in told] == [(60.0, 1), (120.0, 2), (240.0, 3), (480.0, 4), (960.0, 5)]
    assert run.phase("push", 10) == [EndedPhase("train", 1000.0)]


def test_the_time_limit_ends_the_run_also_where_it_is_no_surprise() -> None:
    run = _Run(timeout_s=90.0)
    run.phase("train", 80)
    assert [(one.seconds, one.is_last) for one in run.phase("train", 91)] == [(90.0, True)]
    clock = StallClock(1.0)
    assert clock.look(0.0, None, {}) is clock.look(1000.0, None, {}) is None, "between phases nothing is said"


def test_stacks_are_read_out_of_a_log() -> None:
    other, main = read_stacks(IN_HOOK)
    assert _seen("trainer-0", IN_HOOK).thread == main
    assert (len(other.frames), len(main.frames)) == (1, 3)
    assert str(main.place) == "my_loss (rewards/hooks.py:17)"
    assert main.collective is None
    (waiting,) = read_stacks(IN_COLLECTIVE)
    assert waiting.collective == "all_reduce"
    assert str(waiting.place) == "reduce_gradients (trainer/gradients.py:40)"
    assert read_stacks("no stacks\n  File of another kind\n") == []


def test_a_hung_collective_names_the_ranks_that_did_not_arrive() -> None:
    seen = [_seen(f"trainer-{rank}", IN_COLLECTIVE) for rank in (0, 1, 2, 5)]
    seen += [_seen("trainer-3", trouble="stopped by a signal", pid=4711), _seen("trainer-4", IN_HOOK)]
    assert describe_ranks(seen) == (
        "ranks 0-2, 5 wait in all_reduce of reduce_gradients (trainer/gradients.py:40),"
        " where rank 3 (stopped by a signal), rank 4 (in my_loss (rewards/hooks.py:17)) did not arrive"
    )


def test_the_line_names_who_is_waited_for_and_how_far_the_others_are() -> None:
    late = LatePhase("train", 312.4, 21.0, 1)
    line = stall_line(
        late,
        ["trainer rank 3", "trainer rank 7"],
        [_seen("engine-1", trouble="stopped by a signal", pid=12)],
        sizes={"trainer rank": 8},
        progress=["2 samples are scored (sample 17 for 300 s)"],
        engines=[EngineLoad("engine 0", 12, 3, 0.0), EngineLoad("engine 1", fault="does not answer within 3 s")],
        file="logs/stall-1.a1.txt",
    )
    assert line == (
        '"train" has taken 312 s (median 21 s); waits for trainer ranks 3, 7 of 8; engine-1 is stopped by a signal'
        " (pid 12); 2 samples are scored (sample 17 for 300 s); engine 0: 12 running, 3 waiting, 0 tok/s; engine 1 does"
        " not answer within 3 s; stacks in logs/stall-1.a1.txt"
    )
    line = stall_line(LatePhase("save", 60.0, None, 1), [], driver="publish (runtime/checkpoints.py:80)")
    assert line == '"save" has taken 60 s (the first of its kind); the driver is in publish (runtime/checkpoints.py:80)'


def test_names_and_numbers_are_taken_together() -> None:
    assert as_ranges([5, 0, 1, 2, 9, 8]) == "0-2, 5, 8-9"
    names = [f"engine {index}: pause" for index in (1, 2)] + ["trainer 0", "the Buffer"]
    assert join_names(names, {}) == "engines 1-2: pause, trainer 0, the Buffer"
    ranks = [f"trainer rank {rank}" for rank in range(512)]
    assert join_names(ranks, {"trainer rank": 512}) == "trainer ranks 0-511 of 512"


def test_a_frame_is_fusionrl_s_by_the_package_s_files_and_not_by_the_name_of_a_folder() -> None:
    def frame(file: str) -> Frame:
        return Frame(file, 9, "f")

    ours = ("/clones/fusionrl/fusionrl/trainer/loss.py", "/venv/lib/python3.12/site-packages/fusionrl/trainer/loss.py")
    assert [(one.is_fusionrl, str(one)) for one in map(frame, ours)] == [(True, "f (trainer/loss.py:9)")] * 2
    users = ("/clones/fusionrl/tests/test_watchdog.py", "/home/fusionrl/my/reward.py", "/home/me/fusionrl/loss.py")
    assert not any(frame(file).is_fusionrl or frame(file).is_library for file in users)
    assert str(frame(users[1])) == "f (my/reward.py:9)"
    library = frame("/home/fusionrl/venv/lib/python3.12/site-packages/torch/nn/functional.py")
    assert library.is_library and not library.is_fusionrl


def test_ranks_in_different_collectives_are_told_apart() -> None:
    seen = [_seen("trainer-0", IN_COLLECTIVE), _seen("trainer-1", IN_COLLECTIVE.replace("all_reduce", "broadcast"))]
    assert describe_ranks(seen).startswith("the ranks wait in different collectives: rank 0 waits in all_reduce of")
    assert describe_ranks(seen[:1]).startswith("rank 0 waits in all_reduce")
