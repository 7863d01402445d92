"""Engines of different sizes and flags in one run; one of them spans two Ray nodes, and is lost in between."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e import holds
from tests.e2e.launch import launch, metrics_of
from tests.e2e.test_two_nodes import ray_mode  # noqa: F401  # a fixture

pytestmark = pytest.mark.e2e


def _servers(model: Path, *flags: str) -> list[psutil.Process]:
    """SGLang's servers of this model that were started with these flags; actors of a joined cluster bear no mark."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        text = " ".join(process.info["cmdline"] or []) + " "  # a fork shows its arguments as one
        if " -m fusionrl.engines.launch_server " in text and f" {model} " in text:
            found += [process] if all(f"{flag} " in text for flag in flags) else []
    return found


@pytest.mark.parametrize("ray_mode", ["token"], indirect=True)
def test_two_groups_of_which_one_engine_spans_two_nodes(
    ray_mode: str,  # noqa: F811
    rl_flags: list[str],
    task: Path,
    tmp_path: Path,
) -> None:
    """Devices 0 and 1 are on one node, 2 and 3 on the other: a trainer, an engine on 1 and 2, and one on 3.

    The cluster asks for a token, and the weights go by broadcast.
    The process on the second node is killed in a rollout: the engine ends as a whole, no sample is lost, and it is back
    with the weights."""
    from ray.cluster_utils import Cluster

    folder, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(task / "model", model)  # its path tells this run's servers from those of tests beside it
    wide = ["--tp-size 2", "--nnodes 2", "--max-total-tokens 16384"]
    small = ["--tp-size 1", "--max-total-tokens 32768", "--max-running-requests 16"]
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"fusionrl_device": 2}, include_dashboard=False)
        with launch(
            [*rl_flags, "--ray-address", cluster.address, "--num-rollout", "2", "--run-dir", str(folder), "--no-save"]
            + ["--hf-checkpoint", str(model), "--engine-group", "wide:num_gpus=2,per_engine=2,max-total-tokens=16384"]
            + ["--engine-group", "small:num_gpus=1,max-running-requests=16"]
            + ["--use-fault-tolerance", "--verify-weights", "always", "--update-weight-transport", "broadcast"]
            + ["--rollout-ignore-eos", "--rollout-max-response-len", "200"]
            + holds.flags(folder, rollouts=[0, 1]),
            tmp_path,
        ) as launched:
            holds.wait_for_held(launched, folder, 0)
            assert len(_servers(model)) == 3
            (head,), (part,) = (_servers(model, *wide, f"--node-rank {rank}") for rank in (0, 1))
            assert len(_servers(model, *small)) == 1
            holds.let_go(folder, 0)
            holds.wait_for_held(launched, folder, 1)
            part.send_signal(signal.SIGKILL)
            holds.let_go(folder, 1)
            assert launched.wait(300) == 0, launched.output()[-3000:]
        psutil.wait_procs([head], timeout=60)
        deadline = time.monotonic() + 60  # actors of a joined cluster may outlive the driver for a moment
        while _servers(model) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not head.is_running() and _servers(model) == []
    finally:
        cluster.shutdown()

    assert "by broadcast" in (folder / "plan.txt").read_text()
    rows = metrics_of(folder)
    assert [row["sync/version"] for row in rows] == [0, 1, 2]
    assert all(row["sync/verify_logprob_diff"] < 1e-4 for row in rows)  # of both engines
    assert rows[1]["train/logprob_diff_mean"] < 1e-4 and rows[2]["train/logprob_diff_mean"] < 1e-4
    assert [row["rollout/engines_died"] for row in rows[1:]] == [0, 1]
    assert [row["sync/engines_restarted"] for row in rows] == [0, 0, 1]
    assert "engine 0 part 1" in (folder / "logs" / "driver.log").read_text()
