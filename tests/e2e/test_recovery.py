"""A trainer rank that dies or hangs: all come back within the run, and the run continues as if nothing had happened."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions

from tests.clock import here_s
from tests.e2e.launch import launch, metrics_of, run
from tests.e2e.test_exactness import differing, numbers, sft_flags
from tests.e2e.test_two_nodes import token as token
from tools.repeat_runs import first_difference, weights_differ

pytestmark = pytest.mark.e2e
HOOKS = "tests/e2e/hooks.py"
STRIKES = ["--custom-megatron-before-train-step-hook-path", f"{HOOKS}:strikes"]
TWO = ["--actor-num-gpus-per-node", "2"]
MOST_S = 30.0  # to be back


def restarts(folder: Path, most_s: float = MOST_S) -> list[tuple[float, int, int, int]]:
    """(seconds, devices, step of the state, steps trained again) of each time that the trainers came back."""
    text = (folder / "logs" / "driver.log").read_text()
    pattern = (
        r"the trainers are back after ([\d.]+) s, on (\d+) devices?, with the weights of step (\d+)"
        r"(?:; trained again: (\d+) steps?)?$"
    )
    found = re.findall(pattern, text, re.MULTILINE)
    limit_s = max(here_s(most_s), 3 * first_step_s(folder))  # other tests slow both
    assert all(float(seconds) < limit_s for seconds, *_ in found), (found, limit_s)
    return [(float(seconds), int(devices), int(step), int(again or 0)) for seconds, devices, step, again in found]


def engines_started(folder: Path) -> int:
    return (folder / "logs" / "engine-0.log").read_text().count("The server is fired up")


def phases(folder: Path) -> list[tuple[str, float, float]]:
    """(name, start, seconds) of each of the driver's."""
    events = map(json.loads, (folder / "timeline" / "driver.a1.jsonl").read_text().splitlines())
    return [(e[2], e[3] / 1e6, e[4] / 1e6) for e in events if isinstance(e, list) and e[0] == "X"]


def longest_phase_s(folder: Path) -> float:
    return max(seconds for _, _, seconds in phases(folder))


def first_step_s(folder: Path) -> float:
    """From the start of the run to the end of its first step."""
    return min(start + seconds for name, start, seconds in phases(folder) if name == "step")


def assert_equal(one: Path, other: Path) -> None:
    """Every number of training and rollouts, and the weights at the end, are the same bit by bit."""
    assert first_difference(one, other) == ""
    assert not weights_differ(one / "hf", other / "hf")


def test_tensor_parallel_ranks_come_back(rl_flags: list[str], tmp_path: Path) -> None:
    """A rank is killed before the second optimizer step of a rollout, another time before the first. The live run keeps
    its engine, and gives the same samples, numbers and weights as one in which nothing happened."""
    flags = [*rl_flags, *TWO, "--tensor-model-parallel-size", "2", "--num-rollout", "4", "--num-steps-per-rollout", "2"]
    flags += [*STRIKES, "--no-save", "--save-token-values"]
    for name, strikes in (("one", ""), ("other", "SIGKILL 1 1 1,SIGKILL 0 3 0")):
        folder = tmp_path / name
        more = ["--run-dir", str(folder), "--save-hf", str(folder / "hf")]
        run([*flags, *more], tmp_path, FUSIONRL_TEST_STRIKES=strikes)
    one, other = tmp_path / "one", tmp_path / "other"
    assert [back[1:] for back in restarts(other)] == [(2, 1, 0), (2, 3, 0)] and not restarts(one)
    assert engines_started(one) == engines_started(other) == 1
    assert_equal(one, other)
    assert [row.get("run/restarts_trainers", 0) for row in metrics_of(other)] == [0, 0, 1, 1, 2]
    for step in range(1, 5):  # what training found out about the samples
        rows = [folder / "rollouts" / "trained" / f"step_{step:06d}.train.a1.jsonl" for folder in (one, other)]
        assert rows[0].read_bytes() == rows[1].read_bytes()


def test_data_parallel_ranks_come_back_in_a_pipeline(rl_flags: list[str], tmp_path: Path) -> None:
    """Without a snapshot they get the last checkpoint, and train the rollouts since from what was kept."""
    flags = [*rl_flags, *TWO, "--pipeline", "async-partial", "--num-rollout", "4", *STRIKES]
    flags += ["--snapshot-interval", "0", "--save-interval", "2"]
    for name, strikes, more in (
        ("one", "", []),
        ("other", "SIGKILL 1 3 0", ["--replay-schedule", str(tmp_path / "one")]),
    ):
        folder = tmp_path / name
        more += ["--run-dir", str(folder), "--save-hf", str(folder / "hf")]
        run([*flags, *more], tmp_path, FUSIONRL_TEST_STRIKES=strikes)
    one, other = tmp_path / "one", tmp_path / "other"
    assert [back[1:] for back in restarts(other)] == [(2, 2, 1)]
    assert engines_started(other) == 1
    assert_equal(one, other)


def test_a_rank_hangs_and_one_has_lost_its_device(task: Path, tmp_path: Path) -> None:
    """A stopped rank is ended when the watchdog's time is over, and comes back; likewise where the network between the
    ranks drops everything. Then one dies and cannot start again on its device: the other rank trains the whole batches,
    and the curve is the same but for rounding."""
    flags = [*sft_flags(task), *TWO, "--rollout-batch-size", "32", "--lr", "1e-3", "--num-rollout", "8"]
    flags += [*STRIKES, "--custom-megatron-init-path", f"{HOOKS}:has_lost_its_device", "--save-interval", "8"]
    limit_s = 0.0
    for name, strikes, lost in (
        ("whole", "", ""),
        ("hangs", "SIGSTOP 0 2 0,DROPS 1 5 0", ""),
        ("smaller", "SIGKILL 1 3 0", "1"),
    ):
        more = ["--run-dir", str(tmp_path / name), "--save-hf", str(tmp_path / name / "hf")]
        more += ["--stall-timeout-s", str(limit_s)] if name == "hangs" else []
        run([*flags, *more], tmp_path, timeout_s=600, FUSIONRL_TEST_STRIKES=strikes, FUSIONRL_TEST_LOST=lost)
        limit_s = max(15.0, 2 * longest_phase_s(tmp_path / "whole"))  # longer than a start on this machine
    whole, hangs, smaller = (tmp_path / name for name in ("whole", "hangs", "smaller"))
    assert [back[1:] for back in restarts(hangs)] == [(2, 2, 0), (2, 5, 0)]
    assert "is stopped by a signal" in (hangs / "logs" / "driver.log").read_text()
    assert numbers(hangs) == numbers(whole), differing(whole, hangs)
    assert not weights_differ(whole / "hf", hangs / "hf")

    assert [back[1:] for back in restarts(smaller)] == [(1, 3, 0)]
    curve, expected = numbers(smaller), numbers(whole)
    assert list(curve) == list(expected) == list(range(1, 9))
    assert curve[3] == expected[3] and curve[8] != expected[8]
    for step, values in curve.items():
        assert values == pytest.approx(expected[step], rel=1e-4)


def nodes_of(address: str, kind: str) -> list[str]:
    """The nodes of the actors of a class. That of the Buffer is the driver's, which on one machine may join any."""
    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(address, None, True, False))
    try:
        actors = state.actor_table(None).values()
        return [actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"].endswith(kind)]
    finally:
        state.disconnect()


@pytest.fixture
def cluster(token: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Nodes of a made-up cluster, with one device each; it sees soon that one is dead."""
    from ray.cluster_utils import Cluster

    for name, value in {"period_ms": "1000", "timeout_ms": "3000", "failure_threshold": "3"}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", value)
    made = Cluster()
    try:
        made.add_node(num_cpus=0, include_dashboard=False)  # has the cluster's table, and stays
        yield made
    finally:
        made.shutdown()


def add_nodes(cluster: Any, count: int) -> list[Any]:
    options = {"num_cpus": 1, "resources": {"fusionrl_device": 1}, "include_dashboard": False}
    return [cluster.add_node(**options) for _ in range(count)]


def test_a_node_dies(cluster: Any, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of its rank is on the other node, too; the rank there trains the whole batches from it."""
    monkeypatch.setenv("FUSIONRL_TEST_WAIT_S", "0.5")
    flags = [*sft_flags(task), "--actor-num-nodes", "2", "--num-gpus-per-node", "1", "--rollout-batch-size", "32"]
    flags += ["--custom-megatron-before-train-step-hook-path", f"{HOOKS}:takes_its_time", "--num-rollout", "8"]
    folder, nodes = tmp_path / "run", add_nodes(cluster, 2)
    more = ["--ray-address", cluster.address, "--no-save", "--run-dir", str(folder)]
    with launch([*flags, *more], tmp_path) as launched:
        launched.wait_for(lambda: len(metrics_of(folder)) >= 3)
        (drivers,) = nodes_of(cluster.address, "BufferWorker")
        cluster.remove_node(next(node for node in nodes if node.node_id != drivers), allow_graceful=False)
        assert launched.wait() == 0, launched.output()[-3000:]
    ((_, devices, step, again),) = restarts(folder, 2 * MOST_S)  # Ray takes its time to say that the node is dead
    assert devices == 1 and step >= 1 and again <= 2
    assert sorted(numbers(folder)) == list(range(1, 9))


@pytest.mark.parametrize("num_spare", [1, 0])
def test_a_node_with_an_engine_dies(num_spare: int, cluster: Any, rl_flags: list[str], tmp_path: Path) -> None:
    """Another node takes the engine; without one the other engine serves alone until a node joins."""
    folder, nodes = tmp_path / "run", add_nodes(cluster, 3 + num_spare)
    flags = [*rl_flags, "--ray-address", cluster.address, "--rollout-num-gpus", "2", "--use-fault-tolerance"]
    flags += ["--num-rollout", "800", "--no-save"]
    with launch([*flags, "--run-dir", str(folder)], tmp_path) as launched:
        launched.wait_for(lambda: len(metrics_of(folder)) >= 3)
        kept = nodes_of(cluster.address, "BufferWorker") + nodes_of(cluster.address, "PolicyWorker")
        lost = next(node for node in nodes_of(cluster.address, "EngineWorker") if node not in kept)
        cluster.remove_node(next(node for node in nodes if node.node_id == lost), allow_graceful=False)
        if not num_spare:
            launched.wait_for(lambda: sum(row.get("sync/engines_left_out", 0) for row in metrics_of(folder)) >= 3)
            add_nodes(cluster, 1)
        launched.wait_for(lambda: re.search(r"^engine \d is back", launched.output(), re.MULTILINE) is not None)
        before = len(metrics_of(folder))
        launched.wait_for(lambda: len(metrics_of(folder)) >= before + 2)
        launched.process.terminate()
        assert launched.wait() == 143, launched.output()[-3000:]
    text = "a node of it is dead, and Ray gave no other device within 5 s; the run continues with 1 engine"
    assert num_spare or text in launched.output()
    rows = metrics_of(folder)  # after the last step the stop may have come before a push
    assert [row["step"] for row in rows] == list(range(len(rows))) and rows[-2]["sync/engines_left_out"] == 0
