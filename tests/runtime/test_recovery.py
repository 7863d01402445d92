"""When trainers come back and when not. What they get then: tests/e2e/test_recovery.py and tests/trainer."""

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import ray

from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.runtime import recovery as module
from fusionrl.runtime.ray_cluster import end_processes
from fusionrl.runtime.recovery import TrainerRecovery
from fusionrl.runtime.restarts import Restarts
from fusionrl.runtime.supervisor import ActorDied, Member
from tests.plan.test_plan import plan as make_plan

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2210"


def death_of(handle: object) -> ActorDied:
    died = ActorDied(f"{handle} died")
    died.member = Member(str(handle), handle, Any)  # type: ignore[arg-type]
    return died


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionrl.runtime.snapshots.snapshot_bytes", lambda config, plan: 1000.0)
    monkeypatch.setattr(
        module.ray,
        "nodes",
        lambda: [{"NodeID": node, "Resources": {"object_store_memory": 2.0**30}} for node in ("a", "b", "c")],
    )


class Run:
    """Trainers whose calls fail as a list says; starting them again is noted, and fails as another one says."""

    def __init__(self, death: ActorDied | None = None, **flags: object) -> None:
        config = Config.from_flat({"max_restarts": 3} | flags)
        rank: Any = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "ab"))
        self.rank, self.starts, self.failing = rank, 0, list[Exception]()
        groups = Mock(
            plan=Mock(takes_turns=False),
            takes_turns_inside=False,
            everyone={"trainer": [rank]},
            trained={"trainer": [rank]},
            bundles={"trainer": (3,)},
            policy=[],
            auxiliaries=[],
        )
        self.death = death

        def explain(error: Exception, among: list[object]) -> ActorDied | None:
            return self.death if self.death and self.death.member.handle in among else None

        registry = Mock(explain=explain)
        launcher = Mock(
            bundles=[Mock(node_id=node) for node in "aaab"],
            restarts=Restarts(config.run.max_restarts),
            registry=registry,
            is_running=True,
        )
        self.recovery = TrainerRecovery(config, launcher, groups, Mock(num_replaced=0), Mock())
        self.recovery._restart = self._restart  # type: ignore[method-assign]
        self.recovery.begin(Mock(published=None), None)
        self.train = groups.train

    def _restart(self) -> None:
        self.starts += 1
        self.recovery._is_setting_up = True
        if self.failing:
            raise self.failing.pop()


def rollout(number: int) -> Rollout:
    return Rollout(number, [f"shard {number}"])


def test_a_rank_that_died_comes_back_and_its_device_is_left_out_if_it_dies_again() -> None:
    run = Run()
    run.death = death_of(run.rank)
    run.train.side_effect = [RuntimeError("closed"), {"train/loss": 1.0}]
    run.failing = [RuntimeError("it is gone again"), RuntimeError("and again")]
    assert run.recovery.train(rollout(0)) == {"train/loss": 1.0}
    assert run.starts == 3 and run.recovery._failed_starts == {3: 2}
    run.train.side_effect = RuntimeError("closed")
    with pytest.raises(ActorDied):  # --max-restarts 3
        run.recovery.train(rollout(1))
    assert run.starts == 3


def raised_by(error: Exception) -> ray.exceptions.RayTaskError:
    """As Ray raises what the rank's actor has raised."""
    told = "\x1b[36mray::PolicyWorker.setup()\x1b[39m (pid=7, ip=127.0.0.1, actor_id=ab, repr=<PolicyWorker>)"
    return ray.exceptions.RayTaskError("setup", told, error)


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (ValueError("rank 1: placed on GPU 1 of its node, where torch sees 1"), {3: 1}),
        (RuntimeError("CUDA error: no CUDA-capable device is detected"), {3: 1}),
        (RuntimeError("CUDA error: out of memory"), {3: 1}),
        (RuntimeError(GLOO), {}),  # of another rank
    ],
)
def test_a_device_on_which_a_rank_cannot_be_set_up_is_to_blame(error: Exception, failed: dict[int, int]) -> None:
    run = Run()
    run.failing = [raised_by(error)]
    run.train.side_effect = [RuntimeError(GLOO), {"train/loss": 1.0}]
    assert run.recovery.train(rollout(0)) == {"train/loss": 1.0}
    assert run.starts == 2 and run.recovery._failed_starts == failed


def test_a_setup_that_never_succeeds_again_is_no_mistake_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    """Whose exit code would keep --supervise from starting the run again. A hook's error is one."""
    run = Run()
    run.failing = [raised_by(ValueError("torch sees no CUDA device")) for _ in range(3)]
    run.train.side_effect = RuntimeError(GLOO)
    with pytest.raises(module.NoStart, match="a trainer does not start again: torch sees no CUDA device"):
        run.recovery.train(rollout(0))
    run = Run()
    run.failing, run.train.side_effect = [raised_by(HookError("--custom-x raised"))], RuntimeError(GLOO)
    with pytest.raises(ray.exceptions.RayTaskError):
        run.recovery.train(rollout(0))
    assert run.starts == 1


@pytest.mark.parametrize(
    ("gone", "failed", "expected"),
    [
        (set(), {1: 1}, (0, 1)),  # once is chance
        (set(), {1: 2}, (0,)),
        ({0}, {}, (1,)),
        ({0}, {1: 2}, (1,)),  # the only one that is left is tried again
        ({0, 1}, {}, None),
    ],
)
def test_devices_that_are_left(gone: set[int], failed: dict[int, int], expected: tuple[int, ...] | None) -> None:
    run = Run()
    run.recovery._trainers.plan = replace(make_plan(actor_num_gpus_per_node=2), trainer_bundles=(0, 1))
    run.recovery._gone, run.recovery._failed_starts = gone, Counter(failed)
    if expected is None:
        with pytest.raises(RuntimeError, match="2 of 2 devices of the trainers are lost"):
            run.recovery._plan_of_rest()
    else:
        assert run.recovery._plan_of_rest().trainer_bundles == expected


def test_the_snapshot_that_is_being_taken_counts_after_a_death() -> None:
    """The shards went with the Buffer that made them, and only the snapshot of the step before leads on."""
    run = Run()
    run.train.side_effect = [{}, RuntimeError(GLOO), {}]
    run.recovery.train(rollout(0))
    snapshots: Any = Mock(newest=None)
    snapshots.settle = lambda: setattr(snapshots, "newest", SimpleNamespace(rollout_id=0))
    run.recovery._snapshots, run.recovery._buffer.num_replaced = snapshots, 1
    run.recovery.train(rollout(1))
    assert run.starts == 1 and list(run.recovery._kept) == [1]


def test_stalls_are_ended_only_where_trainers_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "end_on_nodes", lambda processes: None)
    run = Run()
    assert not run.recovery.end_stalled("it hangs")
    assert run.recovery.retry(lambda: run.recovery.end_stalled("it hangs"))
    run.recovery._trainers.plan.takes_turns = True  # type: ignore[misc]
    assert not run.recovery.retry(lambda: run.recovery.end_stalled("it hangs"), of_engines=True)


def test_no_snapshots_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In the store of each node of trainers. Without snapshots and checkpoints no shards are kept for them."""
    monkeypatch.setattr("fusionrl.runtime.snapshots.snapshot_bytes", lambda config, plan: 0.5 * 2**30)
    run = Run()
    assert run.recovery._interval == 0 and not run.recovery._keeps
    lack = "no snapshots are taken: they need 1.0 GiB in the object store that Ray has on a node, which has 0.7 GiB"
    assert lack in caplog.text
    assert Run(save_interval=5).recovery._keeps
    monkeypatch.setattr("fusionrl.runtime.snapshots.snapshot_bytes", lambda config, plan: 0.3 * 2**30)
    two = Run()
    assert two.recovery._interval == 1, "one node keeps nothing of another"
    two.recovery._trainers.bundles = {"trainer": (2, 3)}  # type: ignore[misc]
    assert two.recovery._snapshots.lacking(two.recovery._config) == "", (
        "each of two nodes has a half and the copy of the other"
    )
    two.recovery._trainers.bundles = {"trainer": (0, 1, 2, 3)}  # type: ignore[misc]
    assert "they need 0.9 GiB" in two.recovery._snapshots.lacking(two.recovery._config)
    two.recovery._trainers.takes_turns_inside = True  # type: ignore[misc]
    assert "actor and critic take turns" in two.recovery._snapshots.lacking(two.recovery._config)


@pytest.mark.parametrize(
    ("error", "of_engines", "comes_back"),
    [
        (RuntimeError(GLOO), False, True),
        (RuntimeError(f"trainer 0: {GLOO}"), True, False),  # in a push the peer may be an engine
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False, True),
        (RuntimeError("CUDA out of memory"), False, False),
        (RuntimeError("CUDA error: out of memory"), False, False),
        (RuntimeError("CUDA error: device-side assert triggered"), False, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, False),
        (HookError("--custom-rm-path raised"), False, False),
        (ValueError("bad data"), False, False),
    ],
)
def test_errors_of_ranks_that_live(error: Exception, of_engines: bool, comes_back: bool) -> None:
    run = Run()
    call = Mock(side_effect=[error, "done"])
    if comes_back:
        assert run.recovery.retry(call, of_engines=of_engines) == "done"
    else:
        with pytest.raises(type(error)):
            run.recovery.retry(call, of_engines=of_engines)
    assert run.starts == int(comes_back)


def test_the_death_of_another_process_is_not_theirs() -> None:
    run = Run(death_of("the Buffer"))
    with pytest.raises(RuntimeError, match="closed"):
        run.recovery.retry(Mock(side_effect=RuntimeError("closed")))
    assert run.starts == 0


@pytest.mark.parametrize(("max_restarts", "offloads"), [(0, False), (3, True)])
def test_no_snapshots_where_nothing_could_use_them(max_restarts: int, offloads: bool) -> None:
    run = Run(max_restarts=max_restarts)
    run.recovery._config.passthrough.optimizer["optimizer_cpu_offload"] = offloads
    run.recovery.begin(Mock(published=None), None)
    run.train.return_value = {}
    run.recovery.train(rollout(0))
    run.recovery.take_snapshot_if_due(0)  # the rank could take none
    assert not run.recovery._kept


def test_without_restarts_a_death_is_all_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(max_restarts=0)
    run.death = death_of(run.rank)
    run.train.side_effect = [{}, RuntimeError("closed")]
    run.recovery.train(rollout(0))
    with pytest.raises(RuntimeError, match="closed"):
        run.recovery.train(rollout(1))
    assert not caplog.records


def test_a_snapshot_that_a_checkpoint_follows_is_given_back() -> None:
    run = Run()
    saver: Any = Mock(published=None)
    run.recovery.begin(saver, None)
    run.recovery._interval, run.recovery._snapshots.newest = 0, Mock(rollout_id=2)
    run.recovery.take_snapshot_if_due(3)
    assert run.recovery._snapshots.newest is not None
    saver.published = Mock(rollout_id=3)
    run.recovery.take_snapshot_if_due(3)
    assert run.recovery._snapshots.newest is None


def test_shards_are_not_kept_for_snapshots_that_fail(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    run = Run()
    run.train.return_value = {}
    fails = Mock(side_effect=RuntimeError("the disk is full"))
    monkeypatch.setattr("fusionrl.runtime.snapshots.get", fails)
    run.rank.snapshot = Mock(**{"options.return_value.remote.return_value": (1, 2)})
    for number in range(5):
        run.recovery.train(rollout(number))
        run.recovery.take_snapshot_if_due(number)
    assert not run.recovery._kept and fails.call_count == 3
    assert "no snapshots are taken: 3 in a row failed" in caplog.text


# ------------------------------------------------------------------------------------ a restart itself
def restarting(run: Run, monkeypatch: pytest.MonkeyPatch, never: object = None) -> list[str]:
    """Let `_restart` be the real one, of ranks that start at once but for `never`; the phases, as they begin."""
    phases: list[str] = []

    def phase(name: str, **facts: int) -> Any:
        phases.append(name + "".join(f" {value}" for value in facts.values()))
        return nullcontext()

    del run.recovery._restart
    monkeypatch.setattr(module, "phase", phase)
    monkeypatch.setattr(module, "end_on_nodes", lambda processes: None)
    monkeypatch.setattr(module.ray, "kill", lambda actor: None)
    monkeypatch.setattr(module.ray, "wait", lambda refs, **_: (refs, [ref for ref in refs if ref is never]))
    groups: Any = run.recovery._trainers
    run.rank.hardware_facts = Mock(**{"remote.return_value": "facts"})
    groups.plan, groups.__len__ = replace(make_plan(), trainer_bundles=(3,)), lambda self: 1
    launcher: Any = run.recovery._launcher
    run.recovery._engines.everyone = []  # type: ignore[misc]
    launcher.make_trainers.return_value = ([], [])
    launcher.find_places.return_value = set()
    monkeypatch.setattr(module, "devices_gone", lambda bundles: set())
    return phases


def test_each_part_of_a_restart_is_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """So --stall-timeout-s need not be longer than all steps that are trained again."""
    run = Run(save_interval=10, snapshot_interval=0)
    phases = restarting(run, monkeypatch)
    run.train.side_effect = [{}, {}, RuntimeError(GLOO), {}, {}, {}]
    run.recovery._failed_starts[0] = 1
    for number in range(3):
        run.recovery.train(rollout(number))
    again = ["train again 1", "train again 2"]
    assert phases == ["bring trainers back", "start trainers again", "restore trainers", *again]
    assert not run.recovery._failed_starts


@pytest.mark.parametrize(
    ("gone", "said", "failed"),
    [({3}, "a node died while trainers started", {}), ({0}, "no trainer has started on 1 device within 0 s", {3: 2})],
)
def test_a_rank_that_does_not_start(
    gone: set[int], said: str, failed: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its node died, it is not waited for, and no device is to blame."""
    run = Run(stall_timeout_s=0.5)
    restarting(run, monkeypatch, never="facts")
    monkeypatch.setattr(module, "devices_gone", lambda bundles: gone)
    with pytest.raises(module.NoStart, match=said):
        run.recovery._restart()
    assert run.recovery._failed_starts == failed


def test_without_a_state_the_run_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Neither snapshots nor checkpoints: after the first step nothing leads to the weights that were lost."""
    run = Run(snapshot_interval=0, no_save=True)
    run.death = death_of(run.rank)
    run.train.side_effect = [{"train/loss": 1.0}, RuntimeError("closed")]
    run.recovery.train(rollout(0))
    with pytest.raises(RuntimeError, match="closed"):
        run.recovery.train(rollout(1))
    assert run.starts == 0 and "no snapshot or checkpoint has step 1" in caplog.text


def test_a_snapshot_lets_the_shards_before_it_go() -> None:
    run = Run()
    run.train.return_value = {}
    for number in range(3):
        run.recovery.train(rollout(number))
    assert list(run.recovery._kept) == [0, 1, 2]
    run.recovery._snapshots.newest = Mock(rollout_id=1)
    run.recovery._interval = 0
    run.recovery.take_snapshot_if_due(2)
    assert list(run.recovery._kept) == [2]


def test_a_state_that_is_lost_costs_another_start() -> None:
    """Ranks that have their part of the snapshot wait for the others: all start again, and load the checkpoint."""
    run = Run()
    groups, lost = run.recovery._trainers, ray.exceptions.ObjectLostError("ab", None, "")
    groups.restore.side_effect = ray.exceptions.RayTaskError("restore", "", lost)  # type: ignore[attr-defined]
    run.recovery._snapshots.newest = Mock(rollout_id=3)
    run.recovery._start = Mock(rollout_id=3, path="step_4")
    states = []

    def restart() -> None:
        states.append(run.recovery._put_state())

    run.recovery._restart = restart  # type: ignore[method-assign]
    assert run.recovery.retry(Mock(side_effect=[RuntimeError(GLOO), "done"])) == "done"
    assert states == [3] and not run.recovery.is_behind
    expected = [call("load", "step_4", wait=groups.wait_for)]
    assert groups.restore.call_count == 1 and groups.finish.mock_calls == expected  # type: ignore[attr-defined]


def test_trainers_that_did_not_come_back_are_behind() -> None:
    run = Run()
    run.recovery._restart = Mock(side_effect=ValueError("the file system is gone"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="is gone"):
        run.recovery.retry(Mock(side_effect=RuntimeError(GLOO)))
    assert run.recovery.is_behind


def test_what_a_rank_has_started_ends_with_it() -> None:
    """A writer of checkpoints would continue in the folder of the next save."""
    starts = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        child = psutil.Process(int(rank.stdout.readline()))
        end_processes([rank.pid])
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
