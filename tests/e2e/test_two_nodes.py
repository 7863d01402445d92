"""The loop on two Ray nodes, so that nothing assumes one: engine and trainer stand on different nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_two_nodes(transport: str, rl_flags: list[str], tmp_path: Path) -> None:
    """Attached by --ray-address; by IPC the weights go to the other node by value."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"fusionrl_device": 1}, include_dashboard=False)
        run(
            [
                *rl_flags,
                "--ray-address",
                cluster.address,
                "--num-rollout",
                "1",
                "--no-save",
                "--device",
                "cpu",
            ]
            + ["--run-dir", str(tmp_path / "run"), "--verify-weights", "always"]
            + ["--update-weight-transport", transport],
            tmp_path,
        )
    finally:
        cluster.shutdown()
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["sync/verify_logprob_diff"] < 1e-4
    assert rows[-1]["train/logprob_diff_mean"] < 1e-4
