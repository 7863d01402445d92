"""The loop on two Ray nodes, so that nothing assumes one: engine and trainer stand on different nodes.

A cluster that asks for a token, and weights by broadcast: test_engine_groups.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionrl.base.nursery_client import FOLDER_VARIABLE
from tests.e2e.launch import metrics_of, run
from tests.warm_nursery import EngineBranch, SharedNursery

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


@pytest.fixture
def ray_mode(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, warm_nursery: SharedNursery
) -> Iterator[str]:
    """Whether the cluster asks for a token, "token" or "disabled"; this process, too, and the run.

    The nodes' servers are forks, as those of a cluster of the run's own are.
    """
    from ray._raylet import AuthenticationTokenLoader, Config

    def settle() -> None:
        Config.initialize("")  # read once, when ray was imported
        AuthenticationTokenLoader.instance().reset_cache()

    with monkeypatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", request.param)
        patch.setenv("RAY_AUTH_TOKEN", "ab" * 32)
        branch = EngineBranch(warm_nursery, "ab" * 32)
        patch.setenv(FOLDER_VARIABLE, branch.variables[FOLDER_VARIABLE])
        try:
            settle()
            yield request.param
        finally:
            branch.close()
    settle()


def _examine(flags: list[str], run_dir: Path) -> None:
    """`fusionrl doctor` looks at both nodes, and finds that there are too few."""
    command = [sys.executable, "-m", "fusionrl.cli", "doctor", "--json", *flags]
    command += ["--rollout-num-gpus", "5", "--run-dir", str(run_dir)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    found = {finding["check"]: finding for finding in json.loads(ran.stdout)}
    assert found["nodes"]["status"] == "fault" and found["nodes"]["fact"].startswith("2 nodes, 2 devices: "), ran.stderr
    assert found["nodes"]["fact"].endswith("the plan needs 6") and ran.returncode == 2
    assert found["shared"]["fact"] == "all 2 nodes see --run-dir and --hf-checkpoint"
    assert found["reach"]["fact"] == "all 2 nodes reach each other by TCP"
    assert {found[check]["status"] for check in ("versions", "shared", "reach", "clock", "collective")} == {"fact"}


@pytest.mark.parametrize("ray_mode", ["disabled"], indirect=True)
def test_two_nodes(ray_mode: str, rl_flags: list[str], tmp_path: Path) -> None:
    """Attached by --ray-address; by IPC the weights go to the other node by value. A cluster that asks for no token is
    joined when that is allowed, and not before."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"fusionrl_device": 1}, include_dashboard=False)
        flags = [*rl_flags, "--ray-address", cluster.address, "--num-rollout", "1"]
        refused = run([*flags, "--run-dir", str(tmp_path / "refused")], tmp_path, code=2)
        assert "--allow-open-ray" in refused.output()
        flags += ["--allow-open-ray"]
        _examine(flags, tmp_path / "run")
        flags += ["--no-save", "--verify-weights", "always", "--update-weight-transport", "ipc"]
        run([*flags, "--run-dir", str(tmp_path / "run")], tmp_path)
    finally:
        cluster.shutdown()
    assert not [*tmp_path.glob("**/.fusionrl-doctor-*")]
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["sync/verify_logprob_diff"] < 1e-4
    assert rows[-1]["train/logprob_diff_mean"] < 1e-4
